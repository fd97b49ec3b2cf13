"""Distributions that an installation consists of."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def with_needs(requirements: Iterable[str]) -> set[str]:
    """Names of the required distributions and of all that they need in turn, without extras."""
    waiting, found = [*requirements], set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and name not in found:
            found.add(name)
            waiting += distribution(name).requires or []
    return found
