"""16-byte moves, single words and 16 bits of shared memory."""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Vector, cute
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives as prims

from flashdsa.dsl import ptx

SHARED = 3
"""LLVM's address space of shared memory."""
VECTOR = 4
"""32-bit words of a 16-byte move."""
VECTOR_BYTES = 16


def load4(array: cute.Tensor, index: Any) -> Any:
    """Load elements 4 index to 4 index + 3 of a vector of 32-bit words, in one load."""
    return _four(array, index).load()


def store4(array: cute.Tensor, index: Any, values: Any) -> None:
    """Store elements 4 index to 4 index + 3, in one store."""
    _four(array, index).store(values)


def _four(array: cute.Tensor, index: Any) -> cute.Tensor:
    pointer = (array.iterator + VECTOR * index).align(VECTOR_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


@cute.jit
def clear(
    array: cute.Tensor, thread: Int32, end: Int32, threads: Any, unroll: cutlass.Constexpr = 4
) -> None:
    """Set words 4 i to 4 i + 3 of an array to 0 for i = thread, thread + threads, ... below
    `end`."""
    nothing = cute.make_rmem_tensor(VECTOR, Int32)
    nothing.fill(0)
    for at in cutlass.range(thread, end, threads, unroll=unroll):
        store4(array, at, nothing.load())


def shared_pointer(address: Any) -> Any:
    """An LLVM pointer from an address in this CTA's shared memory."""
    return llvm.inttoptr(llvm.PointerType.get(SHARED), Int32(address).ir_value())


def load_words(address: Any, dtype: Any) -> Any:
    """Load 16 bytes of shared memory as a Vector of four words; `dtype`: Int32 or Float32."""
    return prims.load_ext(shared_pointer(address), dtype=dtype, count=VECTOR)


def store_words(address: Any, words: Sequence[Any]) -> None:
    """Store four 32-bit words to 16 bytes of shared memory."""
    values = [Int32(word) for word in words]
    prims.store_ext(Vector.from_elements(values, Int32), shared_pointer(address))


def store_float(address: Any, value: Any) -> None:
    """Store one fp32 to shared memory."""
    prims.store_ext(Float32(value), shared_pointer(address))


def load_float(address: Any) -> Any:
    """Load one fp32 from shared memory."""
    return prims.load_ext(shared_pointer(address), dtype=Float32)


def load_half(address: Int32) -> Int32:
    """Load 16 bits from shared memory."""
    return ptx.word(
        "{ .reg .b16 half; ld.shared.u16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }", address
    )


def store_half_if(taken: Int32, address: Int32, value: Int32) -> None:
    """Store the low 16 bits of a word to shared memory if `taken` is not 0, by a predicate."""
    ptx.run(
        "{ .reg .pred p; .reg .b16 half; setp.ne.s32 p, {$r0}, 0; cvt.u16.u32 half, {$r2}; "
        "@p st.shared.b16 [{$r1}], half; }",
        taken,
        address,
        value,
    )
