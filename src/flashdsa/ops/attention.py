"""Sparse MLA: the forward, its form with buffers, and its differentiable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch import checks
from flashdsa.dispatch.buffers import IntoBuffers
from flashdsa.dispatch.dtypes import ATTENTION_DTYPES, INT32, same_dtype, sum_dtype
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import (
    Gradient,
    Operand,
    Output,
    Parameter,
    Parameters,
    Sizes,
    fold_batch,
)
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.problem import D_V, INT32_MAX

__all__ = ["sparse_mla", "sparse_mla_fwd"]

PACKED = (torch.uint8, torch.int8)
"""dtypes of packed kv rows."""
Rows = Tensor | tuple[Tensor, Tensor]
"""A list of rows for each query: ids, or the starts and ends of a range."""
VALID_INDICES = "valid indices of sequence b; invalid ones stay -1"


def refuse_packed(kv: Tensor, operation: str = "mla_bwd") -> None:
    """Raise UnsupportedError where a gradient is asked for and kv has packed rows."""
    if kv.dtype in PACKED:
        raise UnsupportedError(
            f"{operation}: packed rows of kv have no gradient; `read_kv_cache` gives bf16 rows, "
            "which have one"
        )


def rows_and_slots(operands: Any) -> Any:
    """Return operands with sources (rows, d), lists (S, slots) and int32 slots; the same tuple if
    it has them.

    MLA in MQA form has one kv head, and ids count the rows of all pages through.

    Raises:
        UnsupportedError: kv has packed rows, and a gradient is asked for.
    """
    if checks.wants_gradient(operands):
        refuse_packed(operands.kv, "sparse_mla_fwd")
    slots = checks.int32_slots(operands)
    extra_kv = getattr(operands, "extra_kv", None)
    if slots.kv.dim() != 2:
        slots = slots._replace(kv=checks.kv_rows("kv", operands.kv))
    if extra_kv is not None and extra_kv.dim() != 2:
        slots = slots._replace(extra_kv=checks.kv_rows("extra_kv", extra_kv))
    return slots


def lists_of(
    indices: Rows,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Rows | None,
    extra_topk_length: Tensor | None,
) -> tuple[Any, ...]:
    """The operands from `indices` on, with starts and ends for each list that is a pair of them."""
    ends = extra_ends = None
    if isinstance(indices, tuple):
        indices, ends = _range_of("indices", indices)
    if isinstance(extra_indices, tuple):
        extra_indices, extra_ends = _range_of("extra_indices", extra_indices)
    lists = indices, topk_length, attn_sink, ends
    return *lists, extra_kv, extra_indices, extra_topk_length, extra_ends


def _range_of(name: str, pair: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The pair of an argument; ArgumentValueError if there are not two values."""
    if len(pair) != 2:
        raise ArgumentValueError(
            f"{name}: expected ids, or a pair (starts, ends) of a range; got {len(pair)} values"
        )
    return pair


def require_lists(operands: Any) -> None:
    """Every source has a list; a range is one column of starts, and has no length."""
    for name in ("extra_kv", "extra_indices", "extra_topk_length", "extra_ends"):
        for needed in ("extra_kv", "extra_indices"):
            if getattr(operands, name) is not None and getattr(operands, needed) is None:
                raise ArgumentValueError(f"{name}: expected {needed} beside it; got None")
    for source in ("", "extra_"):
        if getattr(operands, f"{source}ends") is None:
            continue
        if getattr(operands, f"{source}topk_length") is not None:
            raise ArgumentValueError(
                f"{source}topk_length: expected None, since {source}indices are a range, which has "
                "no length beside its ends; got a tensor"
            )
        starts = getattr(operands, f"{source}indices")
        if starts.shape[1] != 1:
            raise ArgumentValueError(
                f"{source}indices: expected starts [S] of a range; got shape {list(starts.shape)}"
            )
    extra_kv = operands.extra_kv
    if extra_kv is not None and (extra_kv.dtype in PACKED) != (operands.kv.dtype in PACKED):
        raise ArgumentTypeError(
            "extra_kv: expected rows as kv has them, both of q's dtype or both packed; got "
            f"{extra_kv.dtype} beside {operands.kv.dtype}"
        )


def _require_ids(name: str, block: int, operands: Any) -> None:
    """A range has no blocks."""
    if block != 1 and operands.ends is not None:
        raise ArgumentValueError(
            f"{name}: expected 1, since indices are a range, which has no blocks; got {block}"
        )


def _require_int32_slots(name: str, indices: Tensor, sizes: Sizes) -> None:
    """Lengths count the slots of a list in int32."""
    if indices.shape[1] > INT32_MAX:
        raise ArgumentValueError(
            f"{name}: expected at most {INT32_MAX} slots of a query (int32 lengths); "
            f"got {indices.shape[1]}"
        )


