"""wgmma.mma_async through inline PTX, with the descriptors in hand; CuTe's own form hides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

_SWIZZLE_CODES = {"INTER": 0, "SW128": 1, "SW64": 2, "SW32": 3}


def matrix_descriptor(address: Any, leading: int, stride: int, swizzle: str) -> Any:
    """The 64 bits of a matrix descriptor (PTX ISA, "Matrix Descriptor Format").

    Args:
        address: shared memory address, a multiple of 16. leading, stride: LBO and SBO in bytes.
        swizzle: "INTER", "SW32", "SW64" or "SW128".
    """
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | _SWIZZLE_CODES[swizzle] << 62
    if fixed >= 1 << 63:
        fixed -= 1 << 64
    return (Int64(address) & Int64(0x3FFFF)) >> Int64(4) | Int64(fixed)


ATOM_BYTES = 1024
"""Eight rows of 128 bytes: the stride between the atoms of the 128-byte swizzle."""
CHUNK_BYTES = 8 * ATOM_BYTES
"""Bytes of 64 rows: the stride from their columns to the next columns."""


def along_k(address: Any) -> Any:
    """Low word of the descriptor of rows of 128 bytes, 128-byte swizzle, at a shared memory address
    that is a multiple of 16; a row's columns are along K of the product."""
    return Int32(matrix_descriptor(address, 16, ATOM_BYTES, "SW128"))


def along_n(address: Any) -> Any:
    """Same as `along_k`, for chunks of 64 rows; a row's columns are along N, or M, and the rows
    along K."""
    return Int32(matrix_descriptor(address, CHUNK_BYTES, ATOM_BYTES, "SW128"))


def low_word_behind(low: Any, offset: Any) -> Any:
    """The low word of the descriptor `offset` bytes on, a multiple of 16."""
    return low + (offset >> 4)


def descriptor_behind(low: Any, offset: int) -> Any:
    """The descriptor `offset` bytes after that of `low`. Only low words differ."""
    high = (ATOM_BYTES >> 4 | 1 << 30) << 32
    return Int64(Uint32(low_word_behind(low, offset))) | Int64(high)


def mma_async(
    opcode: str,
    accumulators: Sequence[Any],
    a: Any,
    b: Any,
    *,
    accumulate: Any,
    transposes: Sequence[int],
) -> list[Any]:
    """D = A B (+ D) for the warpgroup; returns D's registers, the MMA's until it is waited for.

    Args:
        opcode: "wgmma.mma_async.sync.aligned.m64n...".
        accumulators: this thread's n / 2 fp32 of D.
        a: a descriptor, or the thread's four 32-bit registers of A.
        accumulate: whether D is added; a bool, or Int32, the same of all threads.
        transposes: imm-trans-a (where A is in shared memory) and imm-trans-b; () where the type
            has none.
    """
    from_registers = isinstance(a, list | tuple)
    count = len(accumulators)
    d = ", ".join(f"${i}" for i in range(count))
    inputs = [*a, b] if from_registers else [a, b]
    is_known = isinstance(accumulate, bool)
    added = int(accumulate) if is_known else f"${2 * count + len(inputs)}"
    names = [f"${2 * count + i}" for i in range(len(inputs))]
    left = "{" + ", ".join(names[:-1]) + "}" if from_registers else names[0]
    immediates = "".join(f", {value}" for value in ("p", 1, 1, *transposes))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {added}, 0; "
        f"{opcode} {{{d}}}, {left}, {names[-1]}{immediates}; }}"
    )
    # D's registers are outputs tied to inputs, so that they stay the same registers.
    constraints = ["=f"] * count + [str(i) for i in range(count)]
    constraints += ["r" if from_registers else "l"] * (len(inputs) - 1) + ["l"]
    values = [Float32(value).ir_value() for value in accumulators]
    values += [value.ir_value() for value in inputs]
    if not is_known:
        constraints.append("r")
        values.append(Int32(accumulate).ir_value())
    result = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type] * count),
        values,
        text,
        ",".join(constraints),
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, result, [i])) for i in range(count)]


def multiply_bf16(
    acc: Any, columns: int, a: Any, b: Any, *, accumulate: Any, transposes: Sequence[int]
) -> None:
    """Issue acc = A B (+ acc) of bf16, 64 rows and 16 along K.

    Args:
        acc: this thread's columns / 2 fp32, or more, of which these are the first. The rest as in
            `mma_async`.
    """
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    own = [acc[i] for i in range(columns // 2)]
    values = mma_async(opcode, own, a, b, accumulate=accumulate, transposes=transposes)
    for i, value in enumerate(values):
        acc[i] = value
