"""The rule that no row of an output is too long or too short, which a norm of errors hides."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashdsa.verify.compare import (
    Comparison,
    by_rows,
    coordinate,
    f64,
    finite,
    ratio,
    row_sizes,
    seen,
)
from flashdsa.verify.tolerances import BIAS_TOLERANCE


def judge_bias(
    verdict: Comparison,
    out: Tensor,
    ref: Tensor,
    magnitude: Tensor,
    *,
    limit: float = BIAS_TOLERANCE,
    row_ndims: tuple[int, ...] = (1,),
    rounding: Tensor | None = None,
) -> Comparison:
    """`verdict` on `out`, and besides `|<row error, row>| <= limit ||row||^2` for each row.

    The error's part along the row: random roundings all but cancel in it, a wrong factor stays
    whole. A row that cancels, so that its size by the row rule is not its own norm, is left out.

    Args:
        verdict: of `compare` with the same out, ref and magnitude.
        row_ndims: how many leading coordinates name a row; several mean that each must hold.
        rounding: what the error's part along a row, named by its first coordinates, may be in any
            case.
    """
    if math.isnan(verdict.norm_error):  # the shape, the dtype or what is not finite is wrong
        return verdict
    ref64 = finite(f64(ref, out))
    difference = seen(finite(f64(out)) - ref64, out.dtype)
    worst, where = 0.0, None
    for ndim in row_ndims:
        norms, sizes = row_sizes(ref64, magnitude, ndim)
        if not norms.numel():
            continue
        dots = torch.linalg.vecdot(by_rows(difference, ndim), by_rows(ref64, ndim))
        along = dots / norms.masked_fill(norms == 0, 1)
        allowed = norms
        if rounding is not None:
            of_rows = by_rows(finite(f64(rounding, out)), ndim).norm(dim=-1)
            allowed = torch.maximum(norms, of_rows / limit)
        biases = ratio(along, allowed).masked_fill(norms < sizes, 0)
        row = int(biases.abs().argmax())
        if where is None or not abs(float(biases[row])) <= abs(worst):
            worst, where = float(biases[row]), coordinate(row, ref64.shape[:ndim])
    verdict = replace(verdict, bias_error=abs(worst), bias_limit=limit)
    if abs(worst) <= limit:
        return verdict
    wrong = "long" if worst > 0 else "short"
    problem = f"row {where} is {abs(worst):.3e} too {wrong} > {limit:.1e}"
    if verdict.passed:
        return replace(
            verdict,
            worst_row=where,
            first_bad=where,
            passed=False,
            message=f"{verdict.output}: {problem}",
        )
    return replace(verdict, message=f"{verdict.message}; {problem}")
