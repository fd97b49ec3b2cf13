"""Shadow memory: for every word, an interned state of who wrote it last and who read it since.

A shadow array holds numbers of states; states are few compared with words, so that an access is a
scan, one judgement a distinct state, and a scatter: by `check.quick_judge` where machine code can
do it, else by `check.shadow_memory` and `check.races`. Bytes that sub-word accesses
touch are tracked one by one: their page becomes finer when that happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.granules import Ids, Index, Pieces
from ptxemu.check.proxies import ROW_OF_SPACE
from ptxemu.check.state import Event, State
from ptxemu.check.tmem_page import TmemPage
from ptxemu.check.vector_clock import GENERIC
from ptxemu.events import Space

Blank: TypeAlias = "Sequence[tuple[int, int]]"
"""Ranges of addresses: begin and end of each."""
UNINITIALISED = 0
"""The number of the state of what nobody has touched."""
WORD_SHIFT = 2
"""log2 of the bytes of a granule, unless the page has been refined."""


def is_simple(state: State) -> bool:
    """Whether a state is of known writes and reads alone."""
    return state.initialised and not (state.hidden or state.suspects or state.observers)


class States:
    """The interned states by number; unused ones are dropped now and then."""

    def __init__(self) -> None:
        self.uninitialised = State((), (), initialised=False)
        self.initialised = State((), ())
        self.table: list[State] = []
        self.number(self.uninitialised)
        self.number(self.initialised)

    def number(self, state: State) -> int:
        """The state's number; it gets one if it has none."""
        if state.id < 0:
            state.id = len(self.table)
            self.table.append(state)
        return state.id

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self.table)

    def state(self, number: int) -> State:
        """The state with a number."""
        return self.table[number]

    def not_simple(self, numbers: Ids) -> list[int]:
        """The numbers, of some, whose states are not `is_simple`."""
        return [number for number in numbers.tolist() if not is_simple(self.table[number])]

    def following(self, number: int, event: Event) -> int:
        """Return the number of the state that `event` led to; -1 if it was not the last event of
        the state."""
        state = self.table[number]
        if state.next_event is not event or state.next_state is None:
            return -1
        return self.number(state.next_state)

    def follow(self, number: int, event: Event, following: State) -> int:
        """Note the state that follows a state after an event; return its number."""
        state = self.table[number]
        state.next_event, state.next_state = event, following
        return self.number(following)

    def compact(self, pages: list[Page | TmemPage]) -> None:
        """Renumber the states that `pages` still hold and forget the others."""
        old, kept = self.table, {0, 1}
        for page in pages:
            kept.update(np.unique(page.ids).tolist())
        renumbered = np.zeros(len(old), dtype=np.int32)
        self.table = []
        for state in old:
            state.next_event = state.next_state = None
            number, state.id = state.id, -1
            if number in kept:
                renumbered[number] = self.number(state)
        for page in pages:
            page.ids[:] = renumbered[page.ids]


class Page:
    """State numbers of a piece of memory, one for every 2**shift bytes."""

    __slots__ = ("base", "count", "ids", "place", "shift")

    def __init__(self, base: int, size: int, state: int) -> None:
        self.base = base
        """First byte."""
        self.shift = WORD_SHIFT
        self.ids: Ids = np.full(size >> WORD_SHIFT, state, dtype=np.int32)
        self.place = self.count = 0
        """Address of the numbers in this process, and their count; 0 if unknown (`Scans`)."""

    def clear(self, begin: int, end: int) -> None:
        """Nobody has written the bytes from `begin` to `end`, as far as they are in the page."""
        first = max(begin - self.base, 0) >> self.shift
        last = max(end - self.base, 0) >> self.shift
        self.ids[first:last] = UNINITIALISED

    def refine(self, shift: int) -> None:
        """Track granules of 2**shift bytes, if they are larger now."""
        if shift < self.shift:
            self.ids = np.repeat(self.ids, 1 << (self.shift - shift))
            self.shift, self.place = shift, 0

    def address(self, index: Index, position: int) -> int:
        """The first byte of the granule at `position` of what `index` selects."""
        if isinstance(index, slice):
            return self.base + (int(index.start) + position << self.shift)
        assert isinstance(index, Pieces)
        return self.base + (int(index.granules().reshape(-1)[position]) << self.shift)

    def located(self, index: Index) -> tuple[Ids, Any]:
        """The array that `index` is of, and NumPy's index into it."""
        return self.ids, index.granules() if isinstance(index, Pieces) else index


FEW = 256
"""Starts up to which Python finds the first and the last quickest."""
FEW_PIECES = 4
"""Pieces up to which each is quicker taken by itself."""


