"""mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

A state (the result of an arrive) is opaque to programs: the phase above the pending count before
the arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ptxemu.engines.mbarrier import MAX_COUNT, Mbarrier, Mbarriers, mbarriers
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind
from ptxemu.isa.memory_operands import SCOPES
from ptxemu.isa.registry import Modifiers, pure, unsupported, visible
from ptxemu.machine.decoded import PureOp, Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import FULL, NOBODY, WARP_SIZE, Lanes, Mask, are_alike, only_lane
from ptxemu.machine.operands import (
    LaneItem,
    LaneReader,
    address_in_lane,
    address_reader,
    in_lane,
    reader,
    writer,
)
from ptxemu.machine.regions import locate_shared, report
from ptxemu.machine.state import Warp
from ptxemu.memory.address import SHARED_RANK_SHIFT, SHARED_WINDOW, in_window
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand, Register, Sink

_BYTES = 8
_PENDING_BITS = MAX_COUNT.bit_length()
_ONE = IntImmediate(1)
_NO_KEYS = np.zeros(WARP_SIZE, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Keys:
    """Readers of the key that, besides the object, tells lanes apart: in all lanes, and in one."""

    lanes: LaneReader
    in_lane: LaneItem


class Target:
    """Finds the objects that an address operand names."""

    def __init__(self, instruction: Instruction, operand: Operand, modifiers: Modifiers) -> None:
        self.instruction = instruction
        self._addresses, self._address_in_lane = address_reader(operand), address_in_lane(operand)
        self._space = modifiers.one_of("shared", "shared::cta", "shared::cluster", default="")
        self._may_be_remote = self._space in ("", "shared::cluster")

    @property
    def is_cluster(self) -> bool:
        """Whether the opcode says .shared::cluster."""
        return self._space == "shared::cluster"

    def of_lanes(self, warp: Warp, mask: Mask) -> Iterator[tuple[int, Mbarriers, int]]:
        """Each active lane with the barriers of its CTA and its object's offset."""
        addresses = self._addresses(warp)
        for lane in np.flatnonzero(mask).tolist():
            barriers, offset = self.locate(warp, int(addresses[lane]))
            yield lane, barriers, offset

    def groups(
        self, warp: Warp, mask: Mask, keys: Keys | None = None
    ) -> Iterator[tuple[Mask, Mbarriers, int, int]]:
        """The active lanes by object and key: lanes, barriers, offset, key (0 without keys)."""
        lane = only_lane(mask)
        if lane >= 0:
            key = 0 if keys is None else keys.in_lane(warp, lane)
            yield mask, *self.locate(warp, self._address_in_lane(warp, lane)), key
            return
        addresses = self._addresses(warp)
        values = _NO_KEYS if keys is None else keys.lanes(warp)
        if mask is FULL and are_alike(addresses) and (keys is None or are_alike(values)):
            yield mask, *self.locate(warp, int(addresses[0])), int(values[0])
            return
        pairs = zip(addresses[mask].tolist(), values[mask].tolist(), strict=True)
        for address, key in dict.fromkeys(pairs):
            lanes = mask & (addresses == address) & (values == key)
            yield lanes, *self.locate(warp, address), key

    def locate(self, warp: Warp, address: int) -> tuple[Mbarriers, int]:
        """The barriers of the CTA that an address names, and the offset there."""
        if in_window(address, SHARED_WINDOW):
            address -= SHARED_WINDOW
        cta = warp.cta
        if not self._may_be_remote and address >> SHARED_RANK_SHIFT != cta.rank:
            fault(
                self.instruction,
                f"{warp.label}: address "
                f"0x{address:x} is not in shared::cta of the CTA of rank {cta.rank}",
            )
        owner, offset = locate_shared(cta, address, _BYTES, self.instruction)
        if offset % _BYTES:
            message = f"{warp.label}: mbarrier at 0x{offset:x}: expected 8-byte alignment"
            fault(self.instruction, message)
        return mbarriers(owner), offset

    @contextmanager
    def naming(self, warp: Warp) -> Iterator[None]:
        """Errors of the engine inside get the instruction's position."""
        try:
            yield
        except ExecutionError as error:
            raise self.named(warp, error) from None

    def named(self, warp: Warp, error: ExecutionError) -> ExecutionError:
        """An error of the engine with the instruction's position."""
        instruction = self.instruction
        return ExecutionError(f"{instruction.span}: {instruction.opcode}: {warp.label}: {error}")


