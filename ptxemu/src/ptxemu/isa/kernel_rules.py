"""Rules that ptxas applies to a module or a kernel as a whole, beyond single instructions."""

from __future__ import annotations

from collections.abc import Container

from ptxemu.syntax.ast import Address, Function, Instruction, Module, Symbol

_SAME_GROUP = 'PTX ISA, "tcgen05.mma": all tcgen05 instructions of a kernel have one .cta_group'
_WS_GROUP = 'PTX ISA, "tcgen05.mma", "Matrix Shape": .ws is invalid with .cta_group::2'
_TARGETS = {"tcgen05": ("sm_100", "sm_103"), "wgmma": ("sm_90",)}
_FEWER_TARGETS = {
    "kind::i8": ("sm_100a",),
    **dict.fromkeys(
        ("shift", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X"), ("sm_100a", "sm_103a")
    ),
}
"""Modifiers of tcgen05 that not every target with it has, as ptxas 13 says."""

_NEWEST_MAJOR = 9
_SINCE = {
    "sm_90": (7, 8), "sm_90a": (8, 0), "sm_100": (8, 6), "sm_100a": (8, 6),
    **dict.fromkeys(("sm_100f", "sm_103", "sm_103a", "sm_103f"), (8, 8)),
}  # fmt: skip
"""First versions with a target (PTX ISA, "Release Notes")."""


def check_module(module: Module) -> list[str]:
    """Return what ptxas refuses in a module's directives, in words."""
    version = "{}.{}".format(*module.version)
    found = []
    if not 1 <= module.version[0] <= _NEWEST_MAJOR:
        found.append(f".version {version}: no such version is known, {_NEWEST_MAJOR}.x is newest")
    since = _SINCE.get(module.target, (0, 0))
    if module.version < since:
        found.append(f".target {module.target} needs .version {since[0]}.{since[1]}, not {version}")
    if module.address_size != 64:
        found.append(f".address_size {module.address_size}: {module.target} has 64-bit addresses")
    return found


def undefined(module: Module, function: Function, placed: Container[str]) -> list[str]:
    """Return which extern variables a kernel uses that neither the module nor `placed` defines."""
    missing = {
        variable.name
        for variable in module.variables
        if variable.is_extern and variable.space != "shared" and variable.name not in placed
    }
    if not missing:
        return []
    used: dict[str, Instruction] = {}
    for instruction in function.instructions:
        for operand in instruction.operands:
            base = operand.base if isinstance(operand, Address) else operand
            if isinstance(base, Symbol) and base.name in missing:
                used.setdefault(base.name, instruction)
    return [f"{one.span}: {name} is .extern, and defined nowhere" for name, one in used.items()]


def check_kernel(function: Function, target: str | None = None) -> list[str]:
    """Return what ptxas refuses in a kernel, in words with the PTX lines; empty if all is legal.

    Args:
        target: the module's `.target`, to check that it has the tensor cores that are used.
    """
    found: list[str] = []
    groups: dict[str, Instruction] = {}
    wrong_targets: dict[str, Instruction] = {}
    for instruction in function.instructions:
        family = instruction.modifiers[0]
        if family not in _TARGETS:
            continue
        if target is not None and not _has(target, family):
            wrong_targets.setdefault(family, instruction)
        for modifier in instruction.modifiers:
            if modifier.startswith("cta_group::"):
                groups.setdefault(modifier, instruction)
            having = _FEWER_TARGETS.get(modifier)
            if target is not None and having is not None and target not in having:
                needed = " or ".join(having)
                found.append(
                    f"{instruction.span}: .{modifier} needs {needed}; the target is {target}"
                )
        if "ws" in instruction.modifiers and "cta_group::2" in instruction.modifiers:
            found.append(f"{instruction.span}: {instruction.opcode} ({_WS_GROUP})")
    if len(groups) > 1:
        places = " and ".join(f".{group} at {first.span}" for group, first in groups.items())
        found.append(f"{places} ({_SAME_GROUP})")
    for family, first in wrong_targets.items():
        needed = " or ".join(f"{name}a" for name in _TARGETS[family])
        found.append(f"{first.span}: {first.opcode} needs {needed}; the target is {target}")
    return found


def _has(target: str, family: str) -> bool:
    return any(target in (f"{name}a", f"{name}f") for name in _TARGETS[family])
