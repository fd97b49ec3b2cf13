"""Races between lanes of one warp: a missing bar.warp.sync.

The rest of the check takes a warp as one agent. Its lanes are threads, though, ordered by a barrier
of the warp or of the CTA; by what some lane releases and another one acquires; and, so as to report
nothing that is sound on hardware, by elect and by matrix instructions, for which all lanes wait
(what wmma.store stores comes behind its wait). Volatile data are plain ones, as in CUDA C++.
Shuffles, votes, match and redux make lanes wait, too, and order no memory (PTX ISA, "bar.warp.sync"
alone promises that; CUDA C++ Programming Guide, "Warp Shuffle Functions", "Warp Vote Functions": no
memory barrier): what only they part is an error against the ISA, `shuffle-order`.

A warp's accesses are noted, and judged when all its lanes have met: only two of the same stretch
can race. In most stretches no word is accessed by two lanes of which one writes, as one sort shows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.findings import Findings
from ptxemu.check.lanes import (
    ALL_BYTES,
    ALL_LANES,
    Form,
    Ids,
    LaneReleases,
    Meeting,
    Noted,
    Stretch,
    is_ordered,
    lanes_of,
    noted,
    noted_loads,
)
from ptxemu.check.races import Races
from ptxemu.check.state import WarpActor
from ptxemu.check.tokens import is_mbarrier_token
from ptxemu.events import Access, AccessKind, Agent, Loads, Proxy, Space
from ptxemu.machine.lanes import lane_names, mask_of
from ptxemu.syntax.ast import Instruction

MOST_NOTED = 256
"""Accesses of a warp that are judged together at most; of more the later half stays."""
MOST_PLACES = 64
"""Words of a stretch that are looked at one by one."""
MOST_PAIRS = 2000
"""Pairs of accesses of a word that are looked at."""
CODE = "lane-race"
BY_EXCHANGE = "shuffle-order"
_EXCHANGES = ("shfl", "vote", "match", "redux")
_CONVERGENT = {"sync", "aligned"}
_BARRIERS = ("bar", "barrier")
_STORES = ("wmma", "store")
"""Lanes meet before its stores, not behind them."""


class LaneRaces:
    """Notes what warps do, and reports pairs of accesses of different lanes in no order."""

    def __init__(self, findings: Findings, races: Races) -> None:
        self._findings = findings
        self._races = races
        self._stretches: dict[WarpActor, Stretch] = {}
        self._forms: dict[int, Form] = {}
        """Forms by pc and kind of access."""
        self._loads_forms: dict[Loads, list[Form]] = {}
        self.releases = LaneReleases()

    def met(self, warp: WarpActor, agent: Agent, lanes: int, instruction: Instruction) -> None:
        """The warp executes an instruction at which so many of its lanes meet."""
        self.releases.met(warp, agent)
        stretch = self._stretches.get(warp)
        if stretch is not None and stretch.position:
            exchanges = instruction.modifiers[0] in _EXCHANGES
            self._meet(warp, stretch, agent, lanes, exchanges=exchanges)

    def acquires(self, warp: WarpActor, agent: Agent) -> None:
        """Some or all lanes acquire: what other lanes did may have been released before."""
        self.releases.met(warp, agent, acquires=True)
        stretch = self._stretches.get(warp)
        if stretch is not None and stretch.position and stretch.has_released:
            self._meet(warp, stretch, agent, 0, acquires=True)

    def released(self, warp: WarpActor) -> None:
        """Some lane has done what another one can acquire."""
        if (stretch := self._stretches.get(warp)) is not None:
            stretch.has_released = True

    def at_barrier(self, warp: WarpActor, agent: Agent, token: Hashable, *, waits: bool) -> None:
        """Some or all lanes arrive at a barrier, or have waited for it: maybe not all at once."""
        if is_mbarrier_token(token):
            return
        if waits:
            self.releases.met(warp, agent, acquires=True)
        stretch = self._stretches.get(warp)
        if stretch is not None and stretch.position:
            self._meet(warp, stretch, agent, 0, acquires=waits, token=token)

    def accessed(self, warp: WarpActor, access: Access) -> None:
        """Note an access of single lanes."""
        key = access.instruction.pc << 2 | access.kind.number
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._form_of(access)
        if not form.is_noted or form.size != access.size:
            return
        starts = access.starts.tobytes()
        lanes = ALL_LANES
        if len(starts) != ALL_BYTES:
            some = _lanes_of(access.agent, len(access.starts))
            if some is None:
                return
            lanes = some
        stretch = self._stretches.get(warp)
        if stretch is None:
            stretch = self._stretches[warp] = Stretch()
        ids = access.space, access.owner
        notes = stretch.notes(ids)
        silent = access.is_silent if access.silent_pieces is None else access.silent_pieces
        if form.is_write:
            stretch.written.add(ids)
            if form.is_strong:
                stretch.has_released = True
        stretch.position += 1
        one = stretch.position, form, starts, lanes, silent, stretch.exchanges
        notes.entries.append(noted(one))
        notes.count += 1
        self._shorten(warp, stretch, ids)

    def loaded(self, warp: WarpActor, loads: Loads, count: int) -> None:
        """Note loads of a whole warp."""
        forms = self._loads_forms.get(loads)
        if forms is None:
            forms = self._loads_forms[loads] = [
                Form(i, size, is_write=False, is_strong=False, is_noted=True, is_volatile=False)
                for i, size in zip(loads.instructions, loads.sizes, strict=True)
            ]
        stretch = self._stretches.get(warp)
        if stretch is None:
            stretch = self._stretches[warp] = Stretch()
        first = stretch.position + 1
        stretch.position += count
        data = loads.starts[:count].tobytes()
        for begin, end, space, _ in loads.stretches:
            if begin < count:
                ids = space, warp.cta if space is Space.SHARED else None
                row = noted_loads((first, forms, data, begin, min(end, count), stretch.exchanges))
                notes = stretch.notes(ids)
                notes.entries.append(row)
                notes.count += row.end - begin
                self._shorten(warp, stretch, ids)

    def _shorten(self, warp: WarpActor, stretch: Stretch, ids: Ids) -> None:
        """Judge what is noted of a memory, and forget its older half, if it is much."""
        notes = stretch.notes(ids)
        if notes.count >= MOST_NOTED:
            if ids in stretch.written:
                self._judge(warp, stretch, ids)
            kept = notes.noted()[-MOST_NOTED // 2 :]
            notes.entries[:], notes.count = kept, len(kept)
            if not any(one.form.is_write for one in kept):
                stretch.written.discard(ids)

    def _form_of(self, access: Access) -> Form:
        instruction, kind = access.instruction, access.kind
        is_read = kind is AccessKind.READ
        return Form(
            instruction,
            access.size,
            not is_read,
            access.order != "weak" or kind is AccessKind.ATOMIC,
            access.proxy is Proxy.GENERIC
            and access.space is not Space.TMEM
            and instruction.modifiers[0] != "mbarrier"
            and (instruction.modifiers[:2] == _STORES or not makes_lanes_meet(instruction)),
            access.order == "volatile"
            and (not is_read or self._races.undetermined.reads_data(instruction)),
        )

    def finish(self) -> None:
        """Judge what is left: warps that have exited, or that stopped."""
        for warp, stretch in self._stretches.items():
            for ids in stretch.written:
                self._judge(warp, stretch, ids)
            stretch.clear()

    def exited(self, warp: WarpActor) -> None:
        """A warp's lanes are gone."""
        stretch = self._stretches.pop(warp, None)
        if stretch is not None:
            for ids in stretch.written:
                self._judge(warp, stretch, ids)

    def _meet(
        self,
        warp: WarpActor,
        stretch: Stretch,
        agent: Agent,
        lanes: int,
        *,
        acquires: bool = False,
        token: Hashable = None,
        exchanges: bool = False,
    ) -> None:
        """Some lanes meet; where these are all that are left, what came before is over."""
        if lanes != 32:
            active, alive = lanes_of(agent)
            if alive & ~active:
                meeting = Meeting(stretch.position, active, acquires, token, exchanges)
                if stretch.meetings[-1:] == [meeting]:
                    return
                stretch.meetings.append(meeting)
                if len(stretch.meetings) > 2 * MOST_NOTED:
                    del stretch.meetings[:MOST_NOTED]
                return
        if exchanges:
            stretch.exchanges += 1
            return
        for ids in stretch.written:
            self._judge(warp, stretch, ids)
        stretch.clear()

    def _judge(self, warp: WarpActor, stretch: Stretch, ids: Ids) -> None:
        """Find words that two lanes have accessed and one has written, and report on them."""
        noted = stretch.notes(ids).noted()
        if _are_apart(noted):
            return
        keys, lanes, index = _pieces(noted)
        order = np.argsort(keys, kind="stable")
        keys, lanes, index = keys[order], lanes[order], index[order]
        is_same = keys[1:] == keys[:-1]
        is_shared = is_same & (lanes[1:] != lanes[:-1])
        if not is_shared.any():
            return
        starts = np.flatnonzero(np.concatenate(([True], ~is_same)))
        writes = np.array([one.form.is_write for one in noted])[index]
        is_written = np.logical_or.reduceat(writes, starts)
        is_shared = np.logical_or.reduceat(np.concatenate((is_shared, [False])), starts)
        several = np.minimum.reduceat(index, starts) != np.maximum.reduceat(index, starts)
        bounds = [*starts.tolist(), len(keys)]
        told: set[bytes] = set()
        for number in np.flatnonzero(is_written & is_shared & several).tolist()[:MOST_PLACES]:
            part = slice(bounds[number], bounds[number + 1])
            alike = index[part].tobytes() + lanes[part].tobytes() * bool(stretch.meetings)
            if alike not in told and self._judge_word(
                warp, stretch, ids, noted, index[part].tolist(), lanes[part].tolist()
            ):
                told.add(alike)

    def _judge_word(
        self,
        warp: WarpActor,
        stretch: Stretch,
        ids: Ids,
        noted: list[Noted],
        index: list[int],
        lanes: list[int],
    ) -> bool:
        """Report on the accesses of one word: of each its number and its lane.

        Returns:
            whether other words with the same accesses need no report: this has a difference.
        """
        by_access: dict[int, list[int]] = {}
        for number, lane in zip(index, lanes, strict=True):
            by_access.setdefault(number, []).append(lane)
        is_told = False
        for one, other in _pairs(noted, sorted(by_access)):
            first, second = noted[one], noted[other]
            waited = first.exchanges != second.exchanges
            for meetings, code in _judges(stretch.meetings, waited=waited):
                found = next(
                    (
                        (a, b)
                        for a in by_access[one]
                        for b in by_access[other]
                        if a != b
                        and not is_ordered(meetings, first.position, a, second.position, b)
                    ),
                    None,
                )
                if found is not None:
                    is_told = self._report(warp, ids, first, second, found, code) or is_told
                    break
        return is_told

    def _report(
        self,
        warp: WarpActor,
        ids: Ids,
        first: Noted,
        second: Noted,
        lanes: tuple[int, int],
        code: str,
    ) -> bool:
        """Report a pair; whether their order made a difference here."""
        a, b = lanes
        code, equal = code or _code(ids[0], first.form, second.form), ""
        is_equal = _is_silent(second, b) or (_is_silent(first, a) and not second.form.is_write)
        if is_equal:
            equal = "the value was the same in this run, which other data need not be: "
            writes = [one.form for one in (first, second) if one.form.is_write]
            if len(writes) == 2 and all(self._races.is_fixed(one.instruction) for one in writes):
                code = "same-value-race"
                equal = "harmless, since the value is the same whatever the data are: "
        address = _start(second, b)
        where = f"{ids[0].value} memory 0x{address:x}"
        names = " and ".join(lane_names(mask_of(1 << lane)) for lane in (a, b))

        def message(one: Any, other: Any) -> str:
            edge = (
                ""
                if code == "same-value-race"
                else f": needs bar.warp.sync between {one.where} and {other.where}"
            )
            if code == BY_EXCHANGE:
                edge = f", which only exchange values in between: that orders no memory{edge}"
            return f"{one}, and {other}, both of {where}: {equal}lanes {names} of one warp{edge}"

        self._findings.add(
            code,
            (warp, first.form.instruction, _action(first.form)),
            (warp, second.form.instruction, _action(second.form)),
            message,
        )
        return not is_equal