class ShadowRegion:
    """One address space: global memory, or the shared memory or TMEM of a CTA."""

    __slots__ = (
        *("_bits", "_initial", "blank", "fence_row", "name"),
        *("only_page", "pages", "space", "tmem"),
    )

    def __init__(
        self,
        space: Space,
        name: str,
        page_bits: int,
        initial: int,
        *,
        is_one_page: bool = False,
        is_tmem: bool = False,
    ) -> None:
        """`is_one_page`: all addresses are below 2**page_bits."""
        self.space = space
        self.name = name
        """Name in messages: "shared memory of cta (0,0,0)"."""
        self._bits = page_bits
        self._initial = initial
        self.pages: dict[int, Page | TmemPage] = {}
        self.blank: Blank = ()
        """Bytes that nobody has written, whatever the others' first state is."""
        self.fence_row = ROW_OF_SPACE.get(space, GENERIC)
        """The row of clocks of what is ordered for the async proxy, too."""
        self.only_page: Page | None = None
        self.tmem: TmemPage | None = None
        if is_tmem:
            self.tmem = self.pages[0] = TmemPage(initial)
        elif is_one_page:
            self.only_page = self.page(0)

    def page(self, number: int) -> Page:
        """The page with that number; memory that nobody touched has none yet."""
        page = self.pages.get(number)
        if page is None:
            size = 1 << self._bits
            page = self.pages[number] = Page(number * size, size, self._initial)
            for begin, end in self.blank:
                page.clear(begin, end)
        assert isinstance(page, Page)
        return page

    def first_page(self, starts: NDArray[np.int64]) -> Page:
        """The page of the first byte of pieces."""
        return self.only_page or self.page(starts.item(0) >> self._bits)

    def page_of_loads(self, starts: NDArray[np.int64], begin: int, end: int) -> tuple[Page, int]:
        """The page in which pieces [begin, stop) of an access each start, (n, 32), and `stop`."""
        if self.only_page is not None:
            return self.only_page, end
        number, *others = (starts[begin:end, 0] >> self._bits).tolist()
        alike = next((k for k, other in enumerate(others, 1) if other != number), end - begin)
        return self.page(number), begin + alike

    def pages_of(self, starts: NDArray[np.int64]) -> list[Page]:
        """The pages in which pieces start, in order."""
        return [self.page(number) for number in sorted({s >> self._bits for s in starts.tolist()})]

    def select(
        self, starts: NDArray[np.int64], size: int, *, distinct: bool
    ) -> list[tuple[Page | TmemPage, Index]]:
        """The granules of an access: pages, and which of theirs.

        Args:
            starts, size: pieces (see `events.Access`).
            distinct: no byte is in two pieces, so that pieces without gaps are one range.
        """
        if self.tmem is not None:
            tmem = self.tmem
            return [(tmem, index) for index in tmem.select(starts, size)]
        count = len(starts)
        if count == 1:
            low = starts.item(0)
            high, distinct = low + size, True
        elif self.only_page is not None and not distinct:
            page = self.only_page
            if size & 3:
                page.refine(0 if size & 1 else 1)
            return [(page, Pieces(starts, size, 0, page.shift))]
        elif distinct and count <= FEW_PIECES:
            return [
                one for start in starts for one in self.select(start[None], size, distinct=True)
            ]
        elif count <= FEW:
            listed = starts.tolist()
            low, high = min(listed), max(listed) + size
        else:
            low, high = int(starts.min()), int(starts.max()) + size
        first = low >> self._bits
        if first == (high - 1) >> self._bits:
            page = self.page(first)
            if size & 3:
                page.refine(0 if size & 1 else 1)
            shift, low = page.shift, low - page.base
            if distinct and count * size == high - page.base - low:
                return [(page, slice(low >> shift, high - page.base >> shift))]
            return [(page, Pieces(starts, size, page.base, shift))]
        return self._select_pages(starts, size, range(first, ((high - 1) >> self._bits) + 1))

    def _select_pages(
        self, starts: NDArray[np.int64], size: int, numbers: range
    ) -> list[tuple[Page | TmemPage, Index]]:
        selected: list[tuple[Page | TmemPage, Index]] = []
        span = 1 << self._bits
        for number in numbers:
            begin = number * span
            low = np.maximum(starts, begin)
            high = np.minimum(starts + size, begin + span)
            here = high > low
            if not here.any():
                continue
            page = self.page(number)
            if size & 3:
                page.refine(0 if size & 1 else 1)
            low, high = low[here] - begin, high[here] - begin
            for length in np.unique(high - low).tolist():
                pieces = low[high - low == length]
                if len(pieces) == 1:
                    start = int(pieces[0])
                    index: Index = slice(start >> page.shift, start + length >> page.shift)
                else:
                    index = Pieces(pieces, length, 0, page.shift)
                selected.append((page, index))
        return selected