def take_scope(modifiers: Modifiers, default: str) -> str:
    """The scope of an arrival or a wait; "relaxed" for one that orders nothing."""
    order = modifiers.one_of(default, "relaxed", default=default)
    scope = modifiers.one_of(*SCOPES, default="cta")
    return scope if order != "relaxed" else "relaxed"


@visible("mbarrier.init")
def init(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Make an object that expects `count` arrivals a phase."""
    target = Target(instruction, instruction.operands[0], modifiers)
    modifiers.one_of("b64")
    read = reader(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        counts = read(warp)
        done: set[tuple[int, int, int]] = set()
        for lane, barriers, offset in target.of_lanes(warp, mask):
            count = int(counts[lane])
            same = barriers.cta.index, offset, count
            if same in done:
                continue
            done.add(same)
            repeated = barriers.is_repeated(offset, count)
            if offset in barriers.by_offset:
                what = "what was so already" if repeated else "the object in use"
                warp.cta.machine.complain(
                    "note" if repeated else "warning",
                    "mbarrier-initialised-twice",
                    f"mbarrier.init of {what} at shared 0x{offset:x} without an inval",
                    warp,
                    instruction,
                )
            with target.naming(warp):
                barriers.init(offset, count)
            written = AccessKind.WRITE
            report(warp, barriers.cta, offset, _BYTES, written, instruction, is_silent=repeated)

    return step


@visible("mbarrier.inval")
def invalidate(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Give the object's bytes back."""
    target = Target(instruction, instruction.operands[0], modifiers)
    modifiers.one_of("b64")

    def step(warp: Warp, mask: Mask) -> None:
        for _, barriers, offset in target.of_lanes(warp, mask):
            with target.naming(warp):
                barriers.invalidate(offset)
            report(warp, barriers.cta, offset, _BYTES, AccessKind.WRITE, instruction)

    return step


@visible("mbarrier.expect_tx", "mbarrier.complete_tx")
def change_tx(instruction: Instruction, modifiers: Modifiers) -> Step:
    """tx-count += or -= bytes; complete_tx simulates the end of an asynchronous copy."""
    name = instruction.modifiers[1]
    modifiers.flag("relaxed")
    modifiers.one_of("cta", "cluster", default="cta")
    target = Target(instruction, instruction.operands[0], modifiers)
    modifiers.one_of("b64")
    read = reader(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        counts = read(warp)
        for lane, barriers, offset in target.of_lanes(warp, mask):
            count = int(counts[lane])
            with target.naming(warp):
                if name == "expect_tx":
                    barriers.expect_tx(offset, count)
                else:
                    barriers.complete_tx(warp, offset, count, scope="relaxed")

    return step


@visible("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(instruction: Instruction, modifiers: Modifiers) -> Step:
    """One arrival a lane (or `count`); .expect_tx first adds bytes to the tx-count, as one step.

    arrive_drop also lowers what later phases expect; .noComplete must not complete the phase.
    """
    name = instruction.modifiers[1]
    expects, no_complete = modifiers.flag("expect_tx"), modifiers.flag("noComplete")
    scope = take_scope(modifiers, "release")
    # The state operand is absent in no form, but the count and tx-count are.
    state, address, *counts = instruction.operands
    target = Target(instruction, address, modifiers)
    modifiers.one_of("b64")
    if target.is_cluster and not isinstance(state, Sink):
        unsupported(instruction, "an arrive on .shared::cluster gives no state")
    if len(counts) != 1 and (expects or no_complete or counts):
        unsupported(instruction, "expected one count")
    operand = counts[0] if counts else _ONE
    read, read_in_lane = reader(operand, "u32"), in_lane(operand, "u32")
    write, gives_state = writer(state), not isinstance(state, Sink)
    drops = name == "arrive_drop"

    def step(warp: Warp, mask: Mask) -> None:
        states = np.zeros(WARP_SIZE, dtype=np.uint64) if gives_state else None
        for some, barriers, offset, _ in target.groups(warp, mask):
            is_remote = barriers.cta is not warp.cta
            reach = "cluster" if is_remote and scope != "relaxed" else scope
            if is_remote and scope == "cta":
                _complain_of_scope(warp, instruction)
            method = barriers.arrive_drop if drops else barriers.arrive
            lane = only_lane(some)
            lanes = [lane] if lane >= 0 else np.flatnonzero(some).tolist()
            values = [read_in_lane(warp, lane)] if lane >= 0 else read(warp)[lanes].tolist()
            for turn in _turns(barriers, offset, [1] * len(lanes) if expects else values):
                counts = [1] * len(lanes[turn]) if expects else values[turn]
                barrier = barriers.by_offset.get(offset)
                pending = barrier.pending if barrier is not None else 0
                count, expected = sum(counts), sum(values[turn]) if expects else 0
                if no_complete and count >= pending:
                    fault(
                        instruction,
                        f"{warp.label}: the arrival "
                        f"would complete the phase of the mbarrier at shared 0x{offset:x}",
                    )
                try:
                    phase = method(warp, offset, count, expect=expected, scope=reach)
                except ExecutionError as error:
                    raise target.named(warp, error) from None
                if states is not None:
                    before = accumulate(counts[:-1], initial=0)
                    belongs = phase << _PENDING_BITS
                    states[lanes[turn]] = [belongs | (pending - done) for done in before]
        if states is not None:
            write(warp, states, mask)

    return step


def _complain_of_scope(warp: Warp, instruction: Instruction) -> None:
    """The ISA orders nothing for the other CTA then, though hardware does: CUTLASS's remote
    arrivals name no scope, and the default is .cta."""
    is_written = "cta" in instruction.modifiers
    warp.cta.machine.complain(
        "error" if is_written else "note",
        "remote-mbarrier-scope",
        "an arrival at another CTA's mbarrier with the scope .cta"
        + ("" if is_written else ", which is the default")
        + ": needs .release.cluster",
        warp,
        instruction,
    )


def _turns(barriers: Mbarriers, offset: int, counts: list[int]) -> list[slice]:
    """Split the lanes' arrivals at one object (`counts`) into steps: one for all, or one each."""
    barrier = barriers.by_offset.get(offset)
    if len(counts) == 1 or (barrier is not None and sum(counts) <= barrier.pending):
        return [slice(None)]
    return [slice(number, number + 1) for number in range(len(counts))]


def _pending_of(states: Lanes) -> Lanes:
    return (states & np.uint64(MAX_COUNT)).astype(np.uint32)


@pure("mbarrier.pending_count")
def pending_count(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The pending count in a state."""
    modifiers.one_of("b64")
    count, state = instruction.operands
    if not isinstance(count, Register) or not isinstance(state, Register):
        unsupported(instruction, "expected registers")
    return PureOp(_pending_of, ("u32",), ("u64",), (count,), (state,))


def phases_of_states(states: Lanes) -> Lanes:
    """The phases that arrives' states belong to."""
    return states >> np.uint64(_PENDING_BITS)


def phase_of_state(state: int) -> int:
    """The phase that one state belongs to."""
    return state >> _PENDING_BITS


# Waiting for phases of mbarriers (PTX ISA, "mbarrier.test_wait, mbarrier.try_wait").

_last_seen: EngineState[Warp, dict[tuple[int, int], tuple[Mbarrier, int]]] = EngineState(
    lambda warp: {}
)
"""The object that a warp last saw and its latest phase, by the object's CTA and offset."""

_PARITY = np.array(1, dtype=np.uint32)


@dataclass(slots=True, eq=False)
class _Wait:
    """The lanes that wait for one phase of one object."""

    lanes: Mask
    barriers: Mbarriers
    offset: int
    parity: int | None
    """Parity of the awaited phase; None where a state names the phase itself."""
    phase: int

    def is_complete(self) -> bool:
        """Whether the phase has completed."""
        if self.parity is not None:
            return self.barriers.has_completed(self.offset, self.parity)
        return self.barriers.at(self.offset).phase > self.phase

    def matched(self) -> int:
        """The completed phase that answers the wait; -1 for that before the first."""
        return self.barriers.at(self.offset).phase - 1 if self.parity is not None else self.phase

    def describe(self) -> str:
        """Return a text for the deadlock report."""
        wanted = f"parity {self.parity}" if self.parity is not None else f"phase {self.phase}"
        return f"mbarrier wait for {wanted}: {self.barriers.describe(self.offset)}"


@visible("mbarrier.test_wait", "mbarrier.try_wait")
def wait(instruction: Instruction, modifiers: Modifiers) -> Step:
    """p = whether the phase has completed. test_wait answers at once; try_wait blocks until it is
    true, or gives up when nothing else can go on (its time limit)."""
    name = instruction.modifiers[1]
    by_parity = modifiers.flag("parity")
    scope = take_scope(modifiers, "acquire")
    if scope == "cta" and scope not in instruction.modifiers:
        scope = ""
    destination, address, operand, *hint = instruction.operands
    target = Target(instruction, address, modifiers)
    modifiers.one_of("b64")
    if target.is_cluster:
        unsupported(instruction, "a wait is for an object in .shared::cta")
    if hint and name == "test_wait":
        unsupported(instruction, "test_wait has no time limit")
    write = writer(destination)
    keys = _parities(operand) if by_parity else _phases(operand)

    def waits(warp: Warp, mask: Mask) -> list[_Wait]:
        found = []
        for lanes, barriers, offset, key in target.groups(warp, mask, keys):
            if offset not in barriers.by_offset:
                with target.naming(warp):
                    barriers.at(offset)
            found.append(_Wait(lanes, barriers, offset, key if by_parity else None, key))
        return found

    def settle(warp: Warp, wanted: list[_Wait]) -> None:
        for one in wanted:
            held = one.is_complete()
            write(warp, FULL if held else NOBODY, one.lanes)
            if held:
                _succeeded(warp, one, scope, target)

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        wanted = waits(warp, mask)
        missing = [one for one in wanted if not one.is_complete()]
        if not missing or name == "test_wait":
            settle(warp, wanted)
            return None
        only = missing[0]
        return Blocked(
            only.is_complete
            if len(missing) == 1
            else lambda: any(m.is_complete() for m in missing),
            lambda: "; ".join(one.describe() for one in missing),
            lambda: settle(warp, wanted),
            lambda: settle(warp, wanted),
            tuple(one.barriers.at(one.offset).phase_changed for one in missing),
        )

    return step


def _parities(operand: Operand) -> Keys:
    read, in_one = reader(operand, "u32"), in_lane(operand, "u32")
    return Keys(lambda warp: read(warp) & _PARITY, lambda warp, lane: in_one(warp, lane) & 1)


def _phases(operand: Operand) -> Keys:
    read, in_one = reader(operand, "u64"), in_lane(operand, "u64")
    return Keys(
        lambda warp: phases_of_states(read(warp)),
        lambda warp, lane: phase_of_state(in_one(warp, lane)),
    )


def _succeeded(warp: Warp, wait: _Wait, scope: str, target: Target) -> None:
    """Learn what the phases up to the matched one released; look for phases that were missed.

    Arrivals are read-modify-writes of one object, so whoever sees a phase complete also knows what
    earlier phases released.
    """
    barriers, offset, machine = wait.barriers, wait.offset, warp.cta.machine
    matched, barrier = wait.matched(), barriers.at(offset)
    seen = _last_seen(warp)
    key = (barriers.cta.index, offset)
    last_barrier, last = seen.get(key, (None, None))
    if last_barrier is not barrier:
        last = None
    seen[key] = (barrier, matched if last is None else max(matched, last))
    if machine.observer is None:
        return
    owner = barriers.cta.index
    # A wait of the same parity as the last one is for the same phase or the next but one.
    if wait.parity is not None and last is not None:
        latest_meant = last + 2 if (last & 1) == wait.parity else last + 1
        if matched >= latest_meant + 2:
            machine.observer.phases_missed(warp, owner, offset, last, matched, target.instruction)
    machine.observer.phase_seen(warp, owner, offset, matched, target.instruction)
    for phase in range(0 if last is None else last + 1, matched + 1):
        machine.observer.acquired(warp, barriers.token(offset, phase), scope)
    if last is not None and last == matched:
        machine.observer.acquired(warp, barriers.token(offset, matched), scope)
