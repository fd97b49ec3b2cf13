"""The shadow memory of one launch: what each access does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.check import known_order
from ptxemu.check.granules import Ids, Index
from ptxemu.check.known_order import Limits
from ptxemu.check.races import Races, Spot
from ptxemu.check.rows import RowStates
from ptxemu.check.shadow import FEW_PIECES, Blank, Page, ShadowRegion, States
from ptxemu.check.state import Event, LoadEvents, WarpActor
from ptxemu.check.tmem_page import TmemPage
from ptxemu.events import Access, AccessKind, Agent, Loads, Space

# Accesses judged by machine code: those that come after all that they conflict with.
#
# What machine code is not sure of is left to `check.races`, and nothing is changed then.

Parts: TypeAlias = Sequence[tuple[Page | TmemPage, Index]]
"""Pages, and which granules of theirs."""
_ROWS_START = bytes(8)
VERDICT_SHIFT = 32
"""See `compiled.judge_code`, which is there only with llvmlite."""
_LOW_BITS = (1 << VERDICT_SHIFT) - 1


class QuickJudge:
    """Judges what is in a known order.

    Args:
        code: `ptxemu.compiled.judge_code`.
        rows: the states and events that it works on.
        races: reports additions in no order.
    """

    def __init__(self, code: ModuleType, rows: RowStates, races: Races) -> None:
        self._code, self._rows, self._races = code.judge(), rows, races
        self._module = code
        self._loads_code: Callable[..., int] | None = None
        self._work = rows.address
        flag, verdict = code.layout.Flag, code.layout.Verdict
        self._of_rows, self._of_one_page = int(flag.ROWS | flag.TMEM), int(flag.OF_ONE_PAGE)
        self._knows_others, self._unfenced = int(flag.KNOWS_OTHERS), int(flag.UNFENCED)
        self._told = int(flag.TOLD)
        self._outside, self._no_room = int(verdict.OUTSIDE), int(verdict.NO_ROOM)
        self._unordered = int(verdict.UNORDERED)

    def left(
        self, event: Event, region: ShadowRegion, starts: NDArray[np.int64], size: int
    ) -> Parts:
        """Judge an access; gives what is left to Python."""
        if event.number < 0:
            self._rows.number_of(event)
        distinct = not event.actor.is_warp
        if not event.is_quick:
            return region.select(starts, size, distinct=distinct)
        if region.tmem is not None:
            return self._left_in_tmem(event, region.tmem, starts, size)
        count = len(starts)
        if distinct and 1 < count <= FEW_PIECES:  # each by itself
            for first in range(count):
                if self._left_in_memory(event, region, starts[first : first + 1], size):
                    return region.select(starts[first:], size, distinct=True)
            return ()
        return self._left_in_memory(event, region, starts, size)

    def _left_in_memory(
        self, event: Event, region: ShadowRegion, starts: NDArray[np.int64], size: int
    ) -> Parts:
        page = region.only_page or region.first_page(starts)
        data, count, row = starts.tobytes(), len(starts), region.fence_row
        if size & 3:
            page.refine(0 if size & 1 else 1)
        shift = page.shift
        verdict = self._judge(event, page, data, page.base, shift, count, size >> shift, 0, row)
        if not verdict:
            return ()
        distinct = not event.actor.is_warp
        if verdict != self._outside:
            return region.select(starts, size, distinct=distinct)
        for page in region.pages_of(starts):
            if size & 3:
                page.refine(0 if size & 1 else 1)
            shift, flags = page.shift, self._of_one_page
            length = size >> shift
            if self._judge(event, page, data, page.base, shift, count, length, flags, row):
                parts = region.select(starts, size, distinct=distinct)
                return [p for p in parts if isinstance(p[0], Page) and p[0].base >= page.base]
        return ()

    def _left_in_tmem(
        self, event: Event, page: TmemPage, starts: NDArray[np.int64], size: int
    ) -> Parts:
        parts = page.select(starts, size)
        self._rows.cover(event)
        for number, index in enumerate(parts):
            is_done = False
            if not event.actor.is_warp and isinstance(index, tuple):
                lanes, columns = index
                first = lanes.start * page.width + columns.start
                count, length = lanes.stop - lanes.start, columns.stop - columns.start
                is_done = not self._judge(
                    event, page, _ROWS_START, first, page.width, count, length, self._of_rows, 0
                )
            if not is_done:
                return [(page, one) for one in parts[number:]]
        return ()

    def loads_done(
        self,
        actor: WarpActor,
        events: LoadEvents,
        loads: Loads,
        page: Page,
        fence_row: int,
        begin: int,
        end: int,
    ) -> int:
        """Judge loads [begin, end) in a page; return the first that is left to Python, or `end`."""
        if self._loads_code is None:
            self._loads_code = self._module.judge_loads()
        place, parts = self._place(page), actor.know.parts
        part = parts[actor.home]
        starts, sizes = loads.addresses
        while True:
            found = self._loads_code(
                place,
                page.count,
                starts,
                page.base,
                page.shift,
                self._work,
                self._knows_others if len(parts) > 1 else 0,
                fence_row,
                part.clocks,
                part.done,
                part.reads,
                part.fenced,
                part.handed_on,
                actor.in_practice,
                sizes,
                events.numbers,
                begin,
                end,
            )
            begin, verdict = found & _LOW_BITS, found >> VERDICT_SHIFT
            if verdict != self._no_room:
                return begin
            self._rows.make_room()

    def _place(self, page: Page | TmemPage) -> int:
        """The address of a page's numbers."""
        if not page.place:
            page.place = page.ids.ctypes.data
            page.count = len(page.ids)
        return page.place

    def _judge(
        self,
        event: Event,
        page: Page | TmemPage,
        starts: bytes,
        base: int,
        shift: int,
        count: int,
        length: int,
        flags: int,
        row: int,
    ) -> int:
        """A `Verdict`; see `compiled.judge_code.judge` for most of these."""
        actor = event.actor
        parts = actor.know.parts
        part = parts.get(actor.home)
        if part is None:
            return -1
        if len(parts) > 1:
            flags |= self._knows_others
        if actor.unfenced_tcgen05:
            flags |= self._unfenced
        place = self._place(page)
        while True:
            verdict: int = self._code(
                place,
                page.count,
                starts,
                base,
                shift,
                count,
                length,
                self._work,
                event.number,
                flags,
                row,
                part.clocks,
                part.done,
                part.reads,
                part.fenced,
                part.handed_on,
                actor.in_practice,
            )
            if not verdict:
                return verdict
            if verdict == self._no_room:
                self._rows.make_room()
            elif verdict == self._unordered and self._races.tell_again(
                self._rows.unordered(), event
            ):
                flags |= self._told
            else:
                return verdict


