"""Facts about the architectures, numbers with the manual's section: which GPUs, which limits."""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
"""Threads of a warp."""
WARPGROUP_SIZE = 128
"""Threads of a warpgroup: four warps that follow each other (PTX ISA, "Warpgroup")."""
SM_PARTITIONS = 4
"""Partitions of a streaming multiprocessor, each with its own warps and registers."""
REGISTER_STEP = 8
"""Step in which registers of a thread are allocated."""
MAX_REGISTERS = 255
"""Registers of a thread (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""
MAX_CLUSTER_SIZE = 16
"""CTAs of the largest cluster; more than 8 need the launch to allow non-portable sizes."""
MAX_MBARRIER_COUNT = 2**20 - 1
"""Most arrivals, and bytes in flight, of a phase (PTX ISA, "mbarrier object", contents)."""
MBARRIER_BYTES = 8
BULK_ALIGNMENT = 16
"""Alignment in bytes of every address of a bulk copy, a tensor map or a 16-byte move (PTX ISA,
"cp.async.bulk")."""
SECTOR_BYTES = 32
"""Bytes that the second-level cache moves at once."""
TMEM_LANES = 128
"""Rows of tensor memory; a warp of a warpgroup reaches 32 of them (PTX ISA, "Tensor Memory")."""
TMEM_LEAST_ALLOCATION = 32
"""Columns of the smallest allocation; all are powers of two (PTX ISA, "tcgen05.alloc")."""
_SMEM_BYTES = 232_448
"""Shared memory that one CTA can ask for, 227 KiB; the same on both architectures."""


@dataclass(frozen=True)
class ArchSpec:
    """A family of GPUs that run the same kernels, and the limits that plans are held against.

    Source: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
    Compute Capability"; of targets PTX ISA, "PTX Module Directives: .target".

    Attributes:
        name: of the GPU that the limits are of, as PTX calls it.
        backend: the name of its kernels' backend.
        target: what its kernels are compiled for. PTX for a target that ends in "a" runs on this
            GPU alone; for one that ends in "f" on those of the same major capability from it on.
        capabilities: compute capabilities of the GPUs that run the kernels.
        smem_bytes: shared memory of one CTA at most (opt-in), in bytes.
        registers: 32-bit registers of one SM, and of one CTA.
        num_sms: of the full product (H100/H200 SXM, B200).
        tmem_columns: of tensor memory, `TMEM_LANES` cells of 32 bits each.
    """

    name: str
    backend: str
    target: str
    capabilities: tuple[tuple[int, int], ...]
    smem_bytes: int
    registers: int
    num_sms: int
    tmem_columns: int = 0


SM90 = ArchSpec(
    name="sm_90a",
    backend="sm90",
    target="sm_90a",
    capabilities=((9, 0),),
    smem_bytes=_SMEM_BYTES,
    registers=65_536,
    num_sms=132,
)
SM100 = ArchSpec(
    name="sm_100a",
    backend="sm100",
    target="sm_100f",
    capabilities=((10, 0), (10, 3)),
    smem_bytes=_SMEM_BYTES,
    registers=65_536,
    num_sms=148,
    tmem_columns=512,
)
"""B200, and B300 of capability 10.3 (sm_103a), on which nobody has run a kernel."""
ARCHITECTURES = {arch.name: arch for arch in (SM90, SM100)}