def _kv_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """q's, or bytes: packed rows."""
    return (dtype, *PACKED)


def _require_kv_columns(name: str, kv: Tensor, sizes: Sizes) -> None:
    """Require as many columns as q has; packed rows are looked at with their format's name."""
    if kv.dtype not in PACKED:
        size = "S_kv" if name == "kv" else "S_extra"
        shape = kv.shape[0], sizes["d_qk"]
        checks.require_shape(name, kv, shape, f"[{size}, d_qk] or [{size}, 1, d_qk]")


def _require_row_format(name: str, kv_format: str | None, operands: Any) -> None:
    """Packed rows have a format's bytes, and its columns are q's; a name fits a source."""
    sources = [("kv", operands.kv), ("extra_kv", operands.extra_kv)]
    named = False
    for source, kv in sources:
        form = None if kv is None else checks.row_format_of(source, kv, kv_format, alone=False)
        if form is None:
            continue
        named = named or form.name == kv_format
        if form.d_qk != operands.q.shape[2]:
            raise ArgumentValueError(
                f"{source}: packed rows of {form.row_bytes} bytes ({form.name}) are of {form.d_qk} "
                f"columns; expected as many of q, got {operands.q.shape[2]}"
            )
    if kv_format is not None and not named:
        checks.row_format_of("kv", operands.kv, kv_format)


def _sink_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Those of attn_sink, for q of `dtype`."""
    wide = dtype == torch.float64
    return (torch.float32, torch.float64) if wide else (torch.float32,)


def _require_d_v_at_most_d_qk(name: str, d_v: int, operands: SparseMlaOperands) -> None:
    """V is the first columns of kv."""
    d_qk = operands.q.shape[2]
    if d_v > d_qk:
        raise ArgumentValueError(
            f"{name}: expected at most q's last dimension, {d_qk}, since V is the first d_v "
            f"columns of kv; got {d_v}"
        )


def _require_writable(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """A result is written whole; V's columns are of those that kv has."""
    if not tensor.is_contiguous():
        raise ArgumentValueError(
            f"{name}: expected a contiguous tensor to write to; got strides {list(tensor.stride())}"
        )
    if not 1 <= sizes.get("d_v", 1) <= sizes["d_qk"]:
        raise ArgumentValueError(
            f"{name}: expected a last dimension d_v in [1, {sizes['d_qk']}] (q's last dimension); "
            f"got {sizes['d_v']}"
        )


Q = Annotated[
    Tensor,
    Operand(
        "S H d_qk",
        ATTENTION_DTYPES,
        batched=fold_batch("q", "kv", VALID_INDICES),
        nonempty="expected shape [S, H, d_qk] with H >= 1 and d_qk >= 1; got {shape}",
    ),
]
Kv = Annotated[Tensor, Operand("S_kv d_qk", same_dtype, note=" or [S_kv, 1, d_qk]")]
KvOrPacked = Annotated[
    Tensor,
    Operand("S_kv width", _kv_dtypes, pages="num_pages page_size width", rule=_require_kv_columns),
]
_NO_IDS = "expected topk >= 1 columns; got 0"
Indices = Annotated[Tensor, Operand("S topk", INT32, nonempty=_NO_IDS, rule=_require_int32_slots)]
TopkLength = Annotated[Tensor | None, Operand("S", INT32)]
AttnSink = Annotated[Tensor | None, Operand("H", _sink_dtypes)]
Ends = Annotated[Tensor | None, Operand("S", INT32)]
ExtraKv = Annotated[
    Tensor | None, Operand("S_extra d_qk", same_dtype, note=" or [S_extra, 1, d_qk]")
]
ExtraKvOrPacked = Annotated[
    Tensor | None,
    Operand(
        "S_extra extra_width",
        _kv_dtypes,
        pages="extra_pages extra_page_size extra_width",
        rule=_require_kv_columns,
    ),
]
ExtraIndices = Annotated[
    Tensor | None,
    Operand(
        "S extra_topk",
        INT32,
        nonempty="expected extra_topk >= 1 columns; got 0",
        rule=_require_int32_slots,
    ),
]
INDEX_BLOCK = Parameter("index_block", "int", default=lambda _: 1, rule=_require_ids)
SCALE = Parameter("sm_scale", "float")
DETERMINISTIC = Parameter("deterministic", "bool")
OF_BACKWARD = (
    Parameter("deterministic", "bool", passed=False),
    Parameter("backward_backend", "str", passed=False),
)
"""Choices of the backward that autograd runs."""