# States that an access finds, and new states that replace them.

_ID_BYTES = 4
_FEW = 256
"""Numbers up to which a set of Python integers is the quickest way to the distinct ones."""
_CAPACITY = 4096
"""States that there is room for at first."""


class Scans:
    """Scans granules with NumPy."""

    def __init__(self) -> None:
        self._new: Ids = np.zeros(_CAPACITY, dtype=np.int32)

    def states(self, page: Page | TmemPage, index: Index) -> list[int]:
        """The numbers of the states of granules, in order."""
        array, where = page.located(index)
        ids = array[where]
        data = ids.tobytes()
        if data == data[:_ID_BYTES] * ids.size:
            return [ids.item(0)]
        if ids.size <= _FEW:
            return sorted(set(ids.ravel().tolist()))
        flat = ids.reshape(-1)
        changes = np.flatnonzero(flat[1:] != flat[:-1])
        return sorted({int(flat[0]), *flat[changes + 1].tolist()})

    def fill(self, page: Page | TmemPage, index: Index, number: int) -> None:
        """Granules whose states were asked for get a number."""
        array, where = page.located(index)
        array[where] = number

    def replace(self, page: Page | TmemPage, index: Index, old: list[int], new: list[int]) -> None:
        """The same, each the one in `new` for its own, which is in `old`."""
        array, where = page.located(index)
        if old[-1] >= len(self._new):
            self._new = np.zeros(2 * old[-1], dtype=np.int32)
        self._new[old] = new
        array[where] = self._new.take(array[where])


GLOBAL_PAGE_BITS = 16
SHARED_PAGE_BITS = 18
TMEM_BITS = 18
STATES_BEFORE_COMPACTION = 200_000
ACCESSES_AT_ONCE = 500
"""Accesses after which it is asked whether machine code is to judge."""


