"""Compressed entries: neighbouring tokens pooled into rows, and the rotation of last columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.entries import rotated
from flashdsa.dispatch import checks, dtypes
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Gradient, Operand, Output, Parameter, Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.ops.entries_kept import (
    keep_last,
    require_cache_of_entries,
    require_state,
    write_entries,
)
from flashdsa.problem import INT32_MAX

__all__ = ["compress_kv", "compress_kv_bwd", "rotate_tail"]

_KV = Operand(
    "T columns", dtypes.ATTENTION_DTYPES, nonempty="expected [T, width], width >= 1; got 0"
)
Gate = Annotated[Tensor, Operand("T columns", dtypes.same_dtype)]
Offsets = Annotated[Tensor, Operand("offsets", dtypes.INT32, note=", one more than sequences")]
Ape = Annotated[Tensor | None, Operand("ratio columns", dtypes.sums_or_same)]
NormWeight = Annotated[Tensor | None, Operand("d", dtypes.sums_or_same)]
Table = Annotated[Tensor | None, Operand("P half", dtypes.sum_dtypes)]


class CompressKvOperands(NamedTuple):
    """Operands of `compress_kv`."""

    kv: Annotated[Tensor, _KV]
    gate: Gate
    cu_seqlens: Offsets
    ape: Ape = None
    norm_weight: NormWeight = None
    cos: Table = None
    sin: Table = None
    state: Annotated[Tensor | None, Operand("B R 2 columns", dtypes.same_dtype)] = None
    seen: Annotated[Tensor | None, Operand("B", dtypes.INT32)] = None


class CompressKvBwdOperands(NamedTuple):
    """Operands of `compress_kv_bwd`: those of `compress_kv` without a state, and the gradient."""

    kv: Annotated[Tensor, _KV]
    gate: Gate
    cu_seqlens: Offsets
    grad_entries: Annotated[Tensor, Operand("num_entries d", dtypes.same_dtype)]
    ape: Ape = None
    norm_weight: NormWeight = None
    cos: Table = None
    sin: Table = None


def _require_overlap(name: str, value: bool, operands: Any) -> None:
    """Check what follows from an entry's columns, and the numbers of sequences."""
    columns, offsets = operands.kv.shape[1], operands.cu_seqlens
    if value and columns % 2:
        raise ArgumentValueError(
            f"kv: expected an even width with overlap, both halves of [T, 2 d]; got {columns}"
        )
    d = columns // (1 + value)
    if offsets.shape[0] < 2:
        raise ArgumentValueError("cu_seqlens: expected B + 1 offsets, B >= 1; got none")
    if (operands.cos is None) != (operands.sin is None):
        raise ArgumentValueError("rotation: expected both tables, of cosines and of sines")
    if operands.cos is not None:
        _require_tables(operands.cos, d)
    if operands.norm_weight is not None:
        checks.require_shape("norm_weight", operands.norm_weight, (d,), "[d]")
    gradient = getattr(operands, "grad_entries", None)
    if gradient is not None:
        checks.require_shape("grad_entries", gradient, (gradient.shape[0], d), "[T // ratio, d]")
    state = getattr(operands, "state", None)
    if (state is None) != (getattr(operands, "seen", None) is None):
        raise ArgumentValueError("state: expected it and seen, or neither")
    if state is not None:
        shape = offsets.shape[0] - 1, *state.shape[1:]
        checks.require_shape("state", state, shape, "[B, R, 2, width], B sequences,")


def _require_ratio(name: str, value: int, operands: Any) -> None:
    """`ape` has a row a token of a window; the state holds the tokens that an entry may want."""
    if operands.ape is not None:
        checks.require_shape("ape", operands.ape, (value, operands.kv.shape[1]), "[ratio, width]")
    state = getattr(operands, "state", None)
    if state is not None and state.shape[1] < value:
        raise ArgumentValueError(f"state: expected R >= {value} rows; got {state.shape[1]}")


def _require_not_negative(name: str, value: float, _: Any) -> None:
    """A mean of squares and it have a root."""
    if value < 0:
        raise ArgumentValueError(f"{name}: expected at least 0; got {value}")


