"""Products of the tensor cores on float64, as `numerics.dot` has them, in machine code.

A matrix comes in chunks of 16 bytes and is kept as float64, a chunk's elements one after another.
Sums are made in order of k; where they are exact, as `numerics.dot` says, the order does not
matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from ptxemu.compiled.builtins import make_builtin
from ptxemu.compiled.loops import I32, I64, Value, constant, counted
from ptxemu.compiled.lowering import intrinsic

KNOWN_TYPES = ("bf16", "f16")
"""Types of the elements of A and B."""
_PER_CHUNK, _ROWS = 8, 16
MOST_COLUMNS = 256
_AT_ONCE = 4
"""Rows of D."""
_I16 = ir.IntType(16)
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_NAN_F32 = 0x7FFFFFFF
_DOUBLE_BYTES = 8


@cache
def chunk_reader(type_: str) -> Callable[..., int]:
    """The function (memory, numbers of chunks, how many chunks, out) for a type of `KNOWN_TYPES`.

    All but the count are addresses; a chunk's number counts 16 bytes from `memory` on.
    """

    def write(b: Any, arguments: Sequence[Value]) -> None:
        memory, chunks, count, out = arguments
        with counted(b, count) as number:
            values = _read_chunk(memory, chunks[number], type_)
            b.store(values, out.pointer(values.type, number), align=_DOUBLE_BYTES)
        b.ret(constant(0))

    return make_builtin(f"read_{type_}", 4, write)


@cache
def matrix_reader(type_: str) -> Callable[..., int]:
    """The function that reads a matrix of chunks to where its elements lie apart.

    Its arguments: memory, the address of the chunks' numbers (lines, chunks of a line) and these
    two; then where to, and the bytes between lines, between chunks and between elements there.
    """

    def write(b: Any, arguments: Sequence[Value]) -> None:
        memory, chunks, lines, per_line, out, of_line, of_chunk, of_element = arguments
        places = [of_element * number for number in range(_PER_CHUNK)]
        with counted(b, lines) as line, counted(b, per_line) as number:
            values = _read_chunk(memory, chunks[line * per_line + number], type_)
            to = out + line * of_line + number * of_chunk
            for element, further in enumerate(places):
                value = b.extract_element(values, ir.Constant(I32, element))
                b.store(value, (to + further).pointer(_DOUBLE))
        b.ret(constant(0))

    return make_builtin(f"read_matrix_{type_}", 8, write)


def _read_chunk(memory: Value, number: Value, type_: str) -> Any:
    """The elements of a chunk, as doubles."""
    chunk: Value = memory + (number << 4)
    raw = memory.b.load(chunk.pointer(ir.VectorType(_I16, _PER_CHUNK)), align=1)
    return _as_doubles(memory.b, raw, type_)


def _as_doubles(b: Any, raw: Any, type_: str) -> Any:
    floats, halves = (ir.VectorType(t, _PER_CHUNK) for t in (_FLOAT, ir.HalfType()))
    if type_ == "f16":
        as_floats = b.fpext(b.bitcast(raw, halves), floats)
    else:
        wide = b.zext(raw, ir.VectorType(I32, _PER_CHUNK))
        high = b.shl(wide, ir.Constant(wide.type, [16] * _PER_CHUNK))
        as_floats = b.bitcast(high, floats)
    return b.fpext(as_floats, ir.VectorType(_DOUBLE, _PER_CHUNK))


@cache
def fragment_product(k: int) -> Callable[..., int]:
    """The function that adds 16 rows of A times B to the registers of a wgmma's D, of f32.

    Its arguments: A, bytes between its rows and between its columns; B, bytes between its columns
    (n) and between its rows (k); how many columns; the register file; where in it each register
    of D is (64 bits each); whether D is read; whether the product is negated.
    """

    def write(b: Any, arguments: Sequence[Value]) -> None:
        a, a_row, a_column, right, b_column, b_row, n, registers, places, reads, negates = arguments
        reads_d, is_negated = reads != 0, negates != 0
        left = _columns_of_a((a, a_row, a_column), k)
        row_places = [b_row * row for row in range(k)]
        with counted(b, n.shifted_right(1)) as pair:
            eighth, part = pair.shifted_right(2), pair & 3
            for odd in range(2):
                place = right + ((pair << 1) + odd) * b_column
                sums = _column_of_product(left, place, row_places)
                sums = b.select(is_negated.ir, b.fneg(sums), sums)
                for half in range(2):
                    register = registers + places[(eighth << 2) + (2 * half + odd)]
                    _add_to_lanes(register + (part << 2), sums, half, reads_d)
        b.ret(constant(0))

    return make_builtin(f"fragment_product_{k}", 11, write)


@cache
def row_product(k: int) -> Callable[..., int]:
    """The function that adds A times B to rows of D of f32, or puts it there.

    Its arguments: A, its rows of `k` one after another; B, `k` rows of MOST_COLUMNS; columns, a
    multiple of 8; rows, a multiple of 4; D, bytes between its rows; whether D is read.
    """

    def write(b: Any, arguments: Sequence[Value]) -> None:
        a, right, columns, rows, d, d_row, reads = arguments
        reads_d = reads != 0
        type_ = ir.VectorType(_DOUBLE, _PER_CHUNK)
        with counted(b, rows, _AT_ONCE) as row:
            of_a, of_d = a + row * (k * _DOUBLE_BYTES), d + row * d_row
            with counted(b, columns, _PER_CHUNK) as column:
                of_b = right + column * _DOUBLE_BYTES
                sums = [ir.Constant(type_, [0.0] * _PER_CHUNK)] * _AT_ONCE
                for number in range(k):
                    place = (of_b + number * MOST_COLUMNS * _DOUBLE_BYTES).pointer(type_)
                    values = b.load(place, align=_DOUBLE_BYTES)
                    for one in range(_AT_ONCE):
                        factor = b.load(of_a.pointer(_DOUBLE, one * k + number))
                        sums[one] = _fused(b, _splat(b, factor, type_), values, sums[one])
                place = of_d + (column << 2)
                for one in range(_AT_ONCE):
                    _add_to_row(place, sums[one], reads_d)
                    place = place + d_row
        b.ret(constant(0))

    return make_builtin(f"row_product_{k}", 7, write)


def _add_to_row(place: Value, sums: Any, reads_d: Value) -> None:
    b = place.b
    old = b.load(place.pointer(ir.VectorType(_FLOAT, _PER_CHUNK)), align=4)
    bits = rounded(b, b.select(reads_d.ir, b.fadd(b.fpext(old, sums.type), sums), sums))
    b.store(bits, place.pointer(bits.type), align=4)


def _columns_of_a(a: tuple[Value, Value, Value], k: int) -> Value:
    """The address of the columns of A, 16 rows each, in memory of the function's own."""
    address, a_row, a_column = a
    b = address.b
    left = Value(b, b.ptrtoint(b.alloca(ir.VectorType(_DOUBLE, _ROWS), size=k), I64))
    with counted(b, k) as column, counted(b, _ROWS) as row:
        element = b.load((address + (column * a_column + row * a_row)).pointer(_DOUBLE))
        b.store(element, left.pointer(_DOUBLE, column * _ROWS + row))
    return left


