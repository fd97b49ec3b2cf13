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
from ptxemu.compiled.loops import at, constant, counted, word_at

KNOWN_TYPES = ("bf16", "f16")
"""Types of the elements of A and B."""
_PER_CHUNK, _ROWS = 8, 16
MOST_COLUMNS = 256
_AT_ONCE = 4
"""Rows of D."""
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_NAN_F32 = 0x7FFFFFFF
_DOUBLE_BYTES = 8


@cache
def chunk_reader(type_: str) -> Callable[..., int]:
    """The function (memory, numbers of chunks, how many chunks, out) for a type of `KNOWN_TYPES`.

    All but the count are addresses; a chunk's number counts 16 bytes from `memory` on.
    """

    def write(b: Any, arguments: Sequence[Any]) -> None:
        memory, chunks, count, out = arguments
        with counted(b, count) as number:
            place = b.add(memory, b.shl(word_at(b, chunks, number), constant(4)))
            raw = b.load(at(b, place, ir.VectorType(_I16, _PER_CHUNK)), align=1)
            to = at(b, out, ir.VectorType(_DOUBLE, _PER_CHUNK), number)
            b.store(_as_doubles(b, raw, type_), to, align=_DOUBLE_BYTES)
        b.ret(constant(0))

    return make_builtin(f"read_{type_}", 4, write)


@cache
def matrix_reader(type_: str) -> Callable[..., int]:
    """The function that reads a matrix of chunks to where its elements lie apart.

    Its arguments: memory, the address of the chunks' numbers (lines, chunks of a line) and these
    two; then where to, and the bytes between lines, between chunks and between elements there.
    """

    def write(b: Any, arguments: Sequence[Any]) -> None:
        memory, chunks, lines, per_line, out, *strides = arguments
        of_line, of_chunk, of_element = strides
        places = [b.mul(of_element, constant(number)) for number in range(_PER_CHUNK)]
        with counted(b, lines) as line:
            numbers = b.add(chunks, b.shl(b.mul(line, per_line), constant(3)))
            to_line = b.add(out, b.mul(line, of_line))
            with counted(b, per_line) as number:
                place = b.add(memory, b.shl(word_at(b, numbers, number), constant(4)))
                raw = b.load(at(b, place, ir.VectorType(_I16, _PER_CHUNK)), align=1)
                values = _as_doubles(b, raw, type_)
                to = b.add(to_line, b.mul(number, of_chunk))
                for element, further in enumerate(places):
                    value = b.extract_element(values, ir.Constant(_I32, element))
                    b.store(value, at(b, b.add(to, further), _DOUBLE))
        b.ret(constant(0))

    return make_builtin(f"read_matrix_{type_}", 8, write)


def _as_doubles(b: Any, raw: Any, type_: str) -> Any:
    floats, halves = (ir.VectorType(t, _PER_CHUNK) for t in (_FLOAT, ir.HalfType()))
    if type_ == "f16":
        as_floats = b.fpext(b.bitcast(raw, halves), floats)
    else:
        wide = b.zext(raw, ir.VectorType(_I32, _PER_CHUNK))
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

    def write(b: Any, arguments: Sequence[Any]) -> None:
        a, a_row, a_column, right, b_column, b_row, n, registers, places, reads, negates = arguments
        reads_d, is_negated = (
            b.icmp_unsigned("!=", flag, constant(0)) for flag in (reads, negates)
        )
        left = _columns_of_a(b, (a, a_row, a_column), k)
        row_places = [b.mul(b_row, constant(row)) for row in range(k)]
        with counted(b, b.lshr(n, constant(1))) as pair:
            eighth, part = b.lshr(pair, constant(2)), b.and_(pair, constant(3))
            for odd in range(2):
                column = b.add(b.shl(pair, constant(1)), constant(odd))
                place = b.add(right, b.mul(column, b_column))
                sums = _column_of_product(b, left, place, row_places)
                sums = b.select(is_negated, b.fneg(sums), sums)
                for half in range(2):
                    number = b.add(b.shl(eighth, constant(2)), constant(2 * half + odd))
                    register = b.add(registers, word_at(b, places, number))
                    first_lane = b.add(register, b.shl(part, constant(2)))
                    _add_to_lanes(b, first_lane, sums, half, reads_d)
        b.ret(constant(0))

    return make_builtin(f"fragment_product_{k}", 11, write)


