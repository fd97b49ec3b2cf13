"""Kinds of work that instructions do, units of asynchronous operations, names of what warps do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ptxemu.syntax.ast import Instruction

CLASSES = (
    *("integer", "float", "convert", "compare", "move", "warp", "memory", "copy", "tmem", "tensor"),
    *("sync", "control"),
)
"""control: branches, calls, exits, and instructions whose guard held in no lane."""

_FLOAT_TYPES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64", "tf32")
_BY_NAME = {
    **dict.fromkeys(("cvt", "cvta"), "convert"),
    **dict.fromkeys(("setp", "set", "testp"), "compare"),
    **dict.fromkeys(("mov", "selp", "prmt", "slct", "mapa", "getctarank"), "move"),
    **dict.fromkeys(("shfl", "vote", "match", "redux", "elect", "activemask"), "warp"),
    **dict.fromkeys(
        ("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "movmatrix", "prefetch"),
        "memory",
    ),
    **dict.fromkeys(
        ("prefetchu", "applypriority", "discard", "createpolicy", "isspacep"), "memory"
    ),
    **dict.fromkeys(("cp", "multimem", "tensormap"), "copy"),
    **dict.fromkeys(("mma", "wmma", "wgmma"), "tensor"),
    **dict.fromkeys(("bar", "barrier", "mbarrier", "fence", "membar"), "sync"),
    **dict.fromkeys(("griddepcontrol", "setmaxnreg", "nanosleep", "clusterlaunchcontrol"), "sync"),
    **dict.fromkeys(("bra", "brx", "call", "ret", "exit", "trap", "brkpt", "pmevent"), "control"),
}
_SYNC_OF_CP = ("commit_group", "wait_group", "wait_all", "mbarrier")
_TCGEN05 = {"mma": "tensor", "ld": "tmem", "st": "tmem", "cp": "copy", "shift": "tmem"}
_SPACES = ("global", "shared", "shared::cta", "shared::cluster")


def class_of(instruction: Instruction) -> str:
    """The one of CLASSES that an instruction belongs to."""
    name, *modifiers = instruction.modifiers
    if name == "tcgen05":
        return _TCGEN05.get(modifiers[0], "sync")
    if name == "wgmma":
        return "tensor" if modifiers[0] == "mma_async" else "sync"
    if name == "cp" and any(m in _SYNC_OF_CP for m in modifiers):
        return "sync"
    if name == "st" and "async" in modifiers:
        return "copy"
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    return "float" if modifiers and modifiers[-1] in _FLOAT_TYPES else "integer"


def unit_of(operation: Any) -> str:
    """The engine that does an asynchronous operation: "TMA load", "tensor core"..."""
    modifiers = operation.instruction.modifiers
    name = modifiers[0]
    if name in ("wgmma", "tcgen05"):
        named = {"ld": "TMEM load", "st": "TMEM store", "commit": "tcgen05.commit"}
        named |= {"cp": "TMEM copy", "shift": "TMEM shift"}
        return named.get(modifiers[1], "tensor core")
    if name == "cp" and "bulk" in modifiers:
        return _bulk_unit(modifiers)
    if name == "cp":
        return "cp.async"
    if name in ("st", "red"):
        return "remote store"
    return str(operation.kind)


def _bulk_unit(modifiers: tuple[str, ...]) -> str:
    engine = "TMA" if "tensor" in modifiers else "bulk"
    if "prefetch" in modifiers:
        return f"{engine} prefetch"
    if "reduce" in modifiers:
        return f"{engine} reduce"
    spaces = [m for m in modifiers if m in _SPACES]
    if len(spaces) == 2 and spaces[0] != "global" and spaces[1] != "global":
        return "DSMEM copy"
    return f"{engine} {'store' if spaces[0] == 'global' else 'load'}"


def is_store_unit(unit: str) -> bool:
    """Whether a unit's copies go from shared to global memory."""
    return unit.endswith((" store", " reduce")) and unit.startswith(("TMA", "bulk"))


# Names of what warps do: given by the user, or guessed from the units that they keep busy.

Roles = Mapping[int, str]
"""Warp number in the CTA to the name of its role."""

_BY_UNIT = (
    ("tensor core", "mma"),
    ("TMA load", "load"),
    ("bulk load", "load"),
    ("cp.async", "load"),
    ("TMA reduce", "store"),
    ("TMA store", "store"),
    ("bulk reduce", "store"),
    ("bulk store", "store"),
    ("TMEM load", "tmem"),
    ("TMEM store", "tmem"),
)


def role_of(roles: Roles, warp_index: int) -> str:
    """The name that a warp is counted and shown under."""
    return roles.get(warp_index, f"warp {warp_index}")


def guessed_roles(operations: Mapping[int, Counter[str]]) -> dict[int, str]:
    """Roles by the units that each warp (by number) gave work to: "load", "mma+store"..."""
    found: dict[int, str] = {}
    for warp, units in operations.items():
        names = dict.fromkeys(role for unit, role in _BY_UNIT if units[unit])
        if names:
            found[warp] = "+".join(names)
    return found


def parse_roles(texts: Sequence[str]) -> dict[int, str]:
    """Roles from "mma=12" and "softmax=0-3,8".

    Raises:
        ValueError: another form.
    """
    roles: dict[int, str] = {}
    for text in texts:
        name, _, warps = text.partition("=")
        try:
            for part in warps.split(","):
                first, dash, last = part.partition("-")
                end = int(last) if dash else int(first)
                roles.update(dict.fromkeys(range(int(first), end + 1), name))
        except ValueError:
            raise ValueError(f"role: expected name=warp or name=first-last; got {text!r}") from None
    return roles
