"""Offsets of packed sequences, as attention's and the indexer's callers have them."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.problem import INT32_MAX


def require_offsets(name: str, offsets: Tensor) -> int:
    """The last of `offsets`, which begin at 0, do not decrease and fit int32."""
    values = offsets.tolist()
    if values[0] != 0:
        raise ArgumentValueError(
            f"{name}: expected offsets that begin at 0; got {name}[0] = {values[0]}"
        )
    for sequence, (before, value) in enumerate(pairwise(values), 1):
        if value < before:
            raise ArgumentValueError(
                f"{name}: expected offsets that do not decrease; "
                f"got {name}[{sequence}] = {value} after {before}"
            )
        if value > INT32_MAX:
            raise ArgumentValueError(
                f"{name}: expected at most {INT32_MAX} (int32 rows); "
                f"got {name}[{sequence}] = {value}"
            )
    last: int = values[-1]
    return last
