"""Compare one output with its float64 reference; the verdict is one frozen record.

Judged where the output is. INVARIANT: only a satisfied `error <= limit` passes, so a NaN never
passes silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdsa.verify import tolerances

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The verdict on one output.

    `norm_error` is `||out - ref|| / ||ref||` (its limit is None where the norm is not judged; where
    all cancels, ||ref|| counts as a share of what was summed);
    `row_error` is the worst row's error relative to that row's size, or the worst element's for
    element-wise rules; `bias_error` is the share by which a row is too long or too short, at worst
    (see `row_bias`); `first_bad` is the coordinate to look at first.
    """

    output: str
    norm_error: float
    norm_limit: float | None
    row_error: float
    row_limit: float | None
    worst_row: Coordinate | None
    first_bad: Coordinate | None
    passed: bool
    message: str
    bias_error: float = 0.0
    bias_limit: float | None = None

    @property
    def headline(self) -> tuple[float, float]:
        """(error, limit) of the rule that failed, or of the norm, or of the worst row."""
        rules = (
            (self.norm_error, self.norm_limit),
            (self.row_error, self.row_limit),
            (self.bias_error, self.bias_limit),
        )
        judged = [(error, limit) for error, limit in rules if limit is not None]
        broken = [(error, limit) for error, limit in judged if not error <= limit]
        return next(iter(broken or judged), (self.row_error, 0.0))


def failures(verdicts: Iterable[Comparison]) -> list[str]:
    """The messages of the comparisons that did not pass."""
    return [verdict.message for verdict in verdicts if not verdict.passed]


def _failure(output: str, message: str, first_bad: Coordinate | None = None) -> Comparison:
    nan = float("nan")
    return Comparison(output, nan, None, nan, 0.0, None, first_bad, False, f"{output}: {message}")


def coordinate(flat_index: int, shape: torch.Size) -> Coordinate:
    """Return the coordinate of element `flat_index` of a tensor of `shape`."""
    where = []
    for size in reversed(shape):
        flat_index, i = divmod(flat_index, size)
        where.append(i)
    return tuple(reversed(where))


def _first_true(mask: Tensor) -> Coordinate | None:
    hits = mask.reshape(-1).nonzero()
    return None if len(hits) == 0 else coordinate(int(hits[0]), mask.shape)


