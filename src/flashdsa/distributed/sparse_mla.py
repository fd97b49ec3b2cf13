"""Sparse MLA whose queries and keys are spread over the ranks of a group."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.backends.catalog import registry
from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.checks import as_int32, require_tensor, scale_or_default
from flashdsa.dispatch.dtypes import sum_dtype
from flashdsa.dispatch.transforms import as_autocast_casts
from flashdsa.distributed.agree import agreed, agreement
from flashdsa.distributed.collectives import all_gather, reduce_scatter, reduce_scatter_in_order
from flashdsa.distributed.dtensors import as_dtensor, local_parts
from flashdsa.distributed.group import (
    Group,
    describe,
    group_of,
    process_group,
    require_device_of_group,
)
from flashdsa.distributed.latents import GatheredLatents
from flashdsa.distributed.layout import SequenceLayout, require_layout
from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from flashdsa.ops.attention import SPARSE_MLA_FWD, SparseMlaOperands, sparse_mla, sparse_mla_fwd
from flashdsa.ops.attention_backward import mla_bwd
from flashdsa.problem import D_V

GradWire = Literal["fp32", "bf16"]
IndexKind = Literal["rows", "positions"]


class AttentionOptions(TypedDict, total=False):
    """The keywords of `flashdsa.sparse_mla`; `attn_sink` is the same tensor on every rank."""

    d_v: int
    sm_scale: float | None
    topk_length: Tensor | None
    attn_sink: Tensor | None
    deterministic: bool
    backend: str


def context_parallel_sparse_mla(
    q_local: Tensor,
    kv_local: Tensor,
    indices: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    layout: SequenceLayout | None = None,
    ids: IndexKind = "rows",
    grad_wire: GradWire = "fp32",
    save_gathered: bool = False,
    kv_gathered: GatheredLatents | None = None,
    **attention: Unpack[AttentionOptions],
) -> Tensor:
    """`flashdsa.sparse_mla` of this rank's queries over the keys of all ranks.

    The kv shards are gathered, forward and backward; O and dQ have the bits of one process that
    holds everything, in any layout, with kernels that take a query's rows in the order of its
    slots. kv's gradient is the sum over ranks: each rank's share in fp32 (fp64 for fp64), sent as
    `grad_wire` says, added in fp32, rounded once.

    Args:
        q_local: (S, H, d_qk) bf16, fp16, fp32 or fp64; S may differ between ranks and be 0.
        kv_local: (S_local, d_qk) or (S_local, 1, d_qk), as many rows on every rank.
        indices: (S, topk) int32 or int64, keys of each query; see `ids`.
        mesh: a 1-D DeviceMesh (of a larger one `mesh["cp"]`) or a ProcessGroup.
        layout: needed for `ids="positions"`; then `kv_local` has `layout.num_local` rows.
        ids: "rows" of the gathered kv, as `context_parallel_topk_indexer` gives them, or
            "positions": tokens of the sequence.
        grad_wire: "fp32", or "bf16" (of bf16 inputs) for half of the bytes: shares are rounded to
            bf16, sent, and added in fp32 in the order of ranks.
        save_gathered: keep the gathered rows for the backward instead of gathering them again.
        kv_gathered: of `gather_latents(kv_local, mesh, async_op=True)`, to overlap by hand.
        attention: `d_v`, `sm_scale`, `topk_length`, `attn_sink`, `deterministic`, `backend` as for
            `flashdsa.sparse_mla`. `deterministic` adds the shares in the order of ranks,
            whatever the collective library does: the same bits for the same layout and number of
            ranks. The gradient of `attn_sink` is of this rank's queries, as that of any weight.

    Returns:
        O (S, H, d_v) in q's dtype, or autocast's. q, kv and indices may be DTensors, `Shard(0)` on
        `mesh`; then O is one too.

    Raises:
        TypeError, ValueError: a wrong argument here or on another rank, or ranks that differ in
            shapes, dtypes or options; on every rank, before anything is sent.
        NotImplementedError: no implementation serves the call.
    """
    group = group_of(mesh, "context_parallel_sparse_mla")
    arguments = {"q_local": q_local, "kv_local": kv_local, "indices": indices}
    if torch.compiler.is_compiling():
        options = _Options(**attention)
        (q, kv, slots), spread = local_parts(mesh, arguments)
        x = _operands(q, kv, slots, layout, ids, options)
    else:
        with agreement(group, kv_local, q="q_local", kv="kv_local") as facts:
            options = _options(attention)
            (q, kv, slots), spread = local_parts(mesh, arguments)
            x = _operands(q, kv, slots, layout, ids, options)
            _check(x, options, grad_wire, process_group(mesh), layout)
            _check_gathered(kv_gathered, x.kv, kv.dtype)
            refuse_tangents("context_parallel_sparse_mla", (q_local, kv_local, options.attn_sink))
            facts |= _facts(x, options, layout, ids)
            facts |= {"grad_wire": grad_wire, "save_gathered": str(bool(save_gathered))}
            facts["kv_gathered"] = "none" if kv_gathered is None else "given"
    scale = scale_or_default(options.sm_scale, x.q)
    options = options._replace(sm_scale=scale, topk_length=x.topk_length)
    if group.size == 1:
        out = sparse_mla(x.q, x.kv, x.indices, **options._asdict())
    else:
        options = options._replace(topk_length=None, attn_sink=None)
        call = _Call(group, options, grad_wire, save_gathered)
        gathered = None if kv_gathered is None else as_autocast_casts(kv_gathered.wait())
        apply: Any = _ContextParallelSparseMla.apply
        out = apply(x.q, x.kv, x.indices, x.topk_length, x.attn_sink, gathered, call)
    return as_dtensor(out, spread)


class _Options(NamedTuple):
    """`AttentionOptions` with its defaults."""

    d_v: int = D_V
    sm_scale: float | None = None
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    deterministic: bool = False
    backend: str = "auto"


class _Call(NamedTuple):
    """Arguments of a call besides its tensors; `options` have a scale, and no tensors."""

    group: Group
    options: _Options
    grad_wire: GradWire
    save_gathered: bool

    @property
    def text(self) -> str:
        x = self.options
        return (
            f"d_v={x.d_v} sm_scale={x.sm_scale} deterministic={x.deterministic} "
            f"grad_wire={self.grad_wire} save_gathered={self.save_gathered} backend={x.backend}"
        )


def _options(attention: AttentionOptions) -> _Options:
    unknown = [name for name in attention if name not in _Options._fields]
    if unknown:
        raise ArgumentTypeError(
            f"{unknown[0]}: no keyword of context_parallel_sparse_mla; expected some of "
            f"{', '.join(_Options._fields)}"
        )
    options = _Options(**attention)
    for name in ("topk_length", "attn_sink"):
        value = getattr(options, name)
        if value is not None:
            require_tensor(name, value)
    return options


def _operands(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    layout: SequenceLayout | None,
    ids: IndexKind,
    options: _Options,
) -> SparseMlaOperands:
    """kv (S_local, d_qk), and indices (S, topk) int32 that name rows of the gathered kv."""
    for name, value in (("q_local", q), ("kv_local", kv), ("indices", indices)):
        require_tensor(name, value)
    if layout is not None:
        require_layout(layout)
    if ids not in ("rows", "positions"):
        raise ArgumentValueError(f'ids: expected "rows" or "positions"; got {ids!r}')
    if kv.dim() == 3 and kv.shape[1] == 1:
        kv = kv.squeeze(1)
    if indices.dim() == 3 and indices.shape[1] == 1:
        indices = indices.squeeze(1)
    if ids == "positions":
        if layout is None:
            raise ArgumentValueError('ids: "positions" needs a layout; got layout=None')
        if indices.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"indices: expected int32 or int64; got {indices.dtype}")
        indices = layout.key_row(indices)
    length = options.topk_length
    return SparseMlaOperands(
        as_autocast_casts(q),
        as_autocast_casts(kv),
        as_int32(indices, -1),
        None if length is None else as_int32(length, 0),
        options.attn_sink,
    )


def _check(
    x: SparseMlaOperands,
    options: _Options,
    grad_wire: GradWire,
    group: dist.ProcessGroup,
    layout: SequenceLayout | None,
) -> None:
    """Everything that can be wrong with this rank's arguments."""
    SPARSE_MLA_FWD.require_tensors(x)
    given = {name: getattr(options, name) for name in ("d_v", "sm_scale", "deterministic")}
    parameters = SPARSE_MLA_FWD.filled(x, {**given, "backward_backend": options.backend})
    sizes = SPARSE_MLA_FWD.check(x, parameters)
    require_device_of_group("kv_local", x.kv.device, group)
    registry.select(SPARSE_MLA_FWD.problem(x, parameters, sizes), options.backend)
    if grad_wire not in ("fp32", "bf16"):
        raise ArgumentValueError(f'grad_wire: expected "fp32" or "bf16"; got {grad_wire!r}')
    if grad_wire == "bf16" and x.kv.dtype != torch.bfloat16:
        raise ArgumentTypeError(
            f'grad_wire: "bf16" is for bfloat16 inputs; kv_local is {describe(x.kv)}'
        )
    if layout is None:
        return
    layout.require_place(group)
    if x.kv.shape[0] != layout.num_local:
        raise ArgumentValueError(
            f"kv_local: expected {layout.num_local} rows, as the layout says; got {x.kv.shape[0]}"
        )


