"""Budgets that follow from a plan's roles, barriers and regions, for plans of one CTA an SM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flashdsa.hw import MBARRIER_BYTES, SM90, SM100, ArchSpec
from flashdsa.plan.roles import Barrier, Role, check_barriers, check_registers
from flashdsa.plan.smem import SmemPlan, SmemRegion, plan_smem
from flashdsa.plan.tmem import TmemPlan, TmemRegion, plan_tmem


class CtaPlan(ABC):
    """Base of frozen dataclasses, which describe their kernel's CTA.

    Attributes:
        arch: whose budgets it has.
    """

    arch: ClassVar[ArchSpec]

    def __post_init__(self) -> None:
        """Raises BudgetError, which names the region or role that does not fit."""
        self.check()

    @property
    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """The roles, in thread order."""

    @property
    @abstractmethod
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order."""

    @property
    @abstractmethod
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""

    @property
    def behind_barriers(self) -> list[SmemRegion]:
        return []

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)

    def check(self, registers: int | None = None) -> None:
        """Check the choices against the architecture.

        Args:
            registers: that all threads of the CTA together may have; None: all.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        check_registers(self.roles, self.arch.registers if registers is None else registers)
        check_barriers(self.barriers, self.roles)
        _ = self.smem

    @property
    def threads(self) -> int:
        return sum(role.threads for role in self.roles)

    @cached_property
    def smem(self) -> SmemPlan:
        bytes_of_barriers = sum(barrier.stages for barrier in self.barriers) * MBARRIER_BYTES
        barriers = SmemRegion("barriers", bytes_of_barriers, MBARRIER_BYTES, "mbarriers")
        regions = [*self.buffers, barriers, *self.behind_barriers]
        return plan_smem(regions, self.arch.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.smem.total


class UniformPlan:
    """Base of frozen dataclasses that describe kernels whose warps all do the same.

    Attributes:
        arch: whose budgets it has.
    """

    arch: ClassVar[ArchSpec] = SM90
    roles: ClassVar[tuple[Role, ...]] = ()
    barriers: ClassVar[tuple[Barrier, ...]] = ()

    @property
    def regions(self) -> list[SmemRegion]:
        """Shared memory regions, in order."""
        return []

    @cached_property
    def smem(self) -> SmemPlan:
        return plan_smem(self.regions, self.arch.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.smem.total


@dataclass(frozen=True)
class FixedPlan(UniformPlan):
    """The plan of a kernel that has nothing to choose."""

    name: str
    smem_bytes: int = 0


class Sm90Plan(CtaPlan):
    """Plan of a Hopper kernel."""

    arch = SM90


class Sm100Plan(CtaPlan):
    """Plan of a Blackwell kernel, which has tensor memory."""

    arch = SM100

    @property
    @abstractmethod
    def columns(self) -> list[TmemRegion]:
        """Tensor memory regions."""

    @property
    def behind_barriers(self) -> list[SmemRegion]:
        """The region that holds the address of the tensor memory allocation."""
        return [SmemRegion("tmem_start", 4, 4, "address of the TMEM allocation")]

    @cached_property
    def tmem(self) -> TmemPlan:
        return plan_tmem(self.columns, self.arch.tmem_columns)

    def check(self, registers: int | None = None) -> None:
        """Hold the choices against the architecture, as for any CTA, and against tensor memory.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        super().check(registers)
        _ = self.tmem
