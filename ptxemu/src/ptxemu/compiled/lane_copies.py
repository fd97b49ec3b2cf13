"""The copies of a cp.async, one a lane, in machine code.

Nothing is done where an address or a size is wrong: whoever asked repeats it and words the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

from llvmlite import ir

from ptxemu.compiled.builtins import make_builtin
from ptxemu.compiled.loops import I64, at, constant, counted, require, word_at
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.memory.address import SHARED_BASE, SHARED_OFFSET_MASK, SHARED_RANK_SHIFT
from ptxemu.memory.global_memory import TABLE_WORDS

_I8, _I32 = ir.IntType(8), ir.IntType(32)


class Operands(IntEnum):
    """Words that describe an instruction's operands: where registers are in a register file."""

    TARGET = 0
    SOURCE = 1
    TARGET_ADDEND = 2
    SOURCE_ADDEND = 3
    LIMIT = 4
    LIMIT_KIND = 5
    """0: none, 1: a predicate that leaves lanes out, 2: one whose negation does, 3: a count."""
    SIZE = 6


@cache
def lane_taker(size: int) -> Callable[..., int]:
    """The function (operands, register file, lanes, rank, end, out): how many lanes copy.

    It gives 0 if something is wrong. `out` has 3 rows of 32 words: by lane that copies the offset
    in the shared memory of the CTA of that rank, which has `end` bytes; the source's address; how
    many bytes are read. Registers of targets have 32 bits, of sources 64.
    """

    def write(b: Any, arguments: Sequence[Any]) -> None:
        operands, registers, lanes, rank, end, out = arguments
        failed = _failure(b)
        word = [word_at(b, operands, number) for number in range(Operands.SIZE)]
        target_at, source_at = (b.add(registers, word[k]) for k in (0, 1))
        limit_at = b.add(registers, word[Operands.LIMIT])
        kind = word[Operands.LIMIT_KIND]
        is_count = b.icmp_unsigned("==", kind, constant(3))
        is_predicate = b.and_(b.icmp_unsigned("!=", kind, constant(0)), b.not_(is_count))
        inverted = b.zext(b.icmp_unsigned("==", kind, constant(2)), _I8)
        last = b.sub(end, constant(size))
        number = b.alloca(I64)
        b.store(constant(0), number)
        with counted(b, constant(WARP_SIZE)) as lane:
            bit = b.and_(b.lshr(lanes, lane), constant(1))
            with b.if_then(b.icmp_unsigned("!=", bit, constant(0))):
                target = b.load(at(b, target_at, _I32, lane))
                target = b.add(target, b.trunc(word[Operands.TARGET_ADDEND], _I32))
                source = b.add(word_at(b, source_at, lane), word[Operands.SOURCE_ADDEND])
                ignored = b.xor(b.load(at(b, limit_at, _I8, lane)), inverted)
                is_left_out = b.and_(
                    is_predicate, b.icmp_unsigned("!=", ignored, ir.Constant(_I8, 0))
                )
                count = b.select(is_left_out, constant(0), constant(size))
                limit = b.zext(b.load(at(b, limit_at, _I32, lane)), I64)
                count = b.select(is_count, limit, count)
                wide = b.zext(target, I64)
                misaligned = b.and_(b.or_(wide, source), constant(size - 1))
                offset = b.and_(wide, constant(SHARED_OFFSET_MASK))
                of_rank = b.lshr(wide, constant(SHARED_RANK_SHIFT))
                for condition in (
                    b.icmp_unsigned("==", misaligned, constant(0)),
                    b.icmp_unsigned("==", of_rank, rank),
                    b.icmp_signed(">=", offset, constant(SHARED_BASE)),
                    b.icmp_signed("<=", offset, last),
                    b.icmp_unsigned("<=", count, constant(size)),
                ):
                    require(b, condition, failed)
                place = b.load(number)
                for row, value in enumerate((offset, source, count)):
                    to = at(b, out, I64, b.add(place, constant(WARP_SIZE * row)))
                    b.store(value, to)
                b.store(b.add(place, constant(1)), number)
        b.ret(b.load(number))

    return make_builtin(f"take_lanes_{size}", 6, write)


@cache
def lane_copier(size: int) -> Callable[..., int]:
    """The function (allocations, how many, rows that `lane_taker` filled, lanes, shared memory).

    It gives 1 if all was copied. Allocations are in the form of `GlobalMemory.table`.
    """

    def write(b: Any, arguments: Sequence[Any]) -> None:
        table, entries, rows, lanes, shared = arguments
        failed = _failure(b)
        found = b.alloca(I64)
        b.store(table, found)
        word = ir.IntType(8 * size)
        with counted(b, lanes) as lane:
            offset, source, count = (
                word_at(b, rows, b.add(lane, constant(WARP_SIZE * row))) for row in range(3)
            )
            target = at(b, b.add(shared, offset), word)
            b.store(ir.Constant(word, 0), target, align=1)
            with b.if_then(b.icmp_unsigned("!=", count, constant(0))):
                place = _place(b, (table, entries, found), source, count, failed)
                with b.if_else(b.icmp_unsigned("==", count, constant(size))) as (all_, some):
                    with all_:
                        b.store(b.load(at(b, place, word), align=1), target, align=1)
                    with some, counted(b, count) as byte:
                        to = at(b, b.ptrtoint(target, I64), _I8, byte)
                        b.store(b.load(at(b, place, _I8, byte)), to)
        b.ret(constant(1))

    return make_builtin(f"copy_lanes_{size}", 5, write)


def _failure(b: Any) -> Any:
    """Return a block in which the function gives 0."""
    failed = b.append_basic_block("failed")
    ir.IRBuilder(failed).ret(constant(0))
    return failed


def _place(b: Any, table: tuple[Any, Any, Any], address: Any, count: Any, failed: Any) -> Any:
    """Return the address in this process of `count` bytes at a global address.

    The last pointer in `table` points to the entry found last.
    """
    first, entries, found = table
    end = b.add(first, b.mul(entries, constant(8 * TABLE_WORDS)))
    look, search, hit = (b.append_basic_block(name) for name in ("look", "search", "hit"))
    before = b.block
    start = b.load(found)
    b.branch(look)
    b.position_at_end(look)
    entry, is_search = b.phi(I64), b.phi(ir.IntType(1))
    entry.add_incoming(start, before)
    is_search.add_incoming(ir.Constant(ir.IntType(1), 0), before)
    starts = b.icmp_unsigned(">=", address, word_at(b, entry, 0))
    ends = b.icmp_unsigned("<=", b.add(address, count), word_at(b, entry, 1))
    b.cbranch(b.and_(starts, ends), hit, search)
    b.position_at_end(search)
    following = b.select(is_search, b.add(entry, constant(8 * TABLE_WORDS)), first)
    entry.add_incoming(following, search)
    is_search.add_incoming(ir.Constant(ir.IntType(1), 1), search)
    b.cbranch(b.icmp_unsigned("<", following, end), look, failed)
    b.position_at_end(hit)
    b.store(entry, found)
    return b.add(address, word_at(b, entry, 2))