def _column_of_product(left: Value, column: Value, places: Sequence[Value]) -> Any:
    """16 rows of A times a column of B at an address; where its elements are from there on."""
    b, type_ = left.b, ir.VectorType(_DOUBLE, _ROWS)
    sums = ir.Constant(type_, [0.0] * _ROWS)
    for row, place in enumerate(places):
        factor = b.load((column + place).pointer(_DOUBLE))
        of_a = b.load(left.pointer(type_, row))
        sums = _fused(b, of_a, _splat(b, factor, type_), sums)
    return sums


def _fused(b: Any, one: Any, other: Any, sums: Any) -> Any:
    name = f"llvm.fma.v{sums.type.count}f64"
    return b.call(intrinsic(b, name, sums.type, 3), [one, other, sums])


def _splat(b: Any, value: Any, type_: Any) -> Any:
    zero = ir.Constant(I32, 0)
    vector = b.insert_element(ir.Constant(type_, ir.Undefined), value, zero)
    mask = ir.Constant(ir.VectorType(I32, type_.count), [0] * type_.count)
    return b.shuffle_vector(vector, vector, mask)


def _add_to_lanes(first: Value, sums: Any, half: int, reads_d: Value) -> None:
    """Eight of the sums go to every fourth lane of a register from `first` on."""
    b = first.b
    floats, doubles = (ir.VectorType(type_, 8) for type_ in (_FLOAT, _DOUBLE))
    numbers = ir.Constant(ir.VectorType(I32, 8), [8 * half + row for row in range(8)])
    new = b.shuffle_vector(sums, sums, numbers)
    old = ir.Constant(floats, ir.Undefined)
    for row in range(8):
        value = b.load(first.pointer(_FLOAT, 4 * row))
        old = b.insert_element(old, value, ir.Constant(I32, row))
    new = b.select(reads_d.ir, b.fadd(b.fpext(old, doubles), new), new)
    bits = rounded(b, new)
    for row in range(8):
        b.store(b.extract_element(bits, ir.Constant(I32, row)), first.pointer(I32, 4 * row))


def rounded(b: Any, values: Any) -> Any:
    """The bits of doubles as f32; a NaN is the canonical one."""
    count = values.type.count
    words = ir.VectorType(I32, count)
    as_floats = b.fptrunc(values, ir.VectorType(_FLOAT, count))
    is_nan = b.fcmp_unordered("uno", as_floats, as_floats)
    return b.select(is_nan, ir.Constant(words, [_NAN_F32] * count), b.bitcast(as_floats, words))
