"""The check's judgement of an access in machine code, where nothing but known order is found.

For each state that an access finds it is asked whether what happened there is known to the agent,
as `check.races` would, and which state follows. Wherever anything else comes up, nothing is
changed, and Python judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from ptxemu.compiled import judge_rows
from ptxemu.compiled.builtins import make_builtin
from ptxemu.compiled.judge_rows import (
    I1,
    I32,
    MOST_READS,
    MOST_STATES,
    MOST_WRITES,
    Flag,
    Made,
    OfEvent,
    OfState,
    Tables,
    Verdict,
    Work,
    field,
    has,
    wide,
)
from ptxemu.compiled.judge_states import Following, Second
from ptxemu.compiled.loops import I64, at, constant, counted, local, require, word_at
from ptxemu.compiled.python_objects import data_of, is_layout_known
from ptxemu.machine.lanes import WARP_SIZE

layout = judge_rows
OBJECTS = ("clocks", "done", "reads", "fenced", "handed_on", "in_practice")
ARGUMENTS = (
    *("granules", "how_many", "starts", "base", "shift", "pieces", "length", "work", "event"),
    *("flags", "fence_row", *OBJECTS),
)


@cache
def judge() -> Callable[..., int] | None:
    """The function; None if Python's objects are not laid out as it needs. It gives a `Verdict`.

    Its arguments: the page's granules (address) and how many; the first bytes of the access's
    pieces (`bytes`), the page's first byte and log2 of a granule's, or, of rows, eight zeros, the
    first granule and the distance of rows; pieces or rows, and granules of each; `Work` (address);
    the number of the event; `Flag`s; the row of clocks that a fence for the access's path brings
    up. Then, as objects, what the agent knows of its cluster: the clocks, and the operations that
    are done, have read, are fenced, are handed on; and those before it by practice only.
    """
    if not is_layout_known():
        return None
    places = {name: place for place, name in enumerate(ARGUMENTS)}
    objects = [places[name] for name in OBJECTS]
    return make_builtin(
        "judge", len(ARGUMENTS), write_judgement, buffers={places["starts"]}, objects=objects
    )


def write_judgement(b: Any, arguments: Sequence[Any]) -> None:
    """Write the body of `judge`: a function of words, with these arguments."""
    given = dict(zip(ARGUMENTS, arguments, strict=True))
    exits = {verdict: b.append_basic_block(verdict.name.lower()) for verdict in Verdict}
    for verdict, block in exits.items():
        ir.IRBuilder(block).ret(constant(verdict))
    work, event = given["work"], given["event"]
    tables = Tables.load(b, work)
    count = _scan(b, given, tables, exits)
    require(b, b.icmp_signed(">", count, constant(0)), exits[Verdict.DONE])
    _sort(b, tables.found, count)
    _require_room(b, work, count, exits[Verdict.NO_ROOM])
    row = tables.event(b, event)
    made = Made(b, tables, work, wide(b, b.load(field(b, row, OfEvent.WRITE_STATE))))
    second = Second(b, row, given, exits[Verdict.BY_PYTHON])
    following = Following(tables, made, second, given, exits[Verdict.BY_PYTHON])
    b.store(constant(0), at(b, work, I64, Work.NUM_UNORDERED))
    with counted(b, count) as place:
        number = wide(b, b.load(at(b, tables.found, I32, place)))
        b.store(b.trunc(following.of(b, number), I32), tables.state(b, number, OfState.NEW))
    none = b.icmp_signed("==", word_at(b, work, Work.NUM_UNORDERED), constant(0))
    is_fine = b.or_(has(b, given["flags"], Flag.TOLD), none)
    require(b, is_fine, exits[Verdict.UNORDERED])
    b.store(b.load(made.count), at(b, work, I64, Work.NUM_STATES))
    b.store(b.load(made.used), at(b, work, I64, Work.POOL_USED))
    b.store(b.trunc(b.load(made.own), I32), field(b, row, OfEvent.WRITE_STATE))
    require(b, _remember(b, tables, event, count), exits[Verdict.DONE])
    _put(b, given, tables, b.icmp_signed("==", count, constant(1)))
    b.ret(constant(Verdict.DONE))


def _first_granule(b: Any, given: dict[str, Any], piece: Any) -> Any:
    base, shift = given["base"], given["shift"]
    is_row = has(b, given["flags"], Flag.ROWS)
    start = word_at(b, given["starts"], b.select(is_row, constant(0), piece))
    of_piece = b.ashr(b.sub(start, base), b.select(is_row, constant(0), shift))
    return b.select(is_row, b.add(base, b.mul(piece, shift)), of_piece)


def _scan(b: Any, given: dict[str, Any], tables: Tables, exits: dict[Verdict, Any]) -> Any:
    """Put the states of the granules into FOUND, as they come; gives how many."""
    work, length, how_many = given["work"], given["length"], given["how_many"]
    access = b.add(word_at(b, work, Work.ACCESSES), constant(1))
    b.store(access, at(b, work, I64, Work.ACCESSES))
    mark = b.trunc(access, I32)
    count, last = local(b, I64), local(b, I32)
    b.store(constant(0), count)
    b.store(I32(-1), last)
    may_be_outside = has(b, given["flags"], Flag.OF_ONE_PAGE)
    with counted(b, given["pieces"]) as piece:
        first = _first_granule(b, given, piece)
        end = b.add(first, length)
        is_inside = _is_inside(b, first, end, how_many)
        is_outside = b.or_(
            b.icmp_signed("<=", end, constant(0)), b.icmp_signed(">=", first, how_many)
        )
        is_fine = b.or_(is_inside, b.and_(is_outside, may_be_outside))
        require(b, is_fine, exits[Verdict.OUTSIDE])
        with b.if_then(is_inside), counted(b, length) as granule:
            state = b.load(at(b, given["granules"], I32, b.add(first, granule)))
            with b.if_then(b.icmp_signed("!=", state, b.load(last)), likely=False):
                b.store(state, last)
                marked = tables.state(b, wide(b, state), OfState.MARK)
                with b.if_then(b.icmp_signed("!=", b.load(marked), mark)):
                    b.store(mark, marked)
                    place = b.load(count)
                    fits = b.icmp_signed("<", place, constant(MOST_STATES))
                    require(b, fits, exits[Verdict.BY_PYTHON])
                    b.store(state, at(b, tables.found, I32, place))
                    b.store(b.add(place, constant(1)), count)
    return b.load(count)


def _is_inside(b: Any, first: Any, end: Any, how_many: Any) -> Any:
    begins = b.icmp_signed(">=", first, constant(0))
    return b.and_(begins, b.icmp_signed("<=", end, how_many))


def _sort(b: Any, found: Any, count: Any) -> None:
    """Put the numbers in order, one after the other; most are so already."""
    hole = local(b, I64)
    several = b.icmp_signed(">", count, constant(1))
    with b.if_then(several), counted(b, b.sub(count, constant(1))) as before:
        b.store(b.add(before, constant(1)), hole)
        number = b.load(at(b, found, I32, b.load(hole)))
        head, move, out = (b.append_basic_block(name) for name in ("sort", "move", "sorted"))
        b.branch(head)
        b.position_at_end(head)
        place = b.load(hole)
        is_first = b.icmp_signed("==", place, constant(0))
        left = b.select(is_first, constant(0), b.sub(place, constant(1)))
        other = b.load(at(b, found, I32, left))
        b.cbranch(b.and_(b.not_(is_first), b.icmp_signed(">", other, number)), move, out)
        b.position_at_end(move)
        b.store(other, at(b, found, I32, place))
        b.store(left, hole)
        b.branch(head)
        b.position_at_end(out)
        b.store(number, at(b, found, I32, b.load(hole)))


def _require_room(b: Any, work: Any, count: Any, failed: Any) -> None:
    """Require room for one state more than are found, each with the most events."""
    more = b.add(count, constant(1))
    events = b.mul(more, constant(MOST_WRITES + MOST_READS + 2))
    for used, needed, end in (
        (Work.NUM_STATES, more, Work.STATES_END),
        (Work.POOL_USED, events, Work.POOL_END),
    ):
        total = b.add(word_at(b, work, used), needed)
        require(b, b.icmp_signed("<=", total, word_at(b, work, end)), failed)


def _remember(b: Any, tables: Tables, event: Any, count: Any) -> Any:
    """Note in each state what followed; gives whether that is another state anywhere."""
    changed = local(b, I1)
    b.store(I1(0), changed)
    with counted(b, count) as place:
        found = b.load(at(b, tables.found, I32, place))
        number = wide(b, found)
        new = b.load(tables.state(b, number, OfState.NEW))
        b.store(b.trunc(event, I32), tables.state(b, number, OfState.NEXT_EVENT))
        b.store(new, tables.state(b, number, OfState.NEXT_STATE))
        b.store(b.or_(b.load(changed), b.icmp_signed("!=", new, found)), changed)
    return b.load(changed)


def _put(b: Any, given: dict[str, Any], tables: Tables, is_one: Any) -> None:
    """Each granule gets the state that is new for its own.

    A granule may be in two pieces, so that new states are put there as their complements first.
    """
    only = b.load(at(b, tables.found, I32))
    new = b.load(tables.state(b, wide(b, only), OfState.NEW))
    with b.if_else(is_one) as (one, several):
        with one, _granules(b, given) as place:
            b.store(new, place)
        with several:
            with _granules(b, given) as place:
                old = b.load(place)
                with b.if_then(b.icmp_signed(">=", old, I32(0))):
                    following = b.load(tables.state(b, wide(b, old), OfState.NEW))
                    b.store(b.not_(following), place)
            with _granules(b, given) as place:
                value = b.load(place)
                is_put = b.icmp_signed(">=", value, I32(0))
                b.store(b.select(is_put, value, b.not_(value)), place)


@contextmanager
def _granules(b: Any, given: dict[str, Any]) -> Iterator[Any]:
    """A loop over those of the access that are in the page; gives pointers to their states."""
    with counted(b, given["pieces"]) as piece:
        first = _first_granule(b, given, piece)
        end = b.add(first, given["length"])
        is_inside = _is_inside(b, first, end, given["how_many"])
        with b.if_then(is_inside), counted(b, given["length"]) as granule:
            yield at(b, given["granules"], I32, b.add(first, granule))


# The check's judgement of a warp's loads in a row, one after another, in machine code.

_OWN = ("sizes", "numbers", "begin", "end")
_SHARED = tuple(name for name in ARGUMENTS if name not in ("pieces", "length", "event"))
VERDICT_SHIFT = 32


@cache
def judge_loads() -> Callable[..., int] | None:
    """The function; None if Python's objects are not laid out as it needs.

    Its arguments are those of `judge_code.judge` but for the pieces, their length and the event;
    then the address of the loads' sizes in bytes (64 bits), the array of their events' numbers (32
    bits), the first load and the one after the last. `starts` is an address too, of 32 words a
    load. It gives the first load that was not judged, and from bit VERDICT_SHIFT on its `Verdict`.
    """
    if not is_layout_known():
        return None
    names = (*_SHARED, *_OWN)
    objects = [names.index(name) for name in (*OBJECTS, "numbers")]
    return make_builtin("judge_loads", len(names), _write, objects=objects)


def _write(b: Any, arguments: Sequence[Any]) -> None:
    given = dict(zip((*_SHARED, *_OWN), arguments, strict=True))
    type_ = ir.FunctionType(I64, [I64] * len(ARGUMENTS))
    one = ir.Function(b.module, type_, name="judge_load")
    one.linkage = "internal"
    write_judgement(ir.IRBuilder(one.append_basic_block("entry")), one.args)
    left = b.append_basic_block("left")
    begin, end, numbers = given["begin"], given["end"], data_of(b, given["numbers"])
    with counted(b, b.sub(end, begin)) as number:
        load = b.add(begin, number)
        row = b.mul(load, constant(8 * WARP_SIZE))
        own = {
            "starts": b.add(given["starts"], row),
            "pieces": constant(WARP_SIZE),
            "length": b.ashr(word_at(b, given["sizes"], load), given["shift"]),
            "event": b.sext(b.load(at(b, numbers, I32, load)), I64),
        }
        verdict = b.call(one, [(given | own)[name] for name in ARGUMENTS])
        stopped = b.or_(load, b.shl(verdict, constant(VERDICT_SHIFT)))
        reached = b.block
        require(b, b.icmp_signed("==", verdict, constant(Verdict.DONE)), left)
    b.ret(end)
    b.position_at_end(left)
    result = b.phi(I64)
    result.add_incoming(stopped, reached)
    b.ret(result)
