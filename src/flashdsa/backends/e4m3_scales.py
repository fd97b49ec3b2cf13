"""The fp32 scale of a vector that is rounded to e4m3, in torch and on any device."""

from __future__ import annotations

from torch import Tensor

from flashdsa.problem import E4M3_MAX, MIN_AMAX


def scale_of(x: Tensor) -> Tensor:
    """``max(amax, 1e-4) / 448`` over the last dimension of fp32 `x`, which the result lacks.

    Divided as IEEE 754 says: torch on a GPU multiplies by the reciprocal of a divisor that is a
    number or lies on the CPU, and the last bit differs.
    """
    largest = x.abs().amax(-1).clamp_min(MIN_AMAX)
    return largest / largest.new_full((), E4M3_MAX)
