"""Every limit of the contract, keyed by (operation, output, dtype).

The dtype is that of the operation's main input (q, k); an output that is asked for in another
precision has its own name ("dKV:bf16").

Where the numbers come from
    bf16    one rounding of the output to 8 significand bits has a relative rms of about 0.9e-3;
            P and dS are rounded to bf16 once more before they enter a tensor core, which adds in
            quadrature.  Peers measured on an H200: FlashMLA O 1.9e-3; cuDNN Frontend dQ 2.0e-3,
            dKV 2.35e-3.  Hence 2.5e-3; and 3.5e-3 where dKV is itself rounded to bf16 at the end.
            d_sink is a sum over queries of terms of both signs: 1e-2.
    fp16    three more significand bits than bf16: an eighth of its limits, where it is the
            output that is rounded.
    fp32    2^-24 per operation, times the growth of sums of a few thousand terms: 1e-5.
    fp64    2^-53 per operation, likewise: 1e-11.
    norms   hold on standard-normal data with the default scale only: other data may cancel. An
            output that all but cancels there (dQ of queries with one key each is exactly 0) counts
            as 4e-3 of the norm of what was summed: bf16's limit is then 1e-5 of that. dQ of n like
            keys is 1 / sqrt(n) of it, so up to 60,000 keys nothing is looser for it.
    rows    on any data, `||row error|| <= 1e-2 * max(||row||, 1e-2 * ||magnitude row||,
            1e-6 * largest ||magnitude row||)`.  One lost contribution among n like ones moves a
            row by about 1/sqrt(n) of itself: 1e-2 sees one among ten thousand.  The second term is
            what cancellation allows: 1e-4 of what was summed.
    bf16 P  Kernels that hand P and dS to a tensor core in bf16 (BF16_OPERANDS) cannot keep the row
            rule where a dKV row cancels: each P and dS is off by up to 2^-8 of itself, 1.7e-3 rms,
            and of a hundred heads' terms that is more than 1e-4 of their sum.  With logits near
            +-1e4 (a column of 2.6e5 in q) these roundings alone, all else in float64, put some row
            beyond the rule for each of 20 seeds, by up to 6 times.  Such kernels may besides be off
            by 2 * 2^-8 of the root of the sum of squares of what is summed into the row: the
            roundings are independent, so this is 4.6 times their rms.  One lost contribution among
            16,000 like ones is still seen.  Where dKV is itself in bf16, 2^-8 of the row comes on
            top.
            The rms of one rounding is r = 1.66e-3: errors even over half an ulp, significands
            even in their logarithm.  dQ in bf16 is rounded once more, so of very many dS
            2.35e-3 is the most: below 2.5e-3.  Where few matter, chance takes some cases beyond
            it: 40 slots of 8 heads and 6 queries had 2.60e-3 with all else in float64.  Such
            kernels have BF16_CHANCE standard deviations of the error's square: `dq_limit`.
    bias    `|<row error, row>| <= 5e-3 ||row||^2`: of the error what makes the row longer or
            shorter, in which most of a rounding error cancels.  Rounding each of d elements to bf16
            makes 1.66e-3 sqrt(sum x^4) / sum x^2 of it on average, 1.3e-4 for 512 normal numbers;
            rounding what is summed into the row, P and dS say, no more than the largest rounding,
            2^-8 = 3.9e-3, which is reached where one term is the row.  A row that is 1 % too long
            or too short is off by 1e-2 - 3.9e-3 = 6.1e-3 at least: 5e-3 lies in the middle.
            A row that cancels, to less than 1e-2 of what was summed into it, is not judged by this.
            Terms of a dKV row that cancel are given what their roundings may do (`along_limit`).
            Logits may be off by the relative part of lse's limit, which for large ones moves P and
            hence rows: it comes on top, times the largest |lse|.
    lse     1e-4 + 4e-7 |ref|: an absolute part for the sum of fp32 exponentials, and a few fp32
            ulps (6e-8) for a logit that is itself a long dot product.
            Hopper's tensor cores (WGMMA_SUMS) cut every partial sum of a dot product off instead of
            rounding it, after each 16 columns: 2^-23 of its size each time, 36 times for 576
            columns. 1.2e-6 was seen with logits of 6,700 from any bf16 numbers.
    f16     Packed rows whose scales are no powers of two are rounded to f16 on Hopper: each value,
            and by the kernel of many queries its scale before. A large key's logit feels that, and
            a row of O where a few such keys compete: 2.4 times the row rule was seen on an H200
            with keys of size exp(N(0, 1)). The row rule, bias and lse have F16_ROUNDING of what
            these roundings can move.
    scores  c * scale * sum_h |w_h| relu(q_h . k): c is fp32 accumulation over 128 and over 64
            terms (1e-5), or the shorter accumulator of Hopper's fp8 tensor cores (3e-4).  Its error
            is a share of the products' magnitudes, scale * sum_h |w_h| sum_d |q_hd k_d|, whatever
            relu leaves of them: PRODUCT_TOLERANCE of that comes besides on standard-normal data,
            and PRODUCT_TOLERANCE_ANY_DATA is the only bound that holds on any data.
"""

