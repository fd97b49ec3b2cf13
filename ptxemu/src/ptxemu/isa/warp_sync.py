"""Exchanges between the lanes of a warp: shfl, vote, match, redux, elect, activemask, bar.warp.

Lanes that a member mask names and that are elsewhere are waited for before the instruction runs
(`machine.program.together`), so the executing lanes are all that will come, or have met at others
of the same qualifiers (`Group.met`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import IllegalInstructionError
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import FULL, WARP_SIZE, Lanes, Mask, bits_of, lane_names, mask_of
from ptxemu.machine.operands import LaneReader, LaneWriter, reader, writer
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand, Pair, Sink

_LANES: NDArray[np.int64] = np.arange(WARP_SIZE)
_ALL_MEMBERS = b"\xff" * 4 * WARP_SIZE
"""A member mask of all lanes in each of them."""
_CANONICAL_NAN = np.uint32(0x7FFFFFFF)
Parts = Callable[["Warp", Mask], list[tuple[Mask, Mask]]]
"""Executing lanes of a member mask, and all that exchange values there."""


def _destinations(operand: Operand) -> tuple[LaneWriter, LaneWriter]:
    """The writers of `d|p`; one of `d` alone drops its predicate."""
    if isinstance(operand, Pair):
        return writer(operand.first), writer(operand.second)
    return writer(operand), writer(Sink())


def _parts(instruction: Instruction) -> Parts:
    """The executing lanes, split by the member mask that each gives (the last operand)."""
    operand = instruction.operands[-1]
    if isinstance(operand, IntImmediate):
        members = mask_of(operand.value & 0xFFFFFFFF)
        if members.all():
            return lambda warp, mask: [(mask, _meeting(warp, mask))]
        return lambda warp, mask: _members_only(warp, mask, members, instruction)
    read = reader(operand, "u32")

    def split(warp: Warp, mask: Mask) -> list[tuple[Mask, Mask]]:
        values = read(warp)
        if mask is FULL and values.tobytes() == _ALL_MEMBERS:
            return [(mask, mask)]
        parts: list[tuple[Mask, Mask]] = []
        for value in np.unique(values[mask]).tolist():
            lanes = mask & (values == value)
            parts += _members_only(warp, lanes, mask_of(value), instruction)
        return parts

    return split


def _meeting(warp: Warp, lanes: Mask) -> Mask:
    return lanes if warp.group.met is None else warp.group.met[1]


def _given(warp: Warp, read: LaneReader) -> Lanes:
    """Values that the lanes give each other, wherever they execute."""
    met = warp.group.met
    return read(warp) if met is None or met[0] is None else met[0]


def _members_only(
    warp: Warp, lanes: Mask, members: Mask, instruction: Instruction
) -> list[tuple[Mask, Mask]]:
    outside = lanes & ~members
    if outside.any():
        warp.cta.machine.complain(
            "error",
            "not-a-member",
            f"lanes {lane_names(outside)} are not in their own member mask",
            warp,
            instruction,
        )
    return [(lanes, lanes if warp.group.met is None else warp.group.met[1] & members)]


Sources = tuple[Lanes, Lanes]
"""The lane that each lane reads, and whether it is in range (else it reads itself)."""


def _shuffle(mode: str, c: Lanes) -> Callable[[Lanes], Sources]:
    """The sources by operand b, given operand c: a clamp below a segment mask."""
    clamp, segment = c & 31, (c >> 8) & 31
    low, free = _LANES & segment, ~segment & 31
    limit = low | (clamp & free)
    is_whole = bool((limit == 31).all())

    def sources(b: Lanes) -> Sources:
        b = b & 31
        if mode == "up":
            source = _LANES - b
            in_range = source >= limit
        else:
            if mode == "down":
                source = _LANES + b
            elif mode == "bfly":
                source = _LANES ^ b
            else:
                source = low | (b & free)
            if is_whole and mode != "down":
                return source, FULL
            in_range = source <= limit
        return np.where(in_range, source, _LANES), in_range

    return sources


@visible("shfl.sync")
def shuffle(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = a of another lane; p = whether that lane is in range."""
    mode = modifiers.one_of("idx", "bfly", "up", "down")
    modifiers.one_of("b32")
    destination, a, b, c, _ = instruction.operands
    write, write_predicate = _destinations(destination)
    read = reader(a, "b32")
    sources = _source_reader(mode, b, c)
    members = _parts(instruction)

    def step(warp: Warp, mask: Mask) -> None:
        source, in_range = sources(warp)
        members(warp, mask)
        if mask is not FULL:
            _check_sources(warp, mask, source, instruction)
        values = _given(warp, read)[source]
        write(warp, values, mask)
        write_predicate(warp, in_range, mask)

    return step


def _source_reader(mode: str, b: Operand, c: Operand) -> Callable[[Warp], Sources]:
    read_b, read_c = reader(b, "s32"), reader(c, "s32")
    if not isinstance(c, IntImmediate):
        return lambda warp: _shuffle(mode, read_c(warp).astype(np.int64))(
            read_b(warp).astype(np.int64)
        )
    by_b = _shuffle(mode, np.full(WARP_SIZE, c.value & 0x1FFF))
    if isinstance(b, IntImmediate):
        fixed = by_b(np.full(WARP_SIZE, b.value & 31))
        return lambda warp: fixed
    return lambda warp: by_b(read_b(warp).astype(np.int64))


