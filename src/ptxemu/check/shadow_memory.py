"""The shadow memory of one launch: what each access does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.check.races import Races, Spot
from ptxemu.check.shadow import ShadowRegion, States, distinct
from ptxemu.events import Access, Space

if TYPE_CHECKING:
    from ptxemu.check.actors import Event
    from ptxemu.check.known_order import Limits

GLOBAL_PAGE_BITS = 16
SHARED_PAGE_BITS = 18
TMEM_BITS = 18
STATES_BEFORE_COMPACTION = 200_000


class ShadowMemory:
    """The regions of a launch, and the states of their granules.

    Args:
        races: judges an event against a state.
        name: for people, of the CTA with an index.
    """

    def __init__(self, races: Races, name: Callable[[int], str]) -> None:
        self._races = races
        self._name = name
        self._states = States()
        self._compact_at = STATES_BEFORE_COMPACTION
        self._regions: dict[tuple[Space, int | None], ShadowRegion] = {}

    def apply(self, access: Access, event: Event) -> None:
        """Judge an event, and keep what it changes."""
        region = self._region(access.space, access.owner)
        states, table, apply = self._states, self._states.table, self._races.apply
        is_disjoint = not event.actor.is_warp
        limits: Limits = {}
        for page, array, index in region.select(access.starts, access.size, distinct=is_disjoint):
            ids = array[index]
            spot = Spot(access.space, region, page, index, ids)
            old = distinct(ids)
            if len(old) == 1:
                state = apply(table[old[0]], event, spot, limits)
                if state.id != old[0]:
                    array[index] = states.number(state)
                continue
            new = [states.number(apply(table[n], event, spot, limits)) for n in old]
            if new.count(new[0]) == len(new):
                array[index] = new[0]
            else:
                array[index] = states.replaced(ids, old, new)
        if len(states.table) > self._compact_at:
            states.compact([p for r in self._regions.values() for p in r.pages.values()])
            self._compact_at = 2 * len(states.table) + STATES_BEFORE_COMPACTION

    def _region(self, space: Space, owner: int | None) -> ShadowRegion:
        region = self._regions.get((space, owner))
        if region is None:
            if space is Space.GLOBAL:
                region = ShadowRegion(
                    "global memory", GLOBAL_PAGE_BITS, self._states.initialised.id
                )
            else:
                assert owner is not None
                nobody = self._states.uninitialised.id
                name = self._name(owner)
                if space is Space.SHARED:
                    label = f"shared memory of {name}"
                    region = ShadowRegion(label, SHARED_PAGE_BITS, nobody, is_one_page=True)
                else:
                    region = ShadowRegion(f"TMEM of {name}", TMEM_BITS, nobody, is_tmem=True)
            self._regions[space, owner] = region
        return region

    def drop(self, space: Space, owner: int | None) -> None:
        """Memory that ceases to exist: reads of it that no write came before are final."""
        region = self._regions.pop((space, owner), None)
        if region is None or space is Space.GLOBAL:
            return
        for page in region.pages.values():
            spot = Spot(space, region, page, slice(0, len(page.ids)), page.ids)
            for number in np.unique(page.ids).tolist():
                self._races.forget(self._states.table[number], spot)

    def drop_all(self) -> None:
        """The run is over."""
        for space, owner in list(self._regions):
            self.drop(space, owner)
