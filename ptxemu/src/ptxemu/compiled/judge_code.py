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
    has,
)
from ptxemu.compiled.judge_states import Following, Second, data_of, is_layout_known
from ptxemu.compiled.loops import (
    I1,
    I32,
    I64,
    Ints,
    Value,
    Variable,
    constant,
    counted,
    endless,
    require,
    when,
)
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


def write_judgement(b: Any, arguments: Sequence[Value]) -> None:
    """Write the body of `judge`: a function of words, with these arguments."""
    given: dict[str, Any] = dict(zip(ARGUMENTS, arguments, strict=True))
    given["granules"] = Ints(b, given["granules"].ir)
    exits = {verdict: b.append_basic_block(verdict.name.lower()) for verdict in Verdict}
    for verdict, block in exits.items():
        ir.IRBuilder(block).ret(constant(verdict))
    work, event = given["work"], given["event"]
    tables = Tables.load(work)
    count = _scan(given, tables, exits)
    require(count > 0, exits[Verdict.DONE])
    _sort(tables.found, count)
    _require_room(work, count, exits[Verdict.NO_ROOM])
    row = tables.event(event)
    made = Made(tables, work, row[OfEvent.WRITE_STATE])
    second = Second(row, given, exits[Verdict.BY_PYTHON])
    following = Following(tables, made, second, given, exits[Verdict.BY_PYTHON])
    work[Work.NUM_UNORDERED] = 0
    with counted(b, count) as place:
        number = tables.found[place]
        tables.state(number)[OfState.NEW] = following.of(number)
    none = work[Work.NUM_UNORDERED] == 0
    require(has(given["flags"], Flag.TOLD) | none, exits[Verdict.UNORDERED])
    work[Work.NUM_STATES], work[Work.POOL_USED] = made.count.value, made.used.value
    row[OfEvent.WRITE_STATE] = made.own.value
    require(_remember(tables, event, count), exits[Verdict.DONE])
    _put(given, tables, count == 1)
    b.ret(constant(Verdict.DONE))


def _first_granule(given: dict[str, Any], piece: Value) -> Any:
    base, shift = given["base"], given["shift"]
    is_row = has(given["flags"], Flag.ROWS)
    start = given["starts"][is_row.choice(0, piece)]
    return is_row.choice(base + piece * shift, (start - base) >> is_row.choice(0, shift))


def _scan(given: dict[str, Any], tables: Tables, exits: dict[Verdict, Any]) -> Value:
    """Put the states of the granules into FOUND, as they come; gives how many."""
    work, length, how_many = given["work"], given["length"], given["how_many"]
    work[Work.ACCESSES] = access = work[Work.ACCESSES] + 1
    b = access.b
    mark = Value(b, b.sext(b.trunc(access.ir, I32), I64))  # as rows keep it
    count, last = Variable(Value(b, constant(0))), Variable(Value(b, constant(-1)))
    may_be_outside = has(given["flags"], Flag.OF_ONE_PAGE)
    with counted(b, given["pieces"]) as piece:
        first = _first_granule(given, piece)
        end = first + length
        is_inside = (first >= 0) & (end <= how_many)
        is_outside = (end <= 0) | (first >= how_many)
        require(is_inside | (is_outside & may_be_outside), exits[Verdict.OUTSIDE])
        with when(is_inside), counted(b, length) as granule:
            number = given["granules"][first + granule]
            with when(number != last.value, likely=False):
                last.value = number
                state = tables.state(number)
                with when(state[OfState.MARK] != mark):
                    state[OfState.MARK] = mark
                    place = count.value
                    require(place < MOST_STATES, exits[Verdict.BY_PYTHON])
                    tables.found[place] = number
                    count.value = place + 1
    return count.value


def _sort(found: Ints, count: Value) -> None:
    """Put the numbers in order, one after the other; most are so already."""
    hole = Variable(count)
    with when(count > 1), counted(count.b, count - 1) as before:
        hole.value = before + 1
        number = found[hole.value]
        with endless(count.b) as leave_if:
            place = hole.value
            leave_if(place == 0)
            left = found[place - 1]
            leave_if(left <= number)
            found[place] = left
            hole.value = place - 1
        found[hole.value] = number


def _require_room(work: Value, count: Value, failed: Any) -> None:
    """Require room for one state more than are found, each with the most events."""
    more = count + 1
    events = more * (MOST_WRITES + MOST_READS + 2)
    require(work[Work.NUM_STATES] + more <= work[Work.STATES_END], failed)
    require(work[Work.POOL_USED] + events <= work[Work.POOL_END], failed)


def _remember(tables: Tables, event: Value, count: Value) -> Value:
    """Note in each state what followed; gives whether that is another state anywhere."""
    changed = Variable(Value(count.b, I1(0)))
    with counted(count.b, count) as place:
        number = tables.found[place]
        state = tables.state(number)
        new = state[OfState.NEW]
        state[OfState.NEXT_EVENT], state[OfState.NEXT_STATE] = event, new
        changed.value = changed.value | (new != number)
    result: Value = changed.value
    return result


def _put(given: dict[str, Any], tables: Tables, is_one: Value) -> None:
    """Each granule gets the state that is new for its own.

    A granule may be in two pieces, so that new states are put there as their complements first.
    """
    states = given["granules"]
    new = tables.state(tables.found[0])[OfState.NEW]
    with is_one.b.if_else(is_one.ir) as (one, several):
        with one, _granules(given) as place:
            states[place] = new
        with several:
            with _granules(given) as place:
                old = states[place]
                with when(old >= 0):
                    states[place] = ~tables.state(old)[OfState.NEW]
            with _granules(given) as place:
                value = states[place]
                states[place] = (value >= 0).choice(value, ~value)


@contextmanager
def _granules(given: dict[str, Any]) -> Iterator[Value]:
    """A loop over those of the access that are in the page; gives their numbers there."""
    b = given["pieces"].b
    with counted(b, given["pieces"]) as piece:
        first = _first_granule(given, piece)
        is_inside = (first >= 0) & (first + given["length"] <= given["how_many"])
        with when(is_inside), counted(b, given["length"]) as granule:
            yield first + granule


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


def _write(b: Any, arguments: Sequence[Value]) -> None:
    given = dict(zip((*_SHARED, *_OWN), arguments, strict=True))
    type_ = ir.FunctionType(I64, [I64] * len(ARGUMENTS))
    one = ir.Function(b.module, type_, name="judge_load")
    one.linkage = "internal"
    inside = ir.IRBuilder(one.append_basic_block("entry"))
    write_judgement(inside, [Value(inside, argument) for argument in one.args])
    left = b.append_basic_block("left")
    begin, end = given["begin"], given["end"]
    numbers = Ints(b, data_of(given["numbers"]).ir)
    with counted(b, end - begin) as number:
        load = begin + number
        own = {
            "starts": given["starts"] + load * (8 * WARP_SIZE),
            "pieces": Value(b, constant(WARP_SIZE)),
            "length": given["sizes"][load] >> given["shift"],
            "event": numbers[load],
        }
        verdict = Value(b, b.call(one, [(given | own)[name].ir for name in ARGUMENTS]))
        stopped = load | (verdict << VERDICT_SHIFT)
        reached = b.block
        require(verdict == Verdict.DONE, left)
    b.ret(end.ir)
    b.position_at_end(left)
    result = b.phi(I64)
    result.add_incoming(stopped.ir, reached)
    b.ret(result)
