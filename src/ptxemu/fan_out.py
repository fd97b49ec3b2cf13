"""Several observers in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from ptxemu.events import Access, Agent, Fence, Observer

if TYPE_CHECKING:
    from ptxemu.syntax.ast import Instruction


class FanOut(Observer):
    """Tells every event to each observer, in the order in which they were given."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def cta_started(self, cta: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.cta_started(cta)

    def cta_exited(self, cta: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.cta_exited(cta)

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.instruction_executed(agent, instruction, lanes)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.block_executed(agent, first_pc, count, lanes)

    def accessed(self, access: Access) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.accessed(access)

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.released(agent, token, scope)

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.acquired(agent, token, scope)

    def fenced(self, agent: Agent, fence: Fence, instruction: Instruction) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.fenced(agent, fence, instruction)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.async_issued(operation, issuer)

    def async_completed(self, operation: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.async_completed(operation)

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.async_joined(agent, operation, reads_only)

    def async_result_touched(self, agent: Agent, operation: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.async_result_touched(agent, operation)

    def async_result_used(self, agent: Agent, operation: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.async_result_used(agent, operation)

    def blocked(self, agent: Agent, instruction: Instruction, reason: Callable[[], str]) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.blocked(agent, instruction, reason)

    def unblocked(self, agent: Agent, instruction: Instruction) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.unblocked(agent, instruction)

    def complained(
        self,
        level: str,
        code: str,
        message: str,
        agent: Agent | None,
        instruction: Instruction | None,
    ) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.complained(level, code, message, agent, instruction)
