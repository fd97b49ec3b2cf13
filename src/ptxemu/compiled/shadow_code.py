"""Shadow memory in machine code: which states the granules of an access are in, and new ones.

Granules are 32-bit numbers of states in an array. An access is of pieces, each a run of `length`
granules: pieces of memory that start at given bytes, or rows of one distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

from llvmlite import ir

from ptxemu.compiled.builtins import make_builtin
from ptxemu.compiled.loops import at, constant, counted, require, word_at

_I32 = ir.IntType(32)
OUTSIDE = -(1 << 40)
"""What a scan gives if a granule is not in the array."""
_Find: TypeAlias = Callable[[Any, Sequence[Any], Any], Any]
"""With a builder, arguments and the number of a piece the piece's first granule."""


class Work(IntEnum):
    """Words of what the functions work with: addresses of arrays with a number for each state."""

    MARKS = 0
    """The last scan in which a state was found."""
    FOUND = 1
    """The states that a scan found, in the order in which it did."""
    NEW = 2
    """The new states by the old ones."""
    SCAN = 3
    """How many scans there were."""


@cache
def scan_pieces() -> Callable[..., int]:
    """The function (granules, how many, starts as bytes, base, shift, pieces, length, work).

    It gives the state of all granules, or how many states there are, negative.
    """
    return make_builtin("scan_pieces", 8, lambda b, a: _scan(b, a, _piece, a[5]), buffers={2})


@cache
def scan_rows() -> Callable[..., int]:
    """The function (granules, how many, first, stride, 0, rows, length, work), as `scan_pieces`."""
    return make_builtin("scan_rows", 8, lambda b, a: _scan(b, a, _row, a[5]))


@cache
def put_pieces() -> Callable[..., int]:
    """The function (granules, value, starts as bytes, base, shift, pieces, length, work).

    Granules, which have been scanned, get the state `value`; if that is negative, each the one that
    is NEW for its own, and none may be in two pieces.
    """
    return make_builtin("put_pieces", 8, lambda b, a: _put(b, a, _piece), buffers={2})


@cache
def put_rows() -> Callable[..., int]:
    """The function (granules, value, first, stride, 0, rows, length, work), as `put_pieces`."""
    return make_builtin("put_rows", 8, lambda b, a: _put(b, a, _row))


def _piece(b: Any, arguments: Sequence[Any], number: Any) -> Any:
    starts, base, shift = arguments[2:5]
    return b.ashr(b.sub(word_at(b, starts, number), base), shift)


def _row(b: Any, arguments: Sequence[Any], number: Any) -> Any:
    first, stride = arguments[2:4]
    return b.add(first, b.mul(number, stride))


def _scan(b: Any, arguments: Sequence[Any], find: _Find, pieces: Any) -> None:
    granules, how_many, *_, length, work = arguments
    failed = b.append_basic_block("failed")
    ir.IRBuilder(failed).ret(constant(OUTSIDE))
    marks, found = word_at(b, work, Work.MARKS), word_at(b, work, Work.FOUND)
    scan = b.add(word_at(b, work, Work.SCAN), constant(1))
    b.store(scan, at(b, work, ir.IntType(64), Work.SCAN))
    mark = b.trunc(scan, _I32)
    count, last = b.alloca(ir.IntType(64)), b.alloca(_I32)
    b.store(constant(0), count)
    b.store(ir.Constant(_I32, -1), last)
    with counted(b, pieces) as piece:
        first = find(b, arguments, piece)
        require(b, b.icmp_signed(">=", first, constant(0)), failed)
        require(b, b.icmp_signed("<=", b.add(first, length), how_many), failed)
        with counted(b, length) as granule:
            state = b.load(at(b, granules, _I32, b.add(first, granule)))
            with b.if_then(b.icmp_signed("!=", state, b.load(last)), likely=False):
                b.store(state, last)
                marked = at(b, marks, _I32, b.zext(state, ir.IntType(64)))
                with b.if_then(b.icmp_signed("!=", b.load(marked), mark)):
                    b.store(mark, marked)
                    place = b.load(count)
                    b.store(state, at(b, found, _I32, place))
                    b.store(b.add(place, constant(1)), count)
    states = b.load(count)
    only = b.sext(b.load(at(b, found, _I32)), ir.IntType(64))
    is_one = b.icmp_signed("==", states, constant(1))
    b.ret(b.select(is_one, only, b.neg(states)))


def _put(b: Any, arguments: Sequence[Any], find: _Find) -> None:
    granules, value, *_, pieces, length, work = arguments
    new = word_at(b, work, Work.NEW)
    state = b.trunc(value, _I32)
    with b.if_else(b.icmp_signed(">=", value, constant(0))) as (alike, apart):
        with alike, counted(b, pieces) as piece:
            first = find(b, arguments, piece)
            with counted(b, length) as granule:
                b.store(state, at(b, granules, _I32, b.add(first, granule)))
        with apart, counted(b, pieces) as piece:
            first = find(b, arguments, piece)
            with counted(b, length) as granule:
                place = at(b, granules, _I32, b.add(first, granule))
                old = b.zext(b.load(place), ir.IntType(64))
                b.store(b.load(at(b, new, _I32, old)), place)
    b.ret(constant(0))