def _pairs(noted: list[Noted], accesses: list[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a word's accesses of which one writes and one is weak, those of a write together."""
    left = MOST_PAIRS
    for write in accesses:
        if not noted[write].form.is_write:
            continue
        for other in accesses:
            form = noted[other].form
            is_strong = form.is_strong and noted[write].form.is_strong
            if is_strong and not form.is_write and form.is_volatile:
                is_strong = not noted[write].form.is_volatile
            if other == write or is_strong or (form.is_write and other < write):
                continue
            yield min(write, other), max(write, other)
            left -= 1
            if not left:
                return


def _judges(meetings: list[Meeting], *, waited: bool) -> Iterator[tuple[list[Meeting], str]]:
    """Meetings, and the code of what they do not order: with exchanges first, if not all lanes had
    one in between; then without."""
    if not waited:
        yield meetings, ""
    if waited or any(one.exchanges for one in meetings):
        yield [one for one in meetings if not one.exchanges], BY_EXCHANGE


def makes_lanes_meet(instruction: Instruction) -> bool:
    """Whether lanes that execute an instruction wait for each other."""
    modifiers = instruction.modifiers
    return modifiers[0] in _BARRIERS or not _CONVERGENT.isdisjoint(modifiers)


def _are_apart(noted: list[Noted]) -> bool:
    """Whether each lane has places of its own, as far as a quick look tells."""
    size = noted[0].form.size
    places = memoryview(b"".join({one.starts + one.lanes: one.starts for one in noted}.values()))
    return len(noted) < 2 or (
        all(one.form.size == size for one in noted)
        and len(set(places.cast("q"))) * 8 == len(places)
    )


def _pieces(noted: list[Noted]) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Return the units of memory that accesses cover, the lane of each, and whose each is."""
    keys = np.frombuffer(b"".join([one.starts for one in noted]), np.int64)
    lanes = np.frombuffer(b"".join([one.lanes for one in noted]), np.uint8)
    counts = [len(one.lanes) for one in noted]
    index = np.repeat(np.arange(len(noted)), counts)
    sizes = [one.form.size for one in noted]
    unit, largest = min(sizes), max(sizes)
    if unit == largest:
        return keys, lanes, index
    repeats = np.repeat(-(-np.array(sizes) // unit), counts)
    ends = np.cumsum(repeats)
    inside = np.arange(ends[-1]) - np.repeat(ends - repeats, repeats)
    keys = np.repeat(keys // unit, repeats) + inside
    return keys, np.repeat(lanes, repeats), np.repeat(index, repeats)


def _lanes_of(agent: Agent, count: int) -> bytes | None:
    """The lane of each of `count` pieces; None if they are not one a lane."""
    active, _ = lanes_of(agent)
    lanes = bytes(lane for lane in range(32) if active >> lane & 1)
    return lanes if len(lanes) == count else None


def _code(space: Space, first: Form, second: Form) -> str:
    """The code of two accesses in no order, of which one is weak or both are volatile."""
    if first.is_strong == second.is_strong:
        return CODE
    if first.is_write and second.is_write:
        return "lost-update"
    return "mixed-race" if space is Space.GLOBAL else CODE


def _is_silent(one: Noted, lane: int) -> bool:
    if isinstance(one.silent, bool):
        return one.form.is_write and one.silent
    return bool(one.silent[one.lanes.index(lane)])


def _start(one: Noted, lane: int) -> int:
    return int(np.frombuffer(one.starts, np.int64)[one.lanes.index(lane)])


def _action(form: Form) -> str:
    if form.is_write and form.is_strong and form.instruction.modifiers[0] in ("atom", "red"):
        return "generic atomic access"
    return "generic write" if form.is_write else "generic read"
