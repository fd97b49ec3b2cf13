"""Flags in memory: release and acquire through a location (PTX ISA, "Release and Acquire
Patterns").

A store or atomic with release semantics, or a relaxed one behind a fence, leaves knowledge at its
location; a load or atomic with acquire semantics, or a relaxed one before a fence, takes it. The
emulator executes in one order, so a load reads what was stored there last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.check.vector_clock import Knowledge
from ptxemu.events import Access, AccessKind, Space

if TYPE_CHECKING:
    from ptxemu.check.actors import WarpActor

_LEVELS = {"cta": 1, "cluster": 2, "gpu": 3, "sys": 4}

FlagKey = tuple[Space, int | None, int, int, int]
"""Space, owner, address, level of the scope, and which CTA or cluster of that level."""


def _level(scope: str) -> int:
    return _LEVELS.get(scope, _LEVELS["gpu"])


def _domains(warp: WarpActor) -> tuple[int, int, int]:
    """The CTA, the cluster and the device that scopes of the three levels reach from a warp."""
    return warp.cta, warp.home, 0


def _addresses(access: Access) -> list[int]:
    if len(access.starts) == 1:
        return [int(access.starts[0])]
    found: list[int] = np.unique(access.starts).tolist()
    return found


class Flags:
    """Knowledge that was released into locations.

    A release of a scope reaches an acquire only if each is in the other's scope. It is filed under
    the scope's level and all wider domains that it is in; an acquire looks at its level and below.
    """

    def __init__(self) -> None:
        self._released: dict[FlagKey, Knowledge] = {}

    def accessed(self, warp: WarpActor, access: Access) -> None:
        """A strong access of a warp: acquire first, then release."""
        if access.kind is not AccessKind.WRITE and self._released:
            self._acquire(warp, access)
        if access.kind is not AccessKind.READ:
            self._release(warp, access)

    def fenced(self, warp: WarpActor, scope: str) -> None:
        """fence.acq_rel or fence.sc: what relaxed loads saw is acquired; relaxed stores release."""
        if warp.to_acquire is not None:
            warp.know.unite(warp.to_acquire)
            warp.to_acquire = None
            warp.unfenced_tcgen05 = True
        warp.released_by_fence = (warp.know.copy(), scope)
        warp.tick()

    def _acquire(self, warp: WarpActor, access: Access) -> None:
        level = _level(access.scope)
        domains = _domains(warp)
        acquires = access.order in ("acquire", "acq_rel", "seq_cst")
        for address in _addresses(access):
            for wide in range(1, 4):
                if wide > level:
                    break
                key = (access.space, access.owner, address, wide, domains[wide - 1])
                found = self._released.get(key)
                if found is None:
                    continue
                if acquires:
                    warp.know.unite(found)
                    warp.unfenced_tcgen05 = True
                elif warp.to_acquire is None:
                    warp.to_acquire = found.copy()
                else:
                    warp.to_acquire.unite(found)

    def _release(self, warp: WarpActor, access: Access) -> None:
        releases = access.order in ("release", "acq_rel", "seq_cst")
        scope = access.scope
        if releases:
            knowledge = warp.know
        elif warp.released_by_fence is not None:
            knowledge, fence_scope = warp.released_by_fence
            scope = min(scope, fence_scope, key=_level)
        else:
            return
        level = min(_level(scope), 3)
        domains = _domains(warp)
        for address in _addresses(access):
            # A wider scope serves narrower acquirers in the same domain too.
            for wide in range(1, level + 1):
                key = (access.space, access.owner, address, wide, domains[wide - 1])
                found = self._released.get(key)
                if found is None:
                    self._released[key] = knowledge.copy()
                else:
                    found.unite(knowledge)
        if releases:
            warp.tick()
