"""Sparse MLA into the caller's buffers, and launches of it that are prepared for fixed tensors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands
from flashdsa.ops.argument_rules import sum_dtype
from flashdsa.ops.autograd import refuse_tangents
from flashdsa.ops.checks import (
    drop_kv_head,
    kv_rows,
    require_positive,
    require_shape,
    require_tensor,
    scale_or_default,
    wants_gradient,
)
from flashdsa.ops.registration import prepare
from flashdsa.ops.table import SPARSE_MLA_FWD_OUT


def prepare_sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    max_logits: Tensor | None = None,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    backend: str = "auto",
) -> Callable[[], None]:
    """`sparse_mla_fwd` of these very tensors as a function without arguments, for CUDA graphs.

    The function launches on torch's current stream and does nothing else: no check, no
    allocation, no copy. Values may change between its calls, addresses may not. Calls of one such
    function must follow each other, as those of one stream do: they share a workspace.

    Args:
        q, kv, indices, sm_scale, topk_length, attn_sink, backend: as for `sparse_mla_fwd`, but
            int32 slots only, and every tensor without gaps.
        out: (S, H, d_v) in q's dtype, written. lse: (S, H) fp32 (fp64 for fp64 inputs), written.
        max_logits: like lse, written; None: not asked for.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, rank, shape, device or layout.
        NotImplementedError: no implementation serves the call, or a gradient is asked for.
    """
    operands = SparseMlaOutOperands(q, kv, indices, out, lse, max_logits, topk_length, attn_sink)
    SPARSE_MLA_FWD_OUT.require_tensors(operands)
    refuse_gradients(operands.inputs)
    SPARSE_MLA_FWD_OUT.require_apart(operands)
    for name, tensor in operands._asdict().items():
        if tensor is not None:
            _require_usable_as_is(name, tensor)
    operands = operands._replace(
        kv=kv_rows("kv", kv),
        indices=drop_kv_head("indices", indices, "[S, topk] or [S, 1, topk]"),
    )
    return prepare(SPARSE_MLA_FWD_OUT, operands, backend, sm_scale=scale_or_default(sm_scale, q))


def buffers_for(
    x: SparseMlaOperands,
    d_v: int,
    out: Tensor | None,
    lse: Tensor | None,
    max_logits: bool,
) -> SparseMlaOutOperands:
    """The operands with the caller's buffers, and with new ones for what is missing."""
    require_positive("d_v", d_v)
    rows, sums = x.q.shape[:2], sum_dtype(x.q.dtype)
    if out is None:
        out = x.q.new_empty((*rows, d_v))
    else:
        require_tensor("out", out)
        require_shape("out", out, (*rows, d_v), "[S, H, d_v]")
    if lse is None:
        lse = x.q.new_empty(rows, dtype=sums)
    largest = x.q.new_empty(rows, dtype=sums) if max_logits else None
    return SparseMlaOutOperands(x.q, x.kv, x.indices, out, lse, largest, x.topk_length, x.attn_sink)


def refuse_gradients(x: SparseMlaOperands) -> None:
    """Raise UnsupportedError where autograd would record the call, or wants a tangent."""
    refuse_tangents("sparse_mla_fwd", x)
    if wants_gradient(x):
        raise UnsupportedError(
            "sparse_mla_fwd: results in the caller's buffers have no gradient; leave out and lse "
            "away, or call under torch.no_grad()"
        )


def _require_usable_as_is(name: str, tensor: Tensor) -> None:
    """A prepared launch copies nothing."""
    aligned = name not in ("q", "kv") or tensor.data_ptr() % BULK_ALIGNMENT == 0
    if not tensor.is_contiguous() or not aligned:
        raise ArgumentValueError(
            f"{name}: expected a tensor without gaps, of q and kv at a multiple of "
            f"{BULK_ALIGNMENT} bytes, since a prepared launch copies nothing; got strides "
            f"{list(tensor.stride())} at {tensor.data_ptr():#x}"
        )
