"""Tokens: what arrivals at a barrier release and waits for it acquire, one a phase or use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from ptxemu.check.vector_clock import Knowledge

Tokens: TypeAlias = dict[Hashable, Knowledge]
"""Knowledge left at tokens."""
KEPT_GENERATIONS = 4
"""Phases of a barrier whose knowledge is kept; nobody can wait for older ones."""


def is_mbarrier_token(token: Hashable) -> bool:
    """Whether a token is of a phase of an mbarrier."""
    return isinstance(token, tuple) and token[0] == "mbarrier"


def new_token(tokens: Tokens, token: Hashable) -> Knowledge:
    """A token with what it starts with; forgets the use of the same barrier long before this one.

    Arrivals at an mbarrier are read-modify-writes of one object, so that whoever sees a phase
    complete also knows what was released in the phases before.
    """
    before = None
    if isinstance(token, tuple) and isinstance(token[-1], int):
        *family, use = token
        tokens.pop((*family, use - KEPT_GENERATIONS), None)
        before = tokens.get((*family, use - 1)) if token[0] == "mbarrier" else None
    held = tokens[token] = Knowledge() if before is None else before.copy()
    return held
