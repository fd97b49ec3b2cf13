"""Why kernels were chosen, as data: what the functions that choose tell a runner that asks."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple


class Estimate(NamedTuple):
    """One candidate as a choice counts it; the least `counted` is taken, the first of equals.

    Attributes:
        counted: us as the choice compares them; 0: a rule takes it; infinite: not considered.
        reason: one clause that says why, for people.
        us: predicted time; None where nothing predicts it.
    """

    counted: float
    reason: str
    us: float | None = None


class Candidate(NamedTuple):
    """One line of a choice.

    Attributes:
        kernels: names of the launches, or what is launched. kind: of the kernels, for people.
        reason, us: as of `Estimate`. taken: whether the call runs it.
    """

    kernels: str
    kind: str
    reason: str
    us: float | None = None
    taken: bool = True


class Choice(NamedTuple):
    """A table of candidates.

    Attributes:
        title: what the lines are: alternatives, or parts of a call.
        candidates: the taken one first, or the parts in their order.
    """

    title: str
    candidates: tuple[Candidate, ...]


Explain = Callable[[], Choice]
"""Function that says why; called only if somebody asks."""


def finite(us: float) -> float | None:
    """A predicted time, or None of one that is infinite."""
    return us if isfinite(us) else None
