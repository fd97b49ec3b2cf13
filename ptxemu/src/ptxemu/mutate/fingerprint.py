"""A short name of a kernel's code, by which results are known to be of it or of another version."""

from __future__ import annotations

import hashlib
import re

from ptxemu.syntax.ast import Function

_DIGITS = 16
_NUMBER_IN_MODULE = re.compile(r"(?<=L__BB)\d+(?=_)")
"""Number of the function, in the compiler's labels."""


def fingerprint(function: Function) -> str:
    """Hexadecimal digits that differ where instructions, guards or targets of branches do.

    Names of the kernel and of its parameters, its position in the module, comments, positions in
    the source and lines count for nothing.
    """
    labels: dict[int, list[str]] = {}
    for name, pc in function.labels.items():
        labels.setdefault(pc, []).append(name)
    own_name = re.compile(rf"\b{re.escape(function.name)}(?=\b|_param_)")
    digest = hashlib.sha256()
    for one in function.instructions:
        guard = "" if one.guard is None else f"{'!' * one.guard.negated}{one.guard.register.name}"
        line = f"{sorted(labels.get(one.pc, []))} @{guard} {one.text}\n"
        digest.update(_NUMBER_IN_MODULE.sub("", own_name.sub("", line)).encode())
    return digest.hexdigest()[:_DIGITS]