class ShadowMemory:
    """The regions of a launch, and the states of their granules.

    Args:
        races: judges an event against a state.
        name: for people, of the CTA with an index.
        blank: global memory that nobody has written.
    """

    def __init__(self, races: Races, name: Callable[[int], str], blank: Blank = ()) -> None:
        self._races = races
        self._name = name
        self._blank = tuple(blank)
        self._states: States = States()
        self._compact_at = STATES_BEFORE_COMPACTION
        self._regions: dict[tuple[Space, int | None], ShadowRegion] = {}
        self._scans = Scans()
        self._quick: QuickJudge | None = None
        self._until_asked = ACCESSES_AT_ONCE
        """Accesses until machine code is asked for."""
        self._ask_for_code()

    def apply(self, access: Access, event: Event) -> None:
        """Judge an event, and keep what it changes."""
        self._apply(access, event)
        self._tidy()

    def postpone(self, event: Event) -> None:
        """A warp's event is of the clock behind its next tick: others do not know it by then."""
        actor = event.actor
        event.clock = actor.clock + 1
        actor.events = {key: one for key, one in actor.events.items() if one is not event}
        if event.number >= 0 and isinstance(self._states, RowStates):
            self._states.put_clock(event)

    def loaded(self, actor: WarpActor, agent: Agent, loads: Loads, count: int, time: int) -> None:
        """Judge the first `count` of a warp's loads; `time`: that of what came before them."""
        quick, rows = self._quick, self._states
        if quick is None or not isinstance(rows, RowStates):
            for number in range(count):
                access = loads.access(agent, actor.cta, number)
                self._apply(access, actor.event(access, 0, time + number + 1))
            self._tidy()
            return
        events = actor.load_events.get(loads)
        if events is None or events.clock != actor.clock or events.generation != rows.generation:
            first = events.time if events is not None and events.clock == actor.clock else time
            events = actor.load_events[loads] = LoadEvents(actor, agent, loads, first)
            rows.number_loads(events)
        for begin, end, space, granule in loads.stretches:
            owner = actor.cta if space is Space.SHARED else None
            region = self._regions.get((space, owner)) or self._region(space, owner)
            last = min(end, count)
            while begin < last:
                page, stop = region.page_of_loads(loads.starts, begin, last)
                page.refine(granule)
                begin = quick.loads_done(actor, events, loads, page, region.fence_row, begin, stop)
                if begin < stop:  # left to Python
                    access = loads.access(agent, actor.cta, begin)
                    self._apply(access, rows.event(int(events.numbers[begin])))
                    begin += 1
        self._tidy()

    def _apply(self, access: Access, event: Event) -> None:
        space = access.space
        region = self._regions.get((space, access.owner)) or self._region(space, access.owner)
        if self._quick is not None:
            parts = self._quick.left(event, region, access.starts, access.size)
        else:
            is_disjoint = not event.actor.is_warp
            parts = region.select(access.starts, access.size, distinct=is_disjoint)
            self._until_asked -= 1
        if parts:
            self._apply_to_parts(event, region, parts)

    def _tidy(self) -> None:
        """Forget states that are not needed; ask for machine code if it is time."""
        if len(self._states) > self._compact_at:
            self._states.compact([p for r in self._regions.values() for p in r.pages.values()])
            self._compact_at = 2 * len(self._states) + STATES_BEFORE_COMPACTION
        if self._until_asked <= 0:
            self._ask_for_code()

    def _apply_to_parts(self, event: Event, region: ShadowRegion, parts: Parts) -> None:
        limits: Limits = {}
        for page, index in parts:
            old = self._scans.states(page, index)
            self._enter(event, Spot(region.space, region, page, index), old, limits)

    def _ask_for_code(self) -> None:
        """Machine code judges from here on, if accesses are many enough."""
        code = machine_code.judge(ACCESSES_AT_ONCE - self._until_asked)
        self._until_asked = ACCESSES_AT_ONCE
        if code is not None:
            self._states = rows = RowStates(code.layout, self._states)
            self._quick = QuickJudge(code, rows, self._races)

    def _enter(self, event: Event, spot: Spot, old: list[int], limits: Limits) -> None:
        """Judge an event against the states `old` of some granules, and keep what it changes."""
        space, _, page, index = spot
        states, after = self._states, known_order.after
        is_read = event.kind is AccessKind.READ and not event.reach and space is not Space.TMEM
        is_read = is_read and len(old) > 1 and not event.is_non_coherent
        whose, since = event.follower(space) if is_read else 0, event.since
        new = []
        for number in old:
            following = states.following(number, event)
            if following < 0:
                state = states.state(number)
                # What nothing stands in the way of is told quickly.
                if is_read and known_order.may_read(state, whose, since):
                    behind = known_order.read_too(state, event)
                else:
                    known = after(state, event, space, limits)
                    behind = known or self._races.judge(state, event, spot)
                following = states.follow(number, event, behind)
            new.append(following)
        if new != old:
            if new.count(new[0]) == len(new):
                self._scans.fill(page, index, new[0])
            else:
                self._scans.replace(page, index, old, new)

    def _region(self, space: Space, owner: int | None) -> ShadowRegion:
        """A region that nobody has accessed yet."""
        nobody = self._states.uninitialised.id
        if space is Space.GLOBAL:
            region = ShadowRegion(
                space, "global memory", GLOBAL_PAGE_BITS, self._states.initialised.id
            )
            region.blank = self._blank
        else:
            assert owner is not None
            name = self._name(owner)
            if space is Space.SHARED:
                label = f"shared memory of {name}"
                region = ShadowRegion(space, label, SHARED_PAGE_BITS, nobody, is_one_page=True)
            else:
                region = ShadowRegion(space, f"TMEM of {name}", TMEM_BITS, nobody, is_tmem=True)
        self._regions[space, owner] = region
        return region

    def drop(self, space: Space, owner: int | None) -> None:
        """Memory that ceases to exist: reads of it that no write came before are final."""
        region = self._regions.pop((space, owner), None)
        if region is None or (space is Space.GLOBAL and not region.blank):
            return
        for page in region.pages.values():
            spot = Spot(space, region, page, slice(0, len(page.ids)))
            for number in self._states.not_simple(np.unique(page.ids)):
                self._races.forget(self._states.state(number), spot)

    def drop_all(self) -> None:
        """The run is over."""
        if self._quick is None:
            self._ask_for_code()
        for space, owner in list(self._regions):
            self.drop(space, owner)
