"""The warps of the resident CTAs, and which of them are worth asking."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from ptxemu.machine.state import Warp


class ResidentWarps(Sequence["Warp"]):
    """Warps in the order in which they started, each awake or asleep.

    Args:
        woken: where warps whose sleep ended are put; taken out here.
    """

    def __init__(self, woken: list[Warp]) -> None:
        self._warps: list[Warp] = []
        self._ids: list[int] = []
        """Their agent ids, which grow."""
        self._awake = bytearray()
        self._woken = woken

    def __len__(self) -> int:
        return len(self._warps)

    @overload
    def __getitem__(self, index: int) -> Warp: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Warp]: ...
    def __getitem__(self, index: int | slice) -> Warp | Sequence[Warp]:
        return self._warps[index]

    def extend(self, warps: Iterable[Warp]) -> None:
        """Warps of CTAs that have become resident."""
        for warp in warps:
            self._warps.append(warp)
            self._ids.append(warp.agent_id)
            self._awake.append(1)

    def keep(self, is_kept: Callable[[Warp], bool]) -> None:
        """Forget the others."""
        kept = [index for index, warp in enumerate(self._warps) if is_kept(warp)]
        self._warps = [self._warps[index] for index in kept]
        self._ids = [self._ids[index] for index in kept]
        self._awake = bytearray(self._awake[index] for index in kept)

    def remove(self, index: int) -> None:
        """A warp has exited."""
        del self._warps[index], self._ids[index], self._awake[index]

    def sleep(self, index: int) -> None:
        """A warp waits; it is awake again when it is found in `woken`."""
        self._awake[index] = 0

    def next_awake(self, first: int, end: int) -> int:
        """Index of the first warp of [first, end) that is awake; -1 where none is."""
        if self._woken:
            self._wake()
        return self._awake.find(1, first, end)

    def _wake(self) -> None:
        for warp in self._woken:
            index = bisect_left(self._ids, warp.agent_id)
            if index < len(self._ids) and self._ids[index] == warp.agent_id:
                self._awake[index] = 1
        self._woken.clear()