def _kinds(x: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf, element by element."""
    return torch.isnan(x) * 1 + torch.isposinf(x) * 2 + torch.isneginf(x) * 3


def _is_finite(x: Tensor) -> bool:
    """Whether every element is; False, too, where their sum is not: in one look, without a copy."""
    return bool(x.sum().isfinite())


def _misfit(output: str, out: Tensor, ref: Tensor, dtype: torch.dtype | None) -> Comparison | None:
    """The failure of a wrong dtype, shape or pattern of non-finite values, or None."""
    if dtype is not None and out.dtype != dtype:
        return _failure(output, f"dtype is {out.dtype}, expected {dtype}")
    if out.shape != ref.shape:
        return _failure(output, f"shape is {tuple(out.shape)}, expected {tuple(ref.shape)}")
    out64, ref64 = f64(out), f64(ref, out)
    if _is_finite(out64) and _is_finite(ref64):
        return None
    bad = _first_true(_kinds(out64) != _kinds(ref64))
    if bad is None:
        return None
    there = f"{float(out64[bad])!r} at {bad}, reference {float(ref64[bad])!r}"
    return _failure(output, f"non-finite values differ: {there}", bad)


def f64(x: Tensor, there: Tensor | None = None) -> Tensor:
    """The values of x in float64, where x is or that other tensor."""
    return x.detach().to(x.device if there is None else there.device, torch.float64)


def finite(x: Tensor) -> Tensor:
    """x with 0 for what is not finite."""
    return x if _is_finite(x) else torch.where(torch.isfinite(x), x, 0.0)


def seen(difference: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where an output of that dtype may be 0, or a step of its smallest numbers away."""
    sums = torch.finfo(torch.promote_types(dtype, torch.float32))
    own = torch.finfo(dtype)
    vanishing = max(tolerances.UNDERFLOW * sums.tiny, own.tiny * own.eps)
    return torch.where(difference.abs() <= vanishing, 0.0, difference)


def ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, where 0 / 0 is no error at all and anything else over 0 is infinite."""
    return torch.where(error == 0, 0.0, error / size)


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row of `[rows, n]`, whose squares may neither overflow nor vanish."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    doubtful = ~((norms > 1e-140) & (norms < 1e140))
    if rows.shape[1] and doubtful.any():
        some = rows[doubtful]
        largest = some.abs().amax(dim=-1)
        unit = torch.where(largest == 0, 1.0, largest)
        norms[doubtful] = (some / unit[:, None]).norm(dim=-1) * unit
    return norms


def by_rows(x: Tensor, row_ndim: int) -> Tensor:
    """`[rows, elements of a row]`, a row being named by the first `row_ndim` coordinates."""
    return x.reshape(x.shape[:row_ndim].numel(), x.shape[row_ndim:].numel())


def row_sizes(ref: Tensor, magnitude: Tensor | None, ndim: int) -> tuple[Tensor, Tensor]:
    """Each row's norm, and the size that the row rule gives it: no less."""
    norms = size = _norms(by_rows(ref, ndim))
    if magnitude is not None:
        summed = _norms(by_rows(finite(f64(magnitude, ref)), ndim))
        largest = float(summed.max()) if summed.numel() else 0.0
        size = torch.maximum(
            size, (tolerances.ROW_CANCELLATION * summed).clamp(min=tolerances.ROW_FLOOR * largest)
        )
    return norms, size


def _row_errors(
    difference: Tensor, ref: Tensor, magnitude: Tensor | None, ndim: int, least: Tensor | None
) -> Tensor:
    """Each row's `||error||` relative to the size that the row rule gives it, `least` or more."""
    _, size = row_sizes(ref, magnitude, ndim)
    if least is not None:
        size = torch.maximum(size, _norms(by_rows(finite(f64(least, ref)), ndim)))
    return ratio(_norms(by_rows(difference, ndim)), size)


def _norm_error(difference: Tensor, ref: Tensor, magnitude: Tensor | None = None) -> float:
    """`||difference|| / ||ref||` over all elements; ||ref|| counts as NORM_CANCELLATION of the
    magnitude's norm at least."""
    size = _norms(ref.reshape(1, -1))
    if magnitude is not None:
        summed = _norms(finite(f64(magnitude, ref)).reshape(1, -1))
        size = torch.maximum(size, tolerances.NORM_CANCELLATION * summed)
    return float(ratio(_norms(difference.reshape(1, -1)), size)[0])


def compare(
    output: str,
    out: Tensor,
    ref: Tensor,
    *,
    norm_tolerance: float | None,
    magnitude: Tensor | None = None,
    rounding: Tensor | None = None,
    row_tolerance: float | None = tolerances.ROW_TOLERANCE,
    row_ndims: tuple[int, ...] = (1,),
    zero_rows: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Judge `out` by the norm rule (None: not judged), the row rule, and exact zeros.

    ref: float64, out's shape.  magnitude: what was summed into each element, same shape.
    rounding: `||error||` that a row may have in any case, named by its first coordinates.
    row_ndims: how many leading coordinates name a row; several mean that each must hold.
    zero_rows: bool over leading coordinates, True where every element must be exactly 0.
    dtype: the dtype that out must have, if that is judged.
    """
    misfit = _misfit(output, out, ref, dtype)
    if misfit is not None:
        return misfit
    out64, ref64 = finite(f64(out)), finite(f64(ref, out))
    difference = seen(out64 - ref64, out.dtype)

    problems: list[str] = []
    first_bad: Coordinate | None = None
    norm_error = _norm_error(difference, ref64, magnitude)
    if norm_tolerance is not None and not norm_error <= norm_tolerance:
        problems.append(f"norm error {norm_error:.3e} > {norm_tolerance:.1e}")

    row_error, worst_row = 0.0, None
    for ndim in row_ndims:
        least = None if rounding is None or not row_tolerance else rounding / row_tolerance
        errors = _row_errors(difference, ref64, magnitude, ndim, least)
        if errors.numel() == 0:
            continue
        worst = int(errors.argmax())
        if worst_row is None or not float(errors[worst]) <= row_error:
            row_error = float(errors[worst])
            worst_row = coordinate(worst, ref64.shape[:ndim])
    if row_tolerance is not None and not row_error <= row_tolerance:
        problems.append(f"row {worst_row} has error {row_error:.3e} > {row_tolerance:.1e}")
    if problems and difference.numel():
        row = worst_row or ()
        within = coordinate(int(difference[row].abs().argmax()), difference[row].shape)
        first_bad = (*row, *within)
        problems.append(f"at {first_bad} {float(out64[first_bad]):.6g}, ")
        problems[-1] += f"reference {float(ref64[first_bad]):.6g}"

    if zero_rows is not None:
        must_be_zero = zero_rows.reshape(zero_rows.shape + (1,) * (out.ndim - zero_rows.ndim))
        stray = _first_true(must_be_zero.to(out.device) & (out.detach() != 0))
        if stray is not None:
            first_bad = stray
            problems.append(f"{float(out[stray]):.6g} at {stray}, expected exactly 0")

    message = f"{output}: " + ("; ".join(problems) if problems else "ok")
    return Comparison(
        output,
        norm_error,
        norm_tolerance,
        row_error,
        row_tolerance,
        worst_row,
        first_bad,
        not problems,
        message,
    )


def _elementwise(
    output: str, out: Tensor, ref: Tensor, allowed: Tensor, dtype: torch.dtype | None
) -> Comparison:
    """Judge `|out - ref| <= allowed`; `row_error` is the worst share of what is allowed."""
    misfit = _misfit(output, out, ref, dtype)
    if misfit is not None:
        return misfit
    ref64 = finite(f64(ref, out))
    difference = (finite(f64(out)) - ref64).abs()
    share = ratio(difference, finite(f64(allowed, out)))
    norm_error = _norm_error(difference, ref64)
    worst = int(share.argmax()) if share.numel() else None
    where = None if worst is None else coordinate(worst, share.shape)
    worst_share = 0.0 if where is None else float(share[where])
    passed = worst_share <= 1.0
    message = f"{output}: ok"
    if not passed and where is not None:
        message = (
            f"{output}: at {where} {float(out[where]):.9g}, reference {float(ref64[where]):.9g}, "
            f"{worst_share:.3g} times the allowed error"
        )
    bad = None if passed else where
    return Comparison(output, norm_error, None, worst_share, 1.0, where, bad, passed, message)


def compare_lse(
    output: str,
    out: Tensor,
    ref: Tensor,
    *,
    absolute: float,
    relative: float,
    besides: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """Judge `|out - ref| <= absolute + relative * |ref| + besides`, with +inf where ref has it.

    `row_error` is the worst element's share of its allowance (limit 1).
    """
    allowed = absolute + relative * finite(f64(ref)).abs()
    return _elementwise(output, out, ref, allowed if besides is None else allowed + besides, dtype)


def compare_scores(
    output: str,
    out: Tensor,
    ref: Tensor,
    magnitude: Tensor,
    *,
    c: float,
    besides: Tensor | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Comparison:
    """Judge `|out - ref| <= c * magnitude + besides`; NaN and -inf must stand where ref's do.

    `row_error` is the worst element's share of its allowance (limit 1).
    """
    allowed = c * f64(magnitude)
    return _elementwise(output, out, ref, allowed if besides is None else allowed + besides, dtype)


def compare_exact(output: str, out: Tensor, ref: Tensor) -> Comparison:
    """Judge equality of shape, dtype and every element's bits (-0.0 is not 0.0, NaN is NaN)."""
    if out.dtype != ref.dtype:
        return _failure(output, f"dtype is {out.dtype}, expected {ref.dtype}")
    if out.shape != ref.shape:
        return _failure(output, f"shape is {tuple(out.shape)}, expected {tuple(ref.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ref.dtype.itemsize]
    here, ref = out.detach(), ref.to(out.device)
    differs = here.view(bits) != ref.view(bits)
    count, first = int(differs.sum()), _first_true(differs)
    message = f"{output}: ok"
    if first is not None:
        message = (
            f"{output}: {count} of {ref.numel()} differ, first at {first}: {here[first].item()}, "
            f"expected {ref[first].item()}"
        )
    return Comparison(output, 0.0, None, float(count), 0.0, None, first, first is None, message)


def judge_bias(
    verdict: Comparison,
    out: Tensor,
    ref: Tensor,
    magnitude: Tensor,
    *,
    limit: float = tolerances.BIAS_TOLERANCE,
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