import math
from dataclasses import dataclass

import torch

ROW_TOLERANCE = 1e-2
ROW_CANCELLATION = 1e-2
"""Share of the magnitude row that counts as the row's own size."""
NORM_CANCELLATION = 4e-3
"""Share of the magnitude's norm that counts as an output's norm at least."""
ROW_FLOOR = 1e-6
"""Share of the largest magnitude row that counts as any row's size."""
BIAS_TOLERANCE = 5e-3
"""Share by which a row may be too long or too short: see `row_bias`."""
CHAIN_TOLERANCE = 3e-2
"""`||gradient - ref|| / ||ref||` of bf16 inputs where ref begins with the unrounded O: see
`judge_sparse_mla.judge_chain`. Seen: 1.7e-3 with logits of standard deviation 1, and 5e-3 to 1.3e-2
with logits 10 to 100 times as large."""
BF16_OPERANDS = ("sm100", "emulate-sm100", "sm90", "emulate-sm90", "triton", "emulate-triton")
"""Backends whose backward hands P and dS to the tensor cores in bf16."""
BF16_ROUNDING = 2 * 2.0**-8
"""Share of a dKV row's spread (`reference.MlaBackward`) that they may be off by."""
BF16_HALF_ULP = 2.0**-8
"""Largest relative error of a number by its rounding to bf16."""
BF16_RMS = 2.0**-8 * math.sqrt((1 - 1 / 4) / (6 * math.log(2)))
"""Rms of a number's relative error by one rounding to bf16."""
BF16_CHANCE = 4.0
"""Standard deviations by which the square of dQ's error may be above its mean."""
F16_ROUNDING = 2 * 2.0**-11
"""Share of `reference.sparse_mla_spread` that O's rows and lse may be off by if packed rows whose
scales are no powers of two are rounded to f16 for the tensor cores: 4.7 times the rms of one
rounding to 11 bits. In float64, keys of size exp(N(0, 1)) to exp(1.5 N(0, 1)): 0.54 of it at most
in 180 calls if each value is rounded once, 0.85 if its scale is rounded before."""
F16_ROWS = ("sm90", "emulate-sm90")
"""Backends that round packed rows whose scales are no powers of two to f16."""
WGMMA_SUMS = (*F16_ROWS, "triton", "emulate-triton")
"""Backends whose logits are sums of wgmma, or of mma.sync, which cuts them likewise."""
WGMMA_CUT = 2.0**-23
"""Share of a partial sum that a wgmma may cut off."""
WGMMA_K = 16
"""bf16 columns that a wgmma adds to a partial sum."""
TARGET_EXPONENT_CUTS = 1
"""Cuts that the two fp32 roundings of a target's exponent (of its scale and of its lse) are like: P
may besides be off by WGMMA_CUT of its logits' sizes for each cut."""
UNDERFLOW = 1e8
"""Times the smallest normal number of the sums' dtype: what is smaller may have become 0 on the
way."""


