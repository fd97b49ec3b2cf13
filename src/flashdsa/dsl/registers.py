"""Registers of a role's threads."""

from typing import Any

from cutlass import cute

from flashdsa.plan import registers_each


def take_registers(plan: Any, role: str) -> None:
    """A warpgroup: take the registers of its role, which are fewer or more than at the launch."""
    registers = plan.role(role).registers
    if registers < registers_each(plan.threads, plan.arch.registers):
        cute.arch.setmaxregister_decrease(registers)
    else:
        cute.arch.setmaxregister_increase(registers)
