"""Knowledge that relaxed reads and waits of a warp have seen, and that it has not acquired yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ptxemu.check.vector_clock import Knowledge

_MOST = 8
"""Releases seen at one place that are kept apart."""


class Pending:
    """Knowledge that was seen, by the distance to who released it and by the place.

    A fence acquires what its scope reaches and leaves the rest for a wider one (PTX ISA, "Acquire
    Patterns": a strong read, then a fence); an acquire of the same place takes what was seen there.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[Hashable, list[Knowledge]]] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def see(self, level: int, place: Hashable, found: Knowledge) -> None:
        """Note what was seen at a place; it must not change from here on."""
        before = self._seen.setdefault(level, {}).setdefault(place, [])
        if any(one is found for one in before):
            return
        before.append(found)
        if len(before) > _MOST:
            before[:] = [united(before)]

    def see_latest(self, level: int, place: Hashable, found: Knowledge) -> None:
        """The same of a place where what is seen later holds what was seen before."""
        self._seen.setdefault(level, {})[place] = [found]

    def take(self, level: int) -> list[Knowledge]:
        """Acquire what was seen up to a level."""
        taken = []
        for one in [one for one in self._seen if one <= level]:
            for found in self._seen.pop(one).values():
                taken += found
        return distinct(taken)

    def at(self, place: Hashable, level: int) -> list[Knowledge]:
        """All that was seen at a place up to a level."""
        return distinct(
            found
            for one, places in self._seen.items()
            if one <= level
            for found in places.get(place, ())
        )

    def all(self) -> list[Knowledge]:
        """All that was seen."""
        return distinct(
            one for places in self._seen.values() for found in places.values() for one in found
        )


def united(several: list[Knowledge]) -> Knowledge:
    """Knowledge that holds what each of several does."""
    whole = several[0].copy()
    for one in several[1:]:
        whole.unite(one)
    return whole


def distinct(several: list[Knowledge] | Iterator[Knowledge]) -> list[Knowledge]:
    """Each object once."""
    return list({id(one): one for one in several}.values())
