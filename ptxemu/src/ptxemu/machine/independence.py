"""Instructions that concern other warps or clusters, read from the kernel's text."""

from __future__ import annotations

from ptxemu.syntax.ast import Function, Instruction, SpecialRegister, Symbol

_ATOMIC = ("atom", "red", "multimem")
_ORDERED = ("volatile", "relaxed", "acquire", "release", "mmio", "cv", "cg")
"""Modifiers of a load or store by which a kernel may wait for another cluster."""
_NEAR = ("shared", "shared::cta", "shared::cluster")
_NEAR_SCOPES = ("cta", "cluster")
_OWN = ("shfl", "vote", "match", "redux", "ldmatrix", "stmatrix", "movmatrix", "mma")
_GRID = ("clusterlaunchcontrol",)
_HARMLESS_CALLS = ("__assertfail",)
_WORKSPACE = "%envreg"
"""Special registers that lead to the barrier of cooperative groups' grids."""


def tie_between_clusters(function: Function) -> Instruction | None:
    """The first instruction by which clusters may wait for, add to or follow one another.

    None: without a race, each cluster computes the same wherever and whenever the others run.
    """
    return next((i for i in function.instructions if _is_tie(i)), None)


def concerns_nobody_else(instruction: Instruction) -> bool:
    """Whether it is the warp's own business: no other one waits for what it does by itself."""
    name, *modifiers = instruction.modifiers
    if name == "wgmma":
        return modifiers[0] != "wait_group"
    if name == "cp":
        return modifiers[:2] in (["async", "ca"], ["async", "cg"], ["async", "commit_group"])
    return name in _OWN


def _is_tie(instruction: Instruction) -> bool:
    name, *modifiers = instruction.modifiers
    if any(_is_workspace(operand) for operand in instruction.operands):
        return True
    if name in _GRID:
        return True
    if name == "call":
        target = instruction.operands[1]
        return not (isinstance(target, Symbol) and target.name in _HARMLESS_CALLS)
    if name == "cp":
        return "reduce" in modifiers and "global" in modifiers
    is_near = any(m in _NEAR for m in modifiers) or any(m in _NEAR_SCOPES for m in modifiers)
    if name in _ATOMIC:
        return not is_near
    return name in ("ld", "st") and not is_near and any(m in _ORDERED for m in modifiers)


def _is_workspace(operand: object) -> bool:
    return isinstance(operand, SpecialRegister) and operand.name.startswith(_WORKSPACE)