def _check_sources(warp: Warp, mask: Mask, source: Lanes, instruction: Instruction) -> None:
    idle = np.zeros(WARP_SIZE, dtype=np.bool_)
    idle[source[mask]] = True
    idle &= ~_meeting(warp, mask)
    if idle.any():
        warp.cta.machine.complain(
            "warning",
            "shuffle-from-idle-lane",
            f"a value is read from lanes {lane_names(idle)}, which do not take part: undefined",
            warp,
            instruction,
        )


@visible("vote.sync")
def vote(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A predicate of all member lanes reduced: all, any, uni; ballot gives its bits."""
    mode = modifiers.one_of("all", "any", "uni", "ballot")
    modifiers.one_of("b32" if mode == "ballot" else "pred")
    destination, a, _ = instruction.operands
    write, read, parts = writer(destination), reader(a, "pred"), _parts(instruction)

    def step(warp: Warp, mask: Mask) -> None:
        values = _given(warp, read)
        for lanes, members in parts(warp, mask):
            held = values & members
            if mode == "ballot":
                result: Lanes = np.full(WARP_SIZE, bits_of(held), dtype=np.uint32)
            else:
                all_, any_ = bool((held == members).all()), bool(held.any())
                outcome = {"all": all_, "any": any_, "uni": all_ or not any_}[mode]
                result = np.full(WARP_SIZE, outcome)
            write(warp, result, lanes)

    return step


@visible("match")
def match(instruction: Instruction, modifiers: Modifiers) -> Step:
    """any: the lanes with this lane's value; all: the member lanes if all have the same value."""
    mode = modifiers.one_of("any", "all")
    modifiers.one_of("sync")
    type_ = modifiers.one_of("b32", "b64")
    destination, a, _ = instruction.operands
    write, write_predicate = _destinations(destination)
    read, parts = reader(a, type_), _parts(instruction)

    def step(warp: Warp, mask: Mask) -> None:
        values = _given(warp, read)
        for lanes, members in parts(warp, mask):
            if mode == "all":
                same = len(np.unique(values[members])) == 1
                write(warp, np.full(WARP_SIZE, bits_of(members) * same, np.uint32), lanes)
                write_predicate(warp, np.full(WARP_SIZE, same), lanes)
                continue
            equal = (values[:, None] == values) & members
            bits = np.packbits(equal, axis=1, bitorder="little").view(np.uint32)[:, 0]
            write(warp, bits, lanes)

    return step


_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@visible("redux.sync")
def reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """One value of all member lanes' values."""
    name = modifiers.one_of(*_REDUCTIONS)
    absolute, propagates = modifiers.flag("abs"), modifiers.flag("NaN")
    type_ = modifiers.type()
    allowed = {"add": ("u32", "s32"), "min": ("u32", "s32", "f32"), "max": ("u32", "s32", "f32")}
    if type_ not in allowed.get(name, ("b32",)) or ((absolute or propagates) and type_ != "f32"):
        unsupported(instruction, f"type .{type_}")
    destination, a, _ = instruction.operands
    write, read, parts = writer(destination), reader(a, type_), _parts(instruction)
    function = _REDUCTIONS[name]

    def step(warp: Warp, mask: Mask) -> None:
        values = _given(warp, read)
        for lanes, members in parts(warp, mask):
            chosen = values[members]
            if type_ == "f32":
                result: Any = _extreme(chosen, name, absolute, propagates)
            else:
                result = function.reduce(chosen, dtype=chosen.dtype)
            write(warp, np.full(WARP_SIZE, result, dtype=chosen.dtype), lanes)

    return step


def _extreme(values: Lanes, name: str, absolute: bool, propagates: bool) -> Any:
    """Least or greatest float; +0 > -0; a NaN wins with .NaN and loses without."""
    values = np.abs(values) if absolute else values
    numbers = values[~np.isnan(values)]
    if not len(numbers) or (propagates and len(numbers) < len(values)):
        return _CANONICAL_NAN.view(np.float32)
    bits = numbers.view(np.int32)
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return numbers[ordered.argmin() if name == "min" else ordered.argmax()]


@visible("elect.sync")
def elect(instruction: Instruction, modifiers: Modifiers) -> Step:
    """p = whether this lane is the leader of the member lanes; d = the leader's lane number.

    The leader is `Machine.elect`'s choice, the lowest lane by default.
    """
    destination, _ = instruction.operands
    if not isinstance(destination, Pair):
        raise IllegalInstructionError("elect.sync: expected d|p", instruction.span)
    write, write_predicate = _destinations(destination)
    parts = _parts(instruction)

    def step(warp: Warp, mask: Mask) -> None:
        for lanes, members in parts(warp, mask):
            leader = warp.cta.machine.elect(members)
            write(warp, np.full(WARP_SIZE, leader, dtype=np.uint32), lanes)
            write_predicate(warp, np.equal(_LANES, leader), lanes)

    return step


@visible("activemask")
def active_mask(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The lanes that execute together now."""
    modifiers.one_of("b32")
    write = writer(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        write(warp, np.full(WARP_SIZE, bits_of(mask), dtype=np.uint32), mask)

    return step


@visible("bar.warp.sync")
def warp_barrier(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Wait for the member lanes; their memory accesses are ordered."""
    parts = _parts(instruction)

    def step(warp: Warp, mask: Mask) -> None:
        parts(warp, mask)

    return step
