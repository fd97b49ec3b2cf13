"""Budgets as data: kernels allocate from them, the workbench prints them, tests check them."""

from flashdsa.plan.budgets import CtaPlan, FixedPlan, Sm90Plan, Sm100Plan, UniformPlan
from flashdsa.plan.roles import (
    Arrives,
    Barrier,
    Role,
    check_arrivals,
    check_barriers,
    check_registers,
    registers_each,
)
from flashdsa.plan.smem import BudgetError, LiveRange, SmemPlan, SmemRegion, lay_out, plan_smem
from flashdsa.plan.tmem import TmemPlan, TmemRegion, plan_tmem

__all__ = [
    "Arrives",
    "Barrier",
    "BudgetError",
    "CtaPlan",
    "FixedPlan",
    "LiveRange",
    "Role",
    "Sm90Plan",
    "Sm100Plan",
    "SmemPlan",
    "SmemRegion",
    "TmemPlan",
    "TmemRegion",
    "UniformPlan",
    "check_arrivals",
    "check_barriers",
    "check_registers",
    "lay_out",
    "plan_smem",
    "plan_tmem",
    "registers_each",
]