class SparseMlaOperands(NamedTuple):
    """Operands of `sparse_mla_fwd`: kv has rows of q's dtype, or packed rows of bytes.

    With `ends` the list of kv's rows is a range: `indices` (S, 1) are its starts. `extra_ends` say
    the same of extra_kv's.
    """

    q: Q
    kv: KvOrPacked
    indices: Indices
    topk_length: TopkLength = None
    attn_sink: AttnSink = None
    ends: Ends = None
    extra_kv: ExtraKvOrPacked = None
    extra_indices: ExtraIndices = None
    extra_topk_length: TopkLength = None
    extra_ends: Ends = None

    @property
    def into(self) -> type[SparseMlaOutOperands]:
        """The tuple of the form with buffers."""
        return SparseMlaOutOperands


class SparseMlaOutOperands(NamedTuple):
    """Operands of `sparse_mla_fwd_out`: the forward's, and its outputs."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    ends: Tensor | None = None
    extra_kv: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None
    extra_ends: Tensor | None = None

    @property
    def inputs(self) -> SparseMlaOperands:
        """The operands without the outputs."""
        return SparseMlaOperands(*self[:3], *self[6:])

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """out, lse and, if asked for, max_logits."""
        return tuple(x for x in (self.out, self.lse, self.max_logits) if x is not None)


def _arguments_of_backward(
    x: SparseMlaOperands, kept: Sequence[Tensor], dO: Tensor, parameters: Parameters
) -> tuple[Any, ...]:
    """`mla_bwd`'s; gradients come in the inputs' dtypes."""
    refuse_packed(x.kv)
    out, lse = kept
    q, kv, *lists = x
    scale, deterministic = parameters["sm_scale"], parameters["deterministic"]
    values = scale, deterministic, kv.dtype, parameters["index_block"]
    return q, kv, dO, lse, out, *lists, *values


SPARSE_MLA_FWD = register(
    OpSpec(
        "sparse_mla_fwd",
        SparseMlaOperands,
        cpu="sparse_mla:forward",
        parameters=(
            Parameter("d_v", "int", rule=_require_d_v_at_most_d_qk),
            SCALE,
            *OF_BACKWARD,
            Parameter("max_logits", "bool"),
            INDEX_BLOCK,
            Parameter("batch_invariant", "bool"),
            Parameter("kv_format", "str?", rule=_require_row_format),
        ),
        outputs=(
            Output("out", "S H d_v", ("q",)),
            Output("lse", "S H", (sum_dtype,)),
            Output("max_logits", "S H", (sum_dtype,), when="max_logits"),
        ),
        autocast=("q", "kv", "extra_kv"),
        rule=require_lists,
        normalise=rows_and_slots,
        gradient=Gradient(
            by="mla_bwd",
            of=("q", "kv", "extra_kv", "attn_sink"),
            arguments=_arguments_of_backward,
            keeps=("out", "lse"),
        ),
    )
)
SPARSE_MLA_FWD_OUT = register(
    SPARSE_MLA_FWD.with_buffers(
        "sparse_mla_fwd_out", SparseMlaOutOperands, _require_writable, "sparse_mla:forward_out"
    )
)
_INTO = IntoBuffers(SPARSE_MLA_FWD, SPARSE_MLA_FWD_OUT)


def sparse_mla_fwd(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    indices: Rows,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_max_logits: bool = False,
    extra_kv: Tensor | None = None,
    extra_indices: Rows | None = None,
    extra_topk_length: Tensor | None = None,
    index_block: int = 1,
    batch_invariant: bool = False,
    kv_format: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Attention of every query over the kv rows that `indices` names for it.

    A slot is valid when ``0 <= indices[s, i] < S_kv`` and ``i < topk_length[s]``. Invalid slots
    contribute nothing; duplicates count as often as they occur; a query without a valid slot gets
    ``O = 0`` and ``lse = +inf``.

    Args:
        q: (S, H, d_qk) bf16, fp16, fp32 or fp64; d_qk = 576 in DeepSeek's MLA.
        kv: (S_kv, d_qk) or (S_kv, 1, d_qk), or pages (num_pages, 64, d_qk) or (num_pages,
            page_size, 1, d_qk), q's dtype; V is its first `d_v` columns. Or uint8 or int8 with
            656, 528, 584 or 288 instead of d_qk: packed rows, see `quantize_kv`. Their pages may
            lie apart.
        indices: (S, topk) or (S, 1, topk) int32, or int64 (copied to int32); any values. A
            paged kv takes ``page * page_size + offset``. Or a pair (starts, ends) of (S,): the
            rows from ``starts[s]`` to ``ends[s] - 1`` that kv has.
        d_v: columns of V, at most d_qk.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32 or int64, slots in use of each query; clamped to [0, topk].
        attn_sink: (H,) fp32, a logit that takes weight and gives no value: O is scaled by
            ``exp(lse) / (exp(lse) + exp(sink))``; lse is returned without it.
        out, lse: buffers without gaps for the results, which they become. They share no memory
            with the inputs; with them there is no gradient. One of them may be missing.
        return_max_logits: whether the largest logits are returned, too.
        extra_kv: (S_extra, d_qk) or another form of kv, a second source in the same softmax.
        extra_indices: ids of its rows, or a range, in the forms of `indices`.
        extra_topk_length: (S,), slots in use of `extra_indices`.
        index_block: rows that an id of `indices` names: B from ``B * indices[s, i]`` on. A range
            has no blocks.
        batch_invariant: a query's bits follow from its q, its lists and their rows alone, whatever
            other queries the call has; few queries take longer.
        kv_format: of packed rows, "v32", "v32_no_rope", "v4", "v41", "v41_fp4", the last two also
            with "_interleaved" behind, or a format of your own (`flashdsa.row_formats`); found by
            the bytes of a row, but 528 and 288 bytes need it. A second source with other bytes has
            the format that they tell, with pages of the same kind.
        backend: "auto" or the name of one (`flashdsa info` lists them).

    Returns:
        O (S, H, d_v) in q's dtype, and lse (S, H) in fp32 (fp64 for fp64 inputs), the natural
        logarithm ``log sum_i exp(sm_scale * q . kv_i)``. O is differentiable, lse is not.
        `return_max_logits` adds max_logits (S, H) like lse, ``max_i sm_scale * q . kv_i``, -inf
        for a query without a valid slot; not differentiable.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, rank, shape, device or layout.
        NotImplementedError: no implementation serves the call, or a gradient is asked for where
            buffers are given or kv has packed rows.
    """
    checks.require_bool("return_max_logits", return_max_logits)
    checks.require_bool("batch_invariant", batch_invariant)
    lists = indices, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length
    operands = q, kv, *lists_of(*lists)
    scale = checks.scale_or_default(sm_scale, q)
    choices = index_block, batch_invariant, kv_format
    values = d_v, scale, False, backend, return_max_logits, *choices
    if out is not None or lse is not None:
        buffers = {"out": out, "lse": lse}
        return _INTO.call(operands, values, buffers, backend)
    results: tuple[Tensor, Tensor, Tensor] = call(SPARSE_MLA_FWD, operands, values, backend)
    return results if return_max_logits else results[:2]


