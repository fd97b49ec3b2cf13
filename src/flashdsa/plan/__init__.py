"""Budgets as data: what kernels allocate from, what `flashdsa plan` prints, what tests check."""

from flashdsa.plan.roles import Arrives, Barrier, Role, check_registers, registers_each
from flashdsa.plan.smem import BudgetError, SmemPlan, SmemRegion, plan_smem
from flashdsa.plan.tmem import TmemPlan, TmemRegion, plan_tmem

__all__ = [
    "Arrives",
    "Barrier",
    "BudgetError",
    "Role",
    "SmemPlan",
    "SmemRegion",
    "TmemPlan",
    "TmemRegion",
    "check_registers",
    "plan_smem",
    "plan_tmem",
    "registers_each",
]
