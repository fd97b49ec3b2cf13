"""What one streaming multiprocessor and one CTA of an architecture have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """The limits that plans are held against.

    Source: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
    Compute Capability".

    Attributes:
        smem_bytes: shared memory of one CTA at most (opt-in), in bytes.
        registers: 32-bit registers of one SM, and of one CTA.
        max_threads: threads of one CTA. num_sms: of the full product (H100/H200 SXM, B200).
        tmem_columns: of tensor memory, 128 lanes of 32 bits each (PTX ISA, "Tensor Memory").
    """

    name: str
    smem_bytes: int
    registers: int
    max_threads: int
    num_sms: int
    tmem_columns: int = 0


SM90 = ArchSpec(name="sm_90a", smem_bytes=232_448, registers=65_536, max_threads=1024, num_sms=132)
SM100 = ArchSpec(
    name="sm_100a",
    smem_bytes=232_448,
    registers=65_536,
    max_threads=1024,
    num_sms=148,
    tmem_columns=512,
)
