"""Names of what warps do: given by the user, or guessed from the units that they keep busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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


def guess(operations: Mapping[int, Counter[str]]) -> dict[int, str]:
    """Roles by the units that each warp (by number) gave work to: "load", "mma+store"..."""
    found: dict[int, str] = {}
    for warp, units in operations.items():
        names = dict.fromkeys(role for unit, role in _BY_UNIT if units[unit])
        if names:
            found[warp] = "+".join(names)
    return found


def parse(texts: Sequence[str]) -> dict[int, str]:
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
