"""Features that a kernel's test asks for all at once, and findings that mean something there."""

from __future__ import annotations

from typing import Any, Final

from ptxemu.check import Finding

ORDER_OF_SUMS = "unordered-float-additions"
"""Of kernels that add to dKV or dK as they come."""
RISING_BOUND = ("stale-read", "gmem.py")
"""Code and file: CTAs that share a row read a bound that only rises, which may be old."""


def unexpected(findings: list[Finding], *, in_order: bool = False) -> list[str]:
    """The findings' texts; without those of the order of additions, unless it is to be fixed."""
    return [str(one) for one in findings if in_order or one.code != ORDER_OF_SUMS]


EVERY_FEATURE: Final[dict[str, Any]] = {
    "duplicates": True,
    "invalid": True,
    "empty_rows": True,
    "topk_length": True,
    "poison": True,
    "strided": True,
    "kv_3d": True,
    "indices_3d": True,
}
"""Of a `SparseMlaCase`, but for those of one operation: sinks, largest logits."""
