"""How the sum of a matrix product can be taken: orders of addition and the tensor core's own rule.

`tensor_core_step` is the rule that an H200's wgmma follows. It was found by fitting ptxemu's
recordings (ptxemu/tests/silicon): with it all 8,704 sums of the 17 random programs with fp32
results come out bit for bit, and all 834 finite ones of five programs with any bits as operands.
For Blackwell's tcgen05.mma no measurement exists here; ptxemu's rule (`nearest`) is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
_ZERO_EXPONENT = -10_000
_LOWEST_EXPONENT = -1_000


@dataclass(frozen=True)
class TensorCore:
    """Hopper's tensor core for one type of operands.

    Attributes:
        step: elements of K of one instruction.
        fraction_bits: kept of every term below the largest exponent, the rest is cut off.
        result_bits: of the sum's mantissa behind its first bit, the rest is cut off.
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
    """floor(log2 |x|), very low for 0."""
    exponents = np.frexp(values)[1].astype(np.int64) - 1
    exponents[values == 0] = _ZERO_EXPONENT
    return exponents


def _cut(values: Matrix, bits: int) -> Matrix:
    """Towards zero, to `bits` of the mantissa behind the first one."""
    mantissa, exponents = np.frexp(values)
    kept: Matrix = np.ldexp(np.trunc(np.ldexp(mantissa, bits + 1)), exponents - bits - 1)
    return kept


def tensor_core_step(core: TensorCore, before: Matrix, a: Matrix, b: Matrix) -> Matrix:
    """D (m, n) after one wgmma with A (m, k) and B (n, k).

    Products and D are aligned to the largest exponent among them (of a product: the sum of its
    operands' exponents), cut off below `fraction_bits`, added exactly, and cut to the result.
    """
    terms = a[:, None, :] * b[None]
    exponents = _exponents(a)[:, None, :] + _exponents(b)[None]
    largest = np.maximum(exponents.max(axis=2), _exponents(before))
    unit = np.ldexp(1.0, np.maximum(largest - core.fraction_bits, _LOWEST_EXPONENT))
    total = (np.trunc(terms / unit[..., None]).sum(axis=2) + np.trunc(before / unit)) * unit
    return _cut(total, core.result_bits)


def tensor_core(core: TensorCore, a: Matrix, b: Matrix) -> Matrix:
    """The whole product as a chain of instructions along K."""
    total = np.zeros((len(a), len(b)))
    for first in range(0, a.shape[1], core.step):
        part = np.s_[:, first : first + core.step]
        total = tensor_core_step(core, total, a[part], b[part])
    return total


def nearest(step: int, a: Matrix, b: Matrix) -> Matrix:
    """Exact inside an instruction, one rounding to nearest fp32 behind it: ptxemu's rule."""
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for first in range(0, a.shape[1], step):
        part = np.s_[:, first : first + step]
        total = (total + a[part] @ b[part].T).astype(np.float32)
    return total.astype(np.float64)


def sequential(a: Matrix, b: Matrix) -> Matrix:
    """One fp32 accumulator, element by element, by fused multiply-add."""
    return nearest(1, a, b)


def pairwise(a: Matrix, b: Matrix) -> Matrix:
    """Products rounded to fp32, added as a binary tree in fp32."""
    terms = (a.T[:, :, None] * b.T[:, None, :]).astype(np.float32)
    while len(terms) > 1:
        half = len(terms) // 2
        added = terms[0 : 2 * half : 2] + terms[1 : 2 * half : 2]
        terms = added if len(terms) % 2 == 0 else np.concatenate([added, terms[-1:]])
    total: Matrix = terms[0].astype(np.float64)
    return total


def chunked(core: TensorCore, chunk: int, a: Matrix, b: Matrix) -> Matrix:
    """Chunks of K in the tensor core, their results added one by one in fp32, to nearest."""
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for first in range(0, a.shape[1], chunk):
        part = np.s_[:, first : first + chunk]
        total = total + tensor_core(core, a[part], b[part]).astype(np.float32)
    return total.astype(np.float64)


Order = Callable[[Matrix, Matrix], Matrix]
PROMOTED_EVERY = 128
"""Elements of K between additions to fp32 registers, as in DeepSeek's fp8 products."""
SPLITS = 8


def orders(dtype: str, k: int) -> dict[str, Order]:
    """Ways to add up a product of operands of `dtype`, by name."""
    core = HOPPER[dtype]
    return {
        "pairwise fp32": pairwise,
        "sequential fp32": sequential,
        f"per MMA, to nearest (K={core.step})": lambda a, b: nearest(core.step, a, b),
        "wgmma on H200": lambda a, b: tensor_core(core, a, b),
        f"wgmma, {SPLITS} chunks of K": lambda a, b: chunked(
            core, max(core.step, k // SPLITS), a, b
        ),
        f"wgmma, fp32 every {PROMOTED_EVERY}": lambda a, b: chunked(core, PROMOTED_EVERY, a, b),
    }