@dataclass(frozen=True)
class Tolerance:
    """Limits of one output; a limit that does not apply to it is None."""

    norm: float | None = None
    """Limit of `||out - ref|| / ||ref||`, on standard-normal data."""
    row: float | None = None
    """Limit of the per-row rule, on any data."""
    absolute: float | None = None
    relative: float | None = None
    """Limit `|out - ref| <= absolute + relative * |ref|`, element by element."""


_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

_EXACT_ENOUGH = {
    _FP32: Tolerance(norm=1e-5, row=ROW_TOLERANCE),
    _FP64: Tolerance(norm=1e-11, row=ROW_TOLERANCE),
}
_ROUNDED_OUT = {
    _BF16: Tolerance(norm=2.5e-3, row=ROW_TOLERANCE),
    _FP16: Tolerance(norm=2.5e-3 / 8, row=ROW_TOLERANCE),
    **_EXACT_ENOUGH,
}
_ROUNDED_TWICE = {
    _BF16: Tolerance(norm=3.5e-3, row=ROW_TOLERANCE),
    _FP16: Tolerance(norm=3.5e-3 / 8, row=ROW_TOLERANCE),
    **_EXACT_ENOUGH,
}
_LSE = Tolerance(absolute=1e-4, relative=4e-7)

_BY_DTYPE: dict[tuple[str, str], dict[torch.dtype, Tolerance]] = {
    ("sparse_mla_fwd", "O"): _ROUNDED_OUT,
    ("sparse_mla_fwd", "lse"): {
        _BF16: _LSE,
        _FP16: _LSE,
        _FP32: _LSE,
        # An fp64 lse must not have passed through fp32 (relative 6e-8): gradcheck needs it.
        _FP64: Tolerance(absolute=1e-11, relative=1e-11),
    },
    ("mla_bwd", "dQ"): _ROUNDED_OUT,
    ("mla_bwd", "dKV"): _ROUNDED_OUT,
    ("mla_bwd", "dKV:bf16"): {dtype: Tolerance(3.5e-3, ROW_TOLERANCE) for dtype in _ROUNDED_OUT},
    ("mla_bwd", "d_sink"): {
        _BF16: Tolerance(norm=1e-2, row=ROW_TOLERANCE),
        _FP16: Tolerance(norm=1e-2, row=ROW_TOLERANCE),
        _FP32: Tolerance(norm=1e-5, row=ROW_TOLERANCE),
        # d_sink is fp32 whatever the inputs are: its own rounding is 6e-8.
        _FP64: Tolerance(norm=1e-6, row=ROW_TOLERANCE),
    },
    ("sparse_mla", "O"): _ROUNDED_OUT,
    ("sparse_mla", "q.grad"): _ROUNDED_OUT,
    ("sparse_mla", "kv.grad"): _ROUNDED_TWICE,
    ("sparse_mla", "attn_sink.grad"): {
        _BF16: Tolerance(norm=1e-2, row=ROW_TOLERANCE),
        _FP16: Tolerance(norm=1e-2, row=ROW_TOLERANCE),
        _FP32: Tolerance(norm=1e-5, row=ROW_TOLERANCE),
        _FP64: Tolerance(norm=1e-6, row=ROW_TOLERANCE),
    },
    # P is a sum of exponentials of fp32 logits below 64, and of fp64 ones above.
    ("attention_target", "target"): {
        _BF16: Tolerance(absolute=1e-9, relative=1e-4),
        _FP16: Tolerance(absolute=1e-9, relative=1e-4),
        _FP32: Tolerance(absolute=1e-9, relative=1e-4),
        _FP64: Tolerance(absolute=1e-11, relative=1e-11),
    },
    ("indexer_bwd", "dq_index"): _ROUNDED_OUT,
    ("indexer_bwd", "dk_index"): _ROUNDED_OUT,
    ("indexer_bwd", "d_weights"): _ROUNDED_OUT,
}

