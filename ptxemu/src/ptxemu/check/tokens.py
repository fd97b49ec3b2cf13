"""Tokens: what arrivals at a barrier release and waits for it acquire, one a phase or use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

from ptxemu.check.state import Actor
from ptxemu.check.vector_clock import Knowledge
from ptxemu.machine.program import Program
from ptxemu.syntax.ast import Instruction

Tokens: TypeAlias = dict[Hashable, Knowledge]
"""Knowledge left at tokens."""
KEPT_GENERATIONS = 4
"""Phases of a barrier whose knowledge is kept; nobody can wait for older ones."""


def is_mbarrier_token(token: Hashable) -> bool:
    """Whether a token is of a phase of an mbarrier."""
    return isinstance(token, tuple) and token[0] == "mbarrier"


class Neighbours:
    """Knowledge that arrivals from the mbarrier's own CTA released, where others arrive too.

    A wait whose scope is written as .cta acquires no more than that. A scope that is not written,
    .cta by default, is taken for one that reaches whoever arrives, as CUTLASS has it.
    """

    def __init__(self) -> None:
        self._near: Tokens | None = None

    def started(self, program: Any) -> None:
        """The kernel's program is known: has it a wait of .cta scope?"""
        if isinstance(program, Program) and any(map(_is_narrow, program.function.instructions)):
            self._near = {}

    def arrived(self, actor: Actor, token: Hashable, held: Knowledge) -> None:
        """An agent arrives; `held`: what all arrivals released before."""
        if self._near is None:
            return
        assert isinstance(token, tuple)
        *family, phase = token
        is_remote = actor.is_warp and actor.cta != token[1]
        near = self._near.get(token)
        if near is None:
            before = self._near.get((*family, phase - 1))
            if before is None and not is_remote:
                return
            self._near.pop((*family, phase - KEPT_GENERATIONS), None)
            near = self._near[token] = (held if before is None else before).copy()
        if not is_remote:
            near.unite(actor.know)
        if not actor.is_warp:
            near.parts[actor.home].done |= 1 << actor.slot

    def known(self, token: Hashable) -> Knowledge | None:
        """All that a wait of .cta scope acquires; None if that is what any other does."""
        return None if self._near is None else self._near.get(token)


def _is_narrow(instruction: Instruction) -> bool:
    names = instruction.modifiers
    is_wait = names[0] == "mbarrier" and names[1] in ("test_wait", "try_wait")
    return is_wait and "cta" in names and "relaxed" not in names


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
