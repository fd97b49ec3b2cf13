"""Sparse MLA into the caller's buffers."""

from __future__ import annotations

from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands
from flashdsa.ops.argument_rules import sum_dtype
from flashdsa.ops.autograd import refuse_tangents
from flashdsa.ops.checks import (
    require_positive,
    require_shape,
    require_tensor,
    wants_gradient,
)


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
