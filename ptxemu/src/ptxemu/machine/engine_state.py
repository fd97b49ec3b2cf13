"""Typed keys for the state that an engine keeps in one CTA or in one warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Owner(Protocol):
    """A CTA or a warp."""

    engines: dict[Any, Any]
    """The engines' state by EngineState."""


OwnerT = TypeVar("OwnerT", bound=Owner)


class EngineState(Generic[OwnerT, T]):
    """One engine's state of every owner: called with an owner, it gives that one's state.

    `_mbarriers = EngineState(Mbarriers)` makes a CTA's `Mbarriers(cta)` the first time it is asked
    for; no owner knows which engines there are.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[OwnerT], T]) -> None:
        self._make = make

    def __call__(self, owner: OwnerT) -> T:
        """The owner's state."""
        found: T | None = owner.engines.get(self)
        if found is None:
            found = owner.engines[self] = self._make(owner)
        return found

    def peek(self, owner: OwnerT) -> T | None:
        """The owner's state, if anything has asked for it yet."""
        found: T | None = owner.engines.get(self)
        return found
