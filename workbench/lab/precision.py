"""Errors of bf16, fp16 and e4m3 products against float64: of the inputs' rounding, of the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.lab.accumulation import HOPPER, Matrix, orders

DTYPES = tuple(HOPPER)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = 32
"""M and N of the products."""
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PrecisionRow:
    """One dtype and one K.

    Attributes:
        rounding: error of the operands' rounding to dtype, with an exact sum.
        sums: error of each order of addition alone, on the rounded operands.
        Errors are relative: Frobenius norm of the difference over that of the float64 product.
    """

    dtype: str
    k: int
    rounding: float
    sums: dict[str, float]

    def total(self, order: str) -> float:
        """Both, which are independent of each other."""
        return float(np.hypot(self.rounding, self.sums[order]))


def rounded(values: Matrix, dtype: str) -> Matrix:
    """To the nearest number of a type."""
    from ptxemu.numerics.minifloat import BF16, E4M3

    if dtype == "fp16":
        return values.astype(np.float16).astype(np.float64)
    found: Matrix = (E4M3 if dtype == "e4m3" else BF16).quantise(values, "rn")
    return found


def measure(
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] = LENGTHS,
    *,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[PrecisionRow, ...]:
    """Products of standard normal numbers, (32, K) by (K, 32), for every dtype and K."""
    rows: list[PrecisionRow] = []
    total = len(dtypes) * len(lengths)
    for dtype in dtypes:
        for k in lengths:
            on_progress(len(rows), total, f"{dtype}, K = {k}")
            rows.append(_measure_one(dtype, k, seed))
    on_progress(total, total, "")
    return tuple(rows)


def _measure_one(dtype: str, k: int, seed: int) -> PrecisionRow:
    generator = np.random.default_rng((seed, k))
    a, b = (generator.standard_normal((ROWS, k)) for _ in range(2))
    x, y = rounded(a, dtype), rounded(b, dtype)
    exact = x @ y.T
    sums = {name: _relative(order(x, y), exact) for name, order in orders(dtype, k).items()}
    return PrecisionRow(dtype, k, _relative(exact, a @ b.T), sums)


def _relative(value: Matrix, expected: Matrix) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))