def sparse_mla(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    indices: Rows,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    extra_kv: Tensor | None = None,
    extra_indices: Rows | None = None,
    extra_topk_length: Tensor | None = None,
    index_block: int = 1,
    batch_invariant: bool = False,
    kv_format: str | None = None,
    backend: str | tuple[str, str] = "auto",
) -> Tensor:
    """`sparse_mla_fwd`'s O, differentiable in `q`, `kv`, `extra_kv` and `attn_sink`.

    Args:
        q: (S, H, d_qk) bf16, fp16, fp32 or fp64; d_qk = 576 in DeepSeek's MLA.
        kv: as for `sparse_mla_fwd`; packed rows have no gradient, and none may be asked for.
        indices: (S, topk) or (S, 1, topk) int32 or int64, any values, or a pair (starts, ends) of
            (S,); see `sparse_mla_fwd`.
        d_v: columns of V, at most d_qk.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32 or int64, slots in use of each query; clamped to [0, topk].
        attn_sink: (H,) fp32, a logit that takes weight and gives no value.
        deterministic: gradients are bit-identical from run to run; otherwise the last bits of
            kv's gradient may differ (order of fp32 additions).
        extra_kv, extra_indices, extra_topk_length, index_block, batch_invariant, kv_format: see
            `sparse_mla_fwd`; batch_invariant is O's.
        backend: the name of one or "auto", of both directions or, as a pair, of the forward and
            the backward: ``("cpu", "emulate-sm100")``.

    Returns:
        O (S, H, d_v) in q's dtype. Gradients come in the inputs' dtypes; a gradient of a gradient
        is an error.
    """
    lists = indices, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length
    operands = q, kv, *lists_of(*lists)
    forward, backward = _pair(backend)
    choices = index_block, batch_invariant, kv_format
    values = d_v, checks.scale_or_default(sm_scale, q), deterministic, backward, False, *choices
    results: tuple[Tensor, Tensor, Tensor] = call(SPARSE_MLA_FWD, operands, values, forward)
    return results[0]


def _pair(backend: str | tuple[str, str]) -> tuple[str, str]:
    """The backends of the forward and of the backward."""
    if isinstance(backend, str):
        return backend, backend
    if not isinstance(backend, tuple) or [type(one) for one in backend] != [str, str]:
        raise ArgumentTypeError(
            "backend: expected the name of a backend, or the names of two, "
            f"(forward, backward); got {backend!r}"
        )
    return backend