@cache
def row_product(k: int) -> Callable[..., int]:
    """The function that adds A times B to rows of D of f32, or puts it there.

    Its arguments: A, its rows of `k` one after another; B, `k` rows of MOST_COLUMNS; columns, a
    multiple of 8; rows, a multiple of 4; D, bytes between its rows; whether D is read.
    """

    def write(b: Any, arguments: Sequence[Any]) -> None:
        a, right, columns, rows, d, d_row, reads = arguments
        reads_d = b.icmp_unsigned("!=", reads, constant(0))
        type_ = ir.VectorType(_DOUBLE, _PER_CHUNK)
        with counted(b, rows, _AT_ONCE) as row:
            of_a = at(b, b.add(a, b.mul(row, constant(k * _DOUBLE_BYTES))), _DOUBLE)
            of_d = b.add(d, b.mul(row, d_row))
            with counted(b, columns, _PER_CHUNK) as column:
                of_b = at(b, right, _DOUBLE, column)
                sums = [ir.Constant(type_, [0.0] * _PER_CHUNK)] * _AT_ONCE
                for number in range(k):
                    place = b.gep(of_b, [constant(number * MOST_COLUMNS)])
                    values = b.load(b.bitcast(place, type_.as_pointer()), align=_DOUBLE_BYTES)
                    for one in range(_AT_ONCE):
                        factor = b.load(b.gep(of_a, [constant(one * k + number)]))
                        sums[one] = _fused(b, _splat(b, factor, type_), values, sums[one])
                place = b.add(of_d, b.shl(column, constant(2)))
                for one in range(_AT_ONCE):
                    _add_to_row(b, place, sums[one], reads_d)
                    place = b.add(place, d_row)
        b.ret(constant(0))

    return make_builtin(f"row_product_{k}", 7, write)


def _add_to_row(b: Any, place: Any, sums: Any, reads_d: Any) -> None:
    old = b.load(at(b, place, ir.VectorType(_FLOAT, _PER_CHUNK)), align=4)
    bits = rounded(b, b.select(reads_d, b.fadd(b.fpext(old, sums.type), sums), sums))
    b.store(bits, at(b, place, bits.type), align=4)


def _columns_of_a(b: Any, a: tuple[Any, Any, Any], k: int) -> Any:
    """The columns of A, 16 rows each, in memory of the function's own."""
    address, a_row, a_column = a
    left = b.alloca(ir.VectorType(_DOUBLE, _ROWS), size=k)
    elements = b.ptrtoint(left, constant(0).type)
    with counted(b, constant(k)) as column, counted(b, constant(_ROWS)) as row:
        place = b.add(address, b.add(b.mul(column, a_column), b.mul(row, a_row)))
        index = b.add(b.mul(column, constant(_ROWS)), row)
        b.store(b.load(at(b, place, _DOUBLE)), at(b, elements, _DOUBLE, index))
    return left


def _column_of_product(b: Any, left: Any, column: Any, places: Sequence[Any]) -> Any:
    """16 rows of A times a column of B at an address; where its elements are from there on."""
    type_ = ir.VectorType(_DOUBLE, _ROWS)
    sums = ir.Constant(type_, [0.0] * _ROWS)
    for row, place in enumerate(places):
        factor = b.load(at(b, b.add(column, place), _DOUBLE))
        of_a = b.load(b.gep(left, [constant(row)]))
        sums = _fused(b, of_a, _splat(b, factor, type_), sums)
    return sums


def _fused(b: Any, one: Any, other: Any, sums: Any) -> Any:
    type_ = sums.type
    name = f"llvm.fma.v{type_.count}f64"
    fma = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(type_, [type_] * 3), name=name
    )
    return b.call(fma, [one, other, sums])


def _splat(b: Any, value: Any, type_: Any) -> Any:
    zero = ir.Constant(_I32, 0)
    vector = b.insert_element(ir.Constant(type_, ir.Undefined), value, zero)
    mask = ir.Constant(ir.VectorType(_I32, type_.count), [0] * type_.count)
    return b.shuffle_vector(vector, vector, mask)


def _add_to_lanes(b: Any, first: Any, sums: Any, half: int, reads_d: Any) -> None:
    """Eight of the sums go to every fourth lane of a register from `first` on."""
    floats, doubles = (ir.VectorType(type_, 8) for type_ in (_FLOAT, _DOUBLE))
    numbers = ir.Constant(ir.VectorType(_I32, 8), [8 * half + row for row in range(8)])
    new = b.shuffle_vector(sums, sums, numbers)
    old = ir.Constant(floats, ir.Undefined)
    for row in range(8):
        value = b.load(at(b, first, _FLOAT, 4 * row))
        old = b.insert_element(old, value, ir.Constant(_I32, row))
    new = b.select(reads_d, b.fadd(b.fpext(old, doubles), new), new)
    bits = rounded(b, new)
    for row in range(8):
        b.store(b.extract_element(bits, ir.Constant(_I32, row)), at(b, first, _I32, 4 * row))


def rounded(b: Any, values: Any) -> Any:
    """The bits of doubles as f32; a NaN is the canonical one."""
    count = values.type.count
    words = ir.VectorType(_I32, count)
    as_floats = b.fptrunc(values, ir.VectorType(_FLOAT, count))
    is_nan = b.fcmp_unordered("uno", as_floats, as_floats)
    return b.select(is_nan, ir.Constant(words, [_NAN_F32] * count), b.bitcast(as_floats, words))