def _check_gathered(gathered: object, kv: Tensor, dtype: torch.dtype) -> None:
    """Require what `gather_latents` returned for these rows, or None."""
    if gathered is None:
        return
    if not isinstance(gathered, GatheredLatents):
        raise ArgumentTypeError(
            "kv_gathered: expected what gather_latents(..., async_op=True) returned; "
            f"got {type(gathered).__name__}"
        )
    gathered.require_rows_of(kv, dtype)


def _facts(
    x: SparseMlaOperands, options: _Options, layout: SequenceLayout | None, ids: str
) -> dict[str, str]:
    """Return what must be the same on all ranks; the number of queries may differ."""
    facts = {
        "kv_local": describe(x.kv),
        "q_local": describe(x.q, of_each_row=True),
        "indices": describe(x.indices, of_each_row=True),
        "layout": "none" if layout is None else layout.summary,
        "ids": ids,
        "attn_sink": describe(x.attn_sink),
        "topk_length": "none" if x.topk_length is None else "given",
    }
    for name in ("d_v", "sm_scale", "deterministic", "backend"):
        facts[name] = str(getattr(options, name))
    if torch.is_grad_enabled():
        wanted = {"q_local": x.q, "kv_local": x.kv, "attn_sink": x.attn_sink}
        facts["gradients"] = ", ".join(
            name for name, one in wanted.items() if one is not None and one.requires_grad
        )
    return facts


