"""What the Blackwell kernels say in PTX: cluster hand-overs, gathers, 16-byte moves, swizzles."""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Vector, cute
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.experimental import primitives as prims

SHARED = 3
"""LLVM's address space of shared memory."""


def shared_pointer(address: Any) -> Any:
    """An LLVM pointer from an address in this CTA's shared memory."""
    return llvm.inttoptr(llvm.PointerType.get(SHARED), Int32(address).ir_value())


def load_words(address: Any, dtype: Any) -> Any:
    """16 bytes of shared memory as a Vector of four words; `dtype`: Int32 or Float32."""
    return prims.load_ext(shared_pointer(address), dtype=dtype, count=4)


def store_words(address: Any, words: Sequence[Any]) -> None:
    """Four 32-bit words to 16 bytes of shared memory."""
    values = [Int32(word) for word in words]
    prims.store_ext(Vector.from_elements(values, Int32), shared_pointer(address))


def store_float(address: Any, value: Any) -> None:
    """One fp32 to shared memory."""
    prims.store_ext(Float32(value), shared_pointer(address))


def swizzled_128(row: Any, unit: Any) -> Any:
    """Byte offset of 16-byte `unit` (0-7) of a row of 128 bytes, from a multiple of 1024."""
    return row * 128 + ((unit ^ (row & 7)) << 4)


def swizzled_64(row: Any, unit: Any) -> Any:
    """The same for rows of 64 bytes; `unit` 0-3."""
    return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4)


def in_peer(address: Any, peer: Any) -> Any:
    """The shared::cluster address of what lies at `address` in another CTA of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(peer)],
    )


def store_async(address: Any, words: Sequence[Any], barrier: Any) -> None:
    """16 bytes to the peer; completes 16 bytes of its barrier. Both addresses are shared::cluster.

    PTX ISA, "st.async": the completion has release semantics at cluster scope, so the peer's
    acquire at cluster scope sees the words.
    """
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *[Int32(word) for word in words], barrier],
    )


def arrive_at_peer(barrier: Any, peer: Any) -> None:
    """Arrive at the peer's barrier; what this thread has read or written is done before."""
    cute.arch.mbarrier_arrive(barrier, peer, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def wait_for_peer(barrier: Any, parity: Int32) -> None:
    """Wait for a phase in which the peer takes part: acquire at cluster scope."""
    done = prims.mbarrier_try_wait_parity(
        barrier.to_llvm_ptr(), parity, scope="cluster", order="acquire"
    )
    while not done:
        done = prims.mbarrier_try_wait_parity(
            barrier.to_llvm_ptr(), parity, scope="cluster", order="acquire"
        )


def gather_four(
    address: Any, tensor_map: Any, column: Any, rows: Sequence[Any], barrier: Any
) -> None:
    """Four rows of a box, one behind the other; rows outside of the tensor come as zeros.

    PTX ISA, "cp.async.bulk.tensor", .tile::gather4.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[
            Int32(address),
            tensor_map,
            Int32(column),
            *rows,
            Int32(barrier.toint()),
        ],
    )