TOLERANCES: dict[tuple[str, str, torch.dtype], Tolerance] = {
    (operation, output, dtype): tolerance
    for (operation, output), by_dtype in _BY_DTYPE.items()
    for dtype, tolerance in by_dtype.items()
}

SCORE_TOLERANCES: dict[str, float] = {
    "cpu": 1e-5,
    "torch": 3e-4,
    "sm90": 3e-4,
    "sm100": 3e-4,
    "emulate-sm90": 3e-4,
    "emulate-sm100": 3e-4,
    "triton": 3e-4,
    "emulate-triton": 3e-4,
}
"""c of the indexer's score rule, by backend, on standard-normal data."""
PRODUCT_TOLERANCE = 5e-5
"""Share of scale * sum_h |w_h| sum_d |q_hd k_d|, besides, where tensor cores add the fp8 products,
on standard-normal data. 16 heads had 3.9e-5 on an H200, 64 heads 1.3e-5."""
PRODUCT_TOLERANCE_ANY_DATA = 2e-3
"""The same unit, alone, on any data. Seen on an H200 with 65,536 tokens a case: 1.5e-3 with heads
that point the same way and four channels 30 times as large, 3e-4 without the large channels."""


TRAINED_SCORES = {_BF16: 1e-5, _FP16: 1e-5, _FP32: 1e-5, _FP64: 1e-11}
"""Share of sum_h |w_h| relu(q_h . k) that a score of `indexer_scores` may be off by."""
TRAINED_SCORE_CUT = 2.0**-22
"""Share of sum_h |w_h| sum_d |q_hd k_d|, besides: sums of 128 fp32 products that cancel."""
ENTRY_SUMS = {_FP32: 1e-5, _FP64: 1e-11}
"""Share of what is summed into an element of an entry, or of its gradients, that it may be off by
(by the dtype of the sums), large logits counted; its one rounding comes on top."""
ROUNDING = {_BF16: BF16_HALF_ULP, _FP16: 2.0**-11, _FP32: 2.0**-24, _FP64: 2.0**-53}
"""Largest relative error of a number by its rounding to the dtype."""
KL_TOLERANCE = {_BF16: 1e-4, _FP16: 1e-4, _FP32: 1e-4, _FP64: 1e-10}
"""Limit of a KL's absolute error; this share of sum p |log p - log pi| is allowed besides."""


def tolerance(operation: str, output: str, dtype: torch.dtype) -> Tolerance:
    """The limits of one output.

    Raises:
        KeyError: the table has none; nothing is judged by a guess.
    """
    return TOLERANCES[operation, output, dtype]


def along_limit(total: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return how far rounding each term of a row to bf16 may move the row along itself.

    Args:
        total: sum of the sizes of the terms' parts along the row: each is off by half an ulp.
        spread: root of the sum of their squares: the roundings are independent.
    """
    return torch.minimum(BF16_HALF_ULP * total, BF16_ROUNDING * spread)


def dq_limit(norm: float, dq: float, rounding: tuple[float, float]) -> float:
    """`||dQ error|| / ||dQ||` that a kernel with dS in bf16 may have: `norm`, or more where few dS
    make up dQ.

    Args:
        dq: `||dQ||`. rounding: `reference.MlaBackward.dq_rounding`.
    """
    if dq == 0.0:
        return norm
    mean, deviation = rounding
    return max(norm, BF16_RMS * math.sqrt(dq**2 + mean + BF16_CHANCE * deviation) / dq)


def dk_limit(norm: float, dk: float, spread: torch.Tensor) -> float:
    """Likewise of dk_index, which is not rounded itself.

    Args:
        dk: `||dk_index||`. spread: of its rows. The error's square has the sum of their squares for
            its mean, and no more than sqrt(2 sum of their fourth powers) for its deviation.
    """
    if dk == 0.0:
        return norm
    squares = spread.square()
    deviation = float((2 * squares.square().sum()).sqrt())
    return max(norm, BF16_RMS * math.sqrt(float(squares.sum()) + BF16_CHANCE * deviation) / dk)
