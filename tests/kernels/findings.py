"""What ptxemu finds in kernels, but for what they mean."""

from __future__ import annotations

from ptxemu.check import Finding

ORDER_OF_SUMS = "unordered-float-additions"
"""Of kernels that add to dKV or dK as they come."""
RISING_BOUND = ("stale-read", "gmem.py")
"""Code and file: CTAs that share a row read a bound that only rises, which may be old."""


def unexpected(findings: list[Finding], *, in_order: bool = False) -> list[str]:
    """The findings' texts; without those of the order of additions, unless it is to be fixed."""
    return [str(one) for one in findings if in_order or one.code != ORDER_OF_SUMS]
