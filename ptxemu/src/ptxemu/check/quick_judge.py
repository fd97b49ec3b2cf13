"""Accesses judged by machine code: those that come after all that they conflict with.

What machine code is not sure of is left to `check.races`, and nothing is changed then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ptxemu.check.shadow import FEW_PIECES, Page, ShadowRegion
from ptxemu.check.tmem_page import TmemPage

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from numpy.typing import NDArray

    from ptxemu.check.granules import Index
    from ptxemu.check.races import Races
    from ptxemu.check.rows import RowStates
    from ptxemu.check.state import Event, LoadEvents, WarpActor
    from ptxemu.events import Loads

Parts: TypeAlias = "Sequence[tuple[Page | TmemPage, Index]]"
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