def _sizes_of_entries(known: Mapping[str, Any]) -> Mapping[str, int]:
    """Rows and columns of the entries."""
    ratio, spare = known["ratio"], (known["offsets"] - 1) * (known["ratio"] - 1)
    tokens = known["T"] + (spare if "R" in known else 0)
    return {"num_entries": tokens // ratio, "d": known["columns"] // (1 + known["overlap"])}


def _arguments_of_backward(
    x: CompressKvOperands, _: Sequence[Tensor], d_entries: Tensor, parameters: Parameters
) -> tuple[Any, ...]:
    """`compress_kv_bwd`'s."""
    operands = x.kv, x.gate, x.cu_seqlens, d_entries, x.ape, x.norm_weight, x.cos, x.sin
    return *operands, *(parameters[x.name] for x in _PARAMETERS)


_PARAMETERS = (
    Parameter("ratio", "int", rule=_require_ratio),
    Parameter("overlap", "bool", rule=_require_overlap),
    Parameter("eps", "float", default=lambda kv: 1e-6, rule=_require_not_negative),
)
COMPRESS_KV = register(
    OpSpec(
        "compress_kv",
        CompressKvOperands,
        cpu="entries:forward",
        parameters=(*_PARAMETERS, Parameter("backward_backend", "str", passed=False)),
        outputs=(Output("entries", "num_entries d", ("kv",)),),
        gradient=Gradient(
            by="compress_kv_bwd",
            of=("kv", "gate", "ape", "norm_weight"),
            arguments=_arguments_of_backward,
        ),
        sizes=_sizes_of_entries,
    )
)
COMPRESS_KV_BWD = register(
    OpSpec(
        "compress_kv_bwd",
        CompressKvBwdOperands,
        cpu="entries:backward",
        parameters=_PARAMETERS,
        outputs=(
            Output("d_kv", "T columns", ("kv",)),
            Output("d_gate", "T columns", ("kv",)),
            Output("d_ape", "ratio columns", ("ape", dtypes.sum_dtype), when="ape"),
            Output("d_norm_weight", "d", ("norm_weight", dtypes.sum_dtype), when="norm_weight"),
        ),
        backward_of="compress_kv",
    )
)


def compress_kv(  # noqa: PLR0913 - pooling, norm, rotation, state and cache of one pass
    kv: Tensor,
    gate: Tensor,
    ape: Tensor | None = None,
    *,
    ratio: int,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotation: tuple[Tensor, Tensor] | None = None,
    state: Tensor | None = None,
    seen: Tensor | None = None,
    out: Tensor | None = None,
    slots: Tensor | None = None,
    kv_format: str | None = None,
    backend: str = "auto",
) -> Tensor | None:
    """Pool every `ratio` tokens into an entry: a softmax of the gates over them weighs their kv,
    column by column; then RMSNorm and rotation. See "Compressed entries" in "DeepSeek Sparse
    Attention".

    Differentiable in kv, gate, ape and norm_weight without `state` and `out`.

    Args:
        kv, gate: (T, width) bf16, fp16, fp32 or fp64, of one dtype; an entry has d = width columns,
            width / 2 with `overlap`. Rows may lie apart, as parts of one projection do.
        ape: (ratio, width) fp32 or kv's dtype (fp64 of fp64), added to the gates.
        ratio: tokens of a window.
        overlap: entry j pools columns [0, d) of the window before, too, and [d, 2d) of its own.
        cu_seqlens: (B + 1,) int32 or int64, 0 and then the end of each sequence's tokens; rows
            after the last one are padding. None: one sequence of T tokens.
        norm_weight: (d,) fp32 or kv's dtype; None: no norm. eps: of the norm.
        rotation: cos and sin (P, n) fp32 (fp64 of fp64), P beyond the last entry's position; see
            `rotate_tail`.
        state: (B, R, 2, width) kv's dtype, changed in place: the last R tokens of each sequence.
        seen: (B,) int32 or int64, tokens of each sequence before this call; with `state` only.
        out: a cache that entries are written into, see `write_kv_cache` and, for rows of 132 bytes,
            `write_index_k_cache`. kv_format: of its rows.
        slots: (T,) int32 or int64, slots of the entries that tokens complete; with `out` only.
        backend: "auto" or the name of one, of both directions.

    Returns:
        Entries (E, d) in kv's dtype, of one sequence after the other, then rows of 0: E is
        ``T // ratio``, with a state ``(T + B * (ratio - 1)) // ratio``. None with `out`.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) offsets that do not begin at 0, decrease or exceed T, `seen` below 0,
            and a `rotation` that is too short. Nothing is written then. Without checks, an offset
            counts as the largest up to it, within [0, T], rows before the first are padding, too,
            `seen` is at least 0, and an entry behind the tables is rotated by their last row.
        NotImplementedError: no implementation serves the call, or a gradient is asked for with
            `state` or `out`.
    """
    offsets, seen = _offsets(kv, ratio, cu_seqlens, seen)
    cos, sin = _tables(rotation, "kv", kv)
    checks.require_bool("overlap", overlap)
    eps = checks.as_float("eps", eps)
    if (out is None) != (slots is None):
        raise ArgumentValueError("slots: expected them and out, or neither")
    if out is None and kv_format is not None:
        raise ArgumentValueError(f"kv_format: expected None without out; got {kv_format!r}")
    operands = CompressKvOperands(kv, gate, offsets, ape, norm_weight, cos, sin, state, seen)
    written = [name for name, x in (("state", state), ("out", out)) if x is not None]
    if written:
        COMPRESS_KV.require_tensors(operands)
        if checks.wants_gradient((kv, gate, ape, norm_weight)):
            raise UnsupportedError(
                f"compress_kv: with {' and '.join(written)} no gradient is available; call it "
                "under torch.no_grad()"
            )
    if state is not None:
        require_state(state, operands, ratio * (1 + overlap))
    if out is not None and slots is not None:
        require_cache_of_entries(out, slots, kv_format, operands, kv.shape[1] // (1 + overlap))
    _require_values(offsets, seen, kv.shape[0], ratio, cos)
    entries: Tensor = call(COMPRESS_KV, operands, (ratio, overlap, eps, backend), backend)
    if out is not None and slots is not None:
        write_entries(entries, offsets, seen, slots, ratio, out, kv_format, kv.shape[0])
    if state is not None and seen is not None and kv.shape[0]:
        keep_last(state, kv, gate, offsets, seen)
    return entries if out is None else None


def compress_kv_bwd(  # noqa: PLR0913 - `compress_kv`'s arguments
    kv: Tensor,
    gate: Tensor,
    grad_entries: Tensor,
    ape: Tensor | None = None,
    *,
    ratio: int,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotation: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `compress_kv`; always bit-identical from run to run.

    Args:
        kv, gate, ape, ratio, overlap, cu_seqlens, norm_weight, eps, rotation, backend: as for
            `compress_kv`.
        grad_entries: (T // ratio, d) in kv's dtype; what rows after the last entry hold is not
            used.

    Returns:
        d_kv and d_gate (T, width) in kv's dtype, d_ape (ratio, width) in ape's and d_norm_weight
        (d,) in norm_weight's, summed in fp32 (fp64 of fp64) and empty without these.
    """
    offsets, _ = _offsets(kv, ratio, cu_seqlens, None)
    cos, sin = _tables(rotation, "kv", kv)
    _require_values(offsets, None, kv.shape[0], ratio, cos)
    checks.require_tensor("grad_entries", grad_entries)
    rows = kv.shape[0] // ratio, *grad_entries.shape[1:]
    checks.require_shape("grad_entries", grad_entries, rows, "[T // ratio, d]")
    operands = kv, gate, offsets, grad_entries, ape, norm_weight, cos, sin
    gradients: tuple[Tensor, Tensor, Tensor, Tensor] = call(
        COMPRESS_KV_BWD, operands, (ratio, overlap, checks.as_float("eps", eps)), backend
    )
    return gradients


def rotate_tail(
    x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], *, inverse: bool = False
) -> Tensor:
    """`x` with the last 2n columns of its rows turned by their positions: neighbours ``(a, b)``
    become ``(a cos - b sin, a sin + b cos)``; the rest is copied. Differentiable in `x` and
    the tables, by all of torch's transforms.

    Args:
        x: (S, d) or (S, H, d) bf16, fp16, fp32 or fp64: keys, queries, or O with `inverse`.
        positions: (S,) int32 or int64, rows of the tables.
        rotation: cos and sin (P, n), fp32 (fp64 of fp64), 2n <= d; computed in their dtype.
        inverse: by the negated angles.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError, ValueError: a wrong argument; where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) a position outside [0, P). Otherwise the nearest one counts.
    """
    checks.require_tensor("x", x)
    checks.require_dtype("x", x, *dtypes.ATTENTION_DTYPES)
    checks.require_rank("x", x, (2, 3), "[S, d] or [S, H, d]")
    cos, sin = _pair_of_tables(rotation, "x", x)
    _require_tables(cos, x.shape[-1])
    checks.require_tensor("positions", positions)
    checks.require_dtype("positions", positions, torch.int32, torch.int64)
    checks.require_shape("positions", positions, (x.shape[0],), "[S], one a row of x,")
    checks.require_device("positions", positions, x.device, "x")
    checks.require_bool("inverse", inverse)
    if x.shape[0] and checks.holds_values(positions) and checks.are_values_read(positions):
        low, high = (int(y) for y in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ArgumentValueError(
                f"positions: expected rows of the rotation's tables, in [0, {cos.shape[0]}); "
                f"got {low if low < 0 else high}"
            )
    rows = positions.long().clamp(0, cos.shape[0] - 1)
    columns = 2 * cos.shape[1]
    tables = (y[rows].view(x.shape[0], *[1] * (x.dim() - 2), columns // 2) for y in (cos, sin))
    fixed, tail = x.split([x.shape[-1] - columns, columns], dim=-1)
    # No more than the turned columns is widened.
    wide = rotated(tail.to(cos.dtype), *tables, inverse=inverse)
    return torch.cat((fixed, wide.to(x.dtype)), dim=-1)


def _offsets(
    kv: Tensor, ratio: int, cu_seqlens: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Offsets of the sequences, and tokens seen, as int32; where no value is read, bounded ones."""
    checks.require_tensor("kv", kv)
    checks.require_rank("kv", kv, (2,), "[T, width]")
    checks.require_positive("ratio", ratio)
    for name, value in (("cu_seqlens", cu_seqlens), ("seen", seen)):
        if value is not None:
            checks.require_tensor(name, value)
            checks.require_dtype(name, value, torch.int32, torch.int64)
            checks.require_device(name, value, kv.device, "kv")
    if cu_seqlens is None:
        offsets = torch.arange(2, dtype=torch.int32, device=kv.device) * kv.shape[0]
    elif _are_checked(cu_seqlens):
        offsets = checks.as_int32(cu_seqlens, -1)
    else:
        offsets = checks.bounded_offsets(cu_seqlens, kv.shape[0]).to(torch.int32)
    if seen is not None:
        read = _are_checked(offsets)
        seen = checks.as_int32(seen, -1) if read else seen.clamp(0, INT32_MAX).to(torch.int32)
    return offsets, seen


def _are_checked(offsets: Tensor) -> bool:
    """Whether the host reads the offsets and what belongs to them."""
    return checks.holds_values(offsets) and checks.are_values_read(offsets)


def _require_tables(cos: Tensor, d: int) -> None:
    """Tables have positions, and no more columns than there are pairs."""
    if not cos.shape[0] or not 1 <= cos.shape[1] <= d // 2:
        raise ArgumentValueError(
            f"rotation: expected [P, n] with P >= 1 and 1 <= 2n <= {d} columns; "
            f"got {list(cos.shape)}"
        )


def _tables(rotation: object, like: str, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin, whose rows have no gaps; None without a rotation."""
    if rotation is None:
        return None, None
    pair = _pair_of_tables(rotation, like, x)
    for number, table in enumerate(pair):
        checks.require_dense_rows(f"rotation[{number}]", table)
    return pair


def _pair_of_tables(rotation: object, like: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin; both [P, n] of the dtype of `x`'s sums, on its device.

    Args:
        like: x's name.
    """
    if not isinstance(rotation, tuple | list) or len(rotation) != 2:
        got = (
            f"{len(rotation)} values"
            if isinstance(rotation, tuple | list)
            else type(rotation).__name__
        )
        raise ArgumentTypeError(f"rotation: expected a pair (cos, sin); got {got}")
    for number, table in enumerate(rotation):
        name = f"rotation[{number}]"
        checks.require_tensor(name, table)
        checks.require_dtype(name, table, dtypes.sum_dtype(x.dtype))
        checks.require_rank(name, table, (2,), "[P, n]")
        checks.require_shape(name, table, rotation[0].shape, "[P, n]")
        checks.require_device(name, table, x.device, like)
    return rotation[0], rotation[1]


def _require_values(
    offsets: Tensor, seen: Tensor | None, tokens: int, ratio: int, cos: Tensor | None
) -> None:
    """Check, if values are, that offsets name rows and that positions are within the tables."""
    if not (_are_checked(offsets) and offsets.numel() > 1):
        return
    last = checks.require_offsets("cu_seqlens", offsets)
    if last > tokens:
        raise ArgumentValueError(
            f"cu_seqlens: expected the last to be at most T, {tokens}; got {last}"
        )
    ends = offsets.long().diff()
    if seen is not None and seen.shape == ends.shape:
        if (seen < 0).any():
            raise ArgumentValueError(f"seen: expected at least 0; got {int(seen.min())}")
        ends = ends + seen
    position = int(ends.max() // ratio - 1) * ratio
    if cos is not None and position >= cos.shape[0]:
        raise ArgumentValueError(
            f"rotation: expected tables of at least {position + 1} positions; got {cos.shape[0]}"
        )