class _ContextParallelSparseMla(torch.autograd.Function):
    """Gather kv, attend; backward: gather again, go back, add dKV over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        topk_length: Tensor | None,
        attn_sink: Tensor | None,
        gathered: Tensor | None,
        call: _Call,
    ) -> Tensor:
        if gathered is None:
            others = {"q_local": q, "indices": indices}
            gathered = all_gather(agreed(kv, others, "kv_local", call.text, call.group), call.group)
        out, lse = sparse_mla_fwd(
            q,
            gathered,
            indices,
            d_v=call.options.d_v,
            sm_scale=call.options.sm_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            backend=call.options.backend,
        )
        saved = gathered if call.save_gathered else kv
        ctx.save_for_backward(q, saved, indices, topk_length, attn_sink, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        call: _Call = ctx.call
        q, kv, indices, topk_length, attn_sink, out, lse = ctx.saved_tensors
        gathered = kv if call.save_gathered else all_gather(kv, call.group)
        dq, dkv, *d_sink = mla_bwd(
            q,
            gathered,
            d_out.contiguous(),
            lse,
            out,
            indices,
            sm_scale=call.options.sm_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            deterministic=call.options.deterministic,
            backend=call.options.backend,
        )
        dkv_local = _sum_over_ranks(dkv, kv.dtype, call) if ctx.needs_input_grad[1] else None
        sink = d_sink[0] if d_sink and ctx.needs_input_grad[4] else None
        return dq, dkv_local, None, None, sink, None, None


def _sum_over_ranks(dkv: Tensor, dtype: torch.dtype, call: _Call) -> Tensor:
    """dkv [ranks * S_local, d_qk] in fp32 or fp64 -> this rank's rows of the sum, in `dtype`."""
    sums = sum_dtype(dtype)
    if call.grad_wire == "bf16":
        return reduce_scatter_in_order(dkv.to(torch.bfloat16), call.group, sums).to(dtype)
    if call.options.deterministic:
        return reduce_scatter_in_order(dkv, call.group, sums).to(dtype)
    return reduce_scatter(dkv, call.group).to(dtype)
