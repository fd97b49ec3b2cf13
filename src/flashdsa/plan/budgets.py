"""What follows from a plan's roles, barriers and regions, for the plans of one CTA an SM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

from flashdsa.hw import MBARRIER_BYTES, SM90
from flashdsa.plan.arrivals import check_barriers
from flashdsa.plan.roles import Barrier, Role, check_registers
from flashdsa.plan.smem import SmemPlan, SmemRegion, plan_smem


class Sm90Plan(ABC):
    """Base of frozen dataclasses, which say what their kernel's CTA consists of."""

    @property
    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """The warps by what they do, in the order of their threads."""

    @property
    @abstractmethod
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in the order in which they lie in their region."""

    @property
    @abstractmethod
    def buffers(self) -> list[SmemRegion]:
        """What shared memory holds before the mbarriers, in its order."""

    def check(self, registers: int = SM90.registers) -> None:
        """Hold the choices against the architecture.

        Args:
            registers: that all threads of the CTA together may have.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        check_registers(self.roles, registers)
        check_barriers(self.barriers, self.roles)
        _ = self.smem

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return sum(role.threads for role in self.roles)

    @property
    @cache  # noqa: B019 - plans are few
    def smem(self) -> SmemPlan:
        """Shared memory, the only truth about it."""
        bytes_of_barriers = sum(barrier.stages for barrier in self.barriers) * MBARRIER_BYTES
        barriers = SmemRegion("barriers", bytes_of_barriers, MBARRIER_BYTES, "mbarriers")
        return plan_smem([*self.buffers, barriers], SM90.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.smem.total
