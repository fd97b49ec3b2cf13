"""Errors of bf16, fp16 and e4m3 products against float64, by order of addition.

`tensor_core_step` is the rule that an H200's wgmma follows. It was found by fitting ptxemu's
recordings (ptxemu/tests/silicon): with it all 8,704 sums of the 17 random programs with fp32
results come out bit for bit, and all 834 finite ones of five programs with any bits as operands.
For Blackwell's tcgen05.mma no measurement exists here; ptxemu's rule (`nearest`) is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Order = Callable[[Matrix, Matrix], Matrix]
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = 32
"""M and N of the products."""
PROMOTED_EVERY = 128
"""Elements of K between additions to fp32 registers, as in DeepSeek's fp8 products."""
SPLITS = 8
_ZERO_EXPONENT = -10_000
_LOWEST_EXPONENT = -1_000


@dataclass(frozen=True)
class TensorCore:
    """Hopper's tensor core for one type of operands.

    Attributes:
        step: elements of K of one instruction.
        fraction_bits: kept of every term below the largest exponent, the rest is cut off.
        result_bits: of the sum's mantissa after its first bit, the rest is cut off.
    """

    step: int
    fraction_bits: int
    result_bits: int


HOPPER = {
    "bf16": TensorCore(16, 25, 23),
    "fp16": TensorCore(16, 25, 23),
    "e4m3": TensorCore(32, 13, 13),
}
"""16-bit operands keep 25 bits, those of 8 bits 13, in the sum as in the result."""


def _exponents(values: Matrix) -> NDArray[np.int64]:
    """Take floor(log2 |x|), very low for 0."""
    exponents = np.frexp(values)[1].astype(np.int64) - 1
    exponents[values == 0] = _ZERO_EXPONENT
    return exponents


def _cut(values: Matrix, bits: int) -> Matrix:
    """Cut towards zero, to `bits` of the mantissa after the first one."""
    mantissa, exponents = np.frexp(values)
    kept: Matrix = np.ldexp(np.trunc(np.ldexp(mantissa, bits + 1)), exponents - bits - 1)
    return kept


def tensor_core_step(core: TensorCore, before: Matrix, a: Matrix, b: Matrix) -> Matrix:
    """Compute D (m, n) after one wgmma with A (m, k) and B (n, k).

    Products and D are aligned to the largest exponent among them (of a product: the sum of its
    operands' exponents), cut off below `fraction_bits`, added exactly, and cut to the result.
    """
    terms = a[:, None, :] * b[None]
    exponents = _exponents(a)[:, None, :] + _exponents(b)[None]
    largest = np.maximum(exponents.max(axis=2), _exponents(before))
    unit = np.ldexp(1.0, np.maximum(largest - core.fraction_bits, _LOWEST_EXPONENT))
    total = (np.trunc(terms / unit[..., None]).sum(axis=2) + np.trunc(before / unit)) * unit
    return _cut(total, core.result_bits)


def _parts(step: int, a: Matrix, b: Matrix) -> list[tuple[Matrix, Matrix]]:
    return [(a[:, k : k + step], b[:, k : k + step]) for k in range(0, a.shape[1], step)]


def tensor_core(core: TensorCore, a: Matrix, b: Matrix) -> Matrix:
    """Compute the whole product as a chain of instructions along K."""
    total = np.zeros((len(a), len(b)))
    for left, right in _parts(core.step, a, b):
        total = tensor_core_step(core, total, left, right)
    return total


def nearest(step: int, a: Matrix, b: Matrix) -> Matrix:
    """Add exactly inside an instruction, round to nearest fp32 after it: ptxemu's rule.

    A step of 1 is one fp32 accumulator, element by element, by fused multiply-add.
    """
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for left, right in _parts(step, a, b):
        total = (total + left @ right.T).astype(np.float32)
    return total.astype(np.float64)


def pairwise(a: Matrix, b: Matrix) -> Matrix:
    """Round products to fp32 and add them as a binary tree in fp32."""
    terms = (a.T[:, :, None] * b.T[:, None, :]).astype(np.float32)
    while len(terms) > 1:
        half = len(terms) // 2
        added = terms[0 : 2 * half : 2] + terms[1 : 2 * half : 2]
        terms = added if len(terms) % 2 == 0 else np.concatenate([added, terms[-1:]])
    total: Matrix = terms[0].astype(np.float64)
    return total


def chunked(core: TensorCore, chunk: int, a: Matrix, b: Matrix) -> Matrix:
    """Add chunks of K in the tensor core, and their results one by one in fp32, to nearest."""
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for left, right in _parts(chunk, a, b):
        total = total + tensor_core(core, left, right).astype(np.float32)
    return total.astype(np.float64)


def orders(dtype: str, k: int) -> dict[str, Order]:
    """List the ways to add up a product of operands of `dtype`, by name."""
    core = HOPPER[dtype]
    chunk = max(core.step, k // SPLITS)
    return {
        "pairwise fp32": pairwise,
        "sequential fp32": lambda a, b: nearest(1, a, b),
        f"per MMA, to nearest (K={core.step})": lambda a, b: nearest(core.step, a, b),
        "wgmma on H200": lambda a, b: tensor_core(core, a, b),
        f"wgmma, {SPLITS} chunks of K": lambda a, b: chunked(core, chunk, a, b),
        f"wgmma, fp32 every {PROMOTED_EVERY}": lambda a, b: chunked(core, PROMOTED_EVERY, a, b),
    }


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


def rounded(values: Matrix, dtype: str) -> Matrix:
    """Round to the nearest number of a type."""
    from ptxemu.numerics.minifloat import BF16, E4M3

    if dtype == "fp16":
        return values.astype(np.float16).astype(np.float64)
    found: Matrix = (E4M3 if dtype == "e4m3" else BF16).quantise(values, "rn")
    return found


def measure(
    dtypes: Sequence[str] = tuple(HOPPER), lengths: Sequence[int] = LENGTHS, *, seed: int = 0
) -> tuple[PrecisionRow, ...]:
    """Measure products of standard normal numbers, (32, K) by (K, 32), for every dtype and K."""
    rows = []
    for dtype in dtypes:
        for k in lengths:
            generator = np.random.default_rng((seed, k))
            a, b = (generator.standard_normal((ROWS, k)) for _ in range(2))
            x, y = rounded(a, dtype), rounded(b, dtype)
            exact = x @ y.T
            sums = {name: _relative(add(x, y), exact) for name, add in orders(dtype, k).items()}
            rows.append(PrecisionRow(dtype, k, _relative(exact, a @ b.T), sums))
    return tuple(rows)


def _relative(value: Matrix, expected: Matrix) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))
