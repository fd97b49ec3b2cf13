"""Backward of sparse MLA: autograd runs it, and it may be called alone."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch.buffers import Total, require_totals
from flashdsa.dispatch.checks import require_dtype_or_none, scale_or_default
from flashdsa.dispatch.dtypes import require_sums_or_same, same_dtype, sum_dtype, sum_dtypes
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Operand, Output, Parameter, Sizes
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentValueError
from flashdsa.ops import attention

__all__ = ["mla_bwd"]


def _rows_with_gradient(operands: Any) -> Any:
    """`rows_and_slots`, of rows that are not packed."""
    normalised = attention.rows_and_slots(operands)
    attention.refuse_packed(normalised.kv)
    return normalised


def _require_columns_of_v(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """dO has d_v columns, of the d_qk that kv has."""
    if not 1 <= sizes["d_v"] <= sizes["d_qk"]:
        raise ArgumentValueError(
            f"{name}: expected a last dimension d_v in [1, {sizes['d_qk']}] (q's last dimension); "
            f"got {tensor.shape[2]}"
        )


def _require_dkv_dtype(name: str, value: torch.dtype | None, operands: MlaBwdOperands) -> None:
    """dKV in the precision of its sums; of bf16 inputs in bf16 too."""
    require_sums_or_same(name, value, operands.q.dtype)


Lse = Annotated[Tensor, Operand("S H", sum_dtypes)]
_DO = Operand("S H d_v", same_dtype, rule=_require_columns_of_v)
_O = Operand("S H d_v", same_dtype, why=" (d_v is dO's; one of the two is wrong)")


class MlaBwdOperands(NamedTuple):
    """Operands of `mla_bwd`: the forward's, the gradient of its O, its lse and O."""

    q: attention.Q
    kv: attention.Kv
    dO: Annotated[Tensor, _DO]
    lse: Lse
    O: Annotated[Tensor, _O]
    indices: attention.Indices
    topk_length: attention.TopkLength = None
    attn_sink: attention.AttnSink = None
    ends: attention.Ends = None
    extra_kv: attention.ExtraKv = None
    extra_indices: attention.ExtraIndices = None
    extra_topk_length: attention.TopkLength = None
    extra_ends: attention.Ends = None


MLA_BWD = register(
    OpSpec(
        "mla_bwd",
        MlaBwdOperands,
        cpu="sparse_mla:backward",
        parameters=(
            attention.SCALE,
            attention.DETERMINISTIC,
            Parameter(
                "dkv_dtype",
                "ScalarType?",
                default=lambda q: sum_dtype(q.dtype),
                rule=_require_dkv_dtype,
            ),
            attention.INDEX_BLOCK,
        ),
        outputs=(
            Output("dQ", "S H d_qk", ("q",)),
            Output("dKV", "S_kv d_qk", ("dkv_dtype", sum_dtype)),
            Output("dextra_kv", "S_extra d_qk", ("dkv_dtype", sum_dtype), when="extra_kv"),
            Output("d_sink", "H", ("attn_sink", sum_dtype), when="attn_sink"),
        ),
        rule=attention.require_lists,
        normalise=_rows_with_gradient,
        backward_of="sparse_mla",
    )
)


def mla_bwd(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: attention.Rows,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: attention.Rows | None = None,
    extra_topk_length: Tensor | None = None,
    index_block: int = 1,
    dkv: Tensor | None = None,
    extra_dkv: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Gradients of sparse MLA from the forward's results.

    ``P = exp(s - lse')``, ``lse' = logaddexp(lse, attn_sink)``, ``delta = sum_d O dO``,
    ``dS = P (dP - delta) sm_scale``, ``dQ = dS K``, ``dKV = dS^T Q + [P^T dO, 0]``,
    ``d_sink = -sum_s exp(sink - lse') delta``.

    Args:
        q, kv, indices, sm_scale, topk_length, attn_sink, backend: as for `sparse_mla_fwd`; kv in
            q's dtype.
        extra_kv, extra_indices, extra_topk_length, index_block: as for `sparse_mla_fwd`.
        dO: (S, H, d_v) in q's dtype, the gradient of O.
        lse: (S, H) fp32 (fp64 for fp64 inputs), as the forward returned it (natural logarithm).
        O: (S, H, d_v) in q's dtype, as the forward returned it (scaled by the sink, if any).
        deterministic: dKV is bit-identical from run to run. On Hopper it costs some 30 % more time
            in the mean of drawn calls, up to 62 % in 95 of 100, and 2.3 times the time where short
            lists name few of many rows; 2 GiB of workspace at most in place of 1. On Blackwell it
            takes 128 heads only and costs some 40 % (predicted) and a workspace: 2304 bytes for
            each slot of as many queries as fit 1 GiB, and of one query at least; so does Triton's.
        dkv_dtype: dtype of dKV and dextra_kv: None or fp32, or q's; fp64 for fp64 inputs.
        dkv, extra_dkv: tensors like dKV and dextra_kv, to which these are added and which are
            returned in their place: of rows that several layers read. They may be one tensor.

    Returns:
        dQ (S, H, d_qk) in q's dtype, dKV in kv's shape, then, if there is an extra_kv, dextra_kv in
        its shape, and, if there is a sink, d_sink (H,). Rows of dKV and of dextra_kv that no valid
        slot of their source names are exactly 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `sparse_mla_fwd`.
    """
    lists = indices, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length
    operands = MlaBwdOperands(q, kv, dO, lse, O, *attention.lists_of(*lists))
    values = scale_or_default(sm_scale, q), deterministic, dkv_dtype, index_block
    if extra_dkv is not None and extra_kv is None:
        raise ArgumentValueError("extra_dkv: expected extra_kv beside it; got None")
    sources = {"dkv": (kv, dkv)} | (
        {} if extra_kv is None else {"extra_dkv": (extra_kv, extra_dkv)}
    )
    if dkv is not None or extra_dkv is not None:
        MLA_BWD.require_tensors(operands)
        require_dtype_or_none("dkv_dtype", dkv_dtype)
        totals = [
            Total(name, total, of.shape, f"that of {name.replace('dkv', 'kv')}")
            for name, (of, total) in sources.items()
            if total is not None
        ]
        require_totals(totals, dkv_dtype or sum_dtype(q.dtype), MLA_BWD, operands)
    dq, *of_sources, d_sink = call(MLA_BWD, operands, values, backend)
    gradients = [
        gradient.view(of.shape) if total is None else total.add_(gradient.detach().view(of.shape))
        for gradient, (of, total) in zip(of_sources, sources.values(), strict=False)
    ]
    return dq, *gradients, *(() if attn_sink is None else (d_sink,))
