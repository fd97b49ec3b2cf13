"""Sparse MLA: the forward, its differentiable form, the backward, and conventions of lse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdsa.api.attention_buffers import buffers_for, refuse_gradients
from flashdsa.errors import ArgumentTypeError
from flashdsa.operands import SparseMlaOperands
from flashdsa.ops.checks import require_bool, require_tensor, scale_or_default
from flashdsa.ops.registration import call
from flashdsa.ops.table import MLA_BWD, SPARSE_MLA_FWD, SPARSE_MLA_FWD_OUT
from flashdsa.problem import D_V


def sparse_mla_fwd(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_max_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Attention of every query over the kv rows that `indices` names for it.

    A slot is valid when ``0 <= indices[s, i] < S_kv`` and ``i < topk_length[s]``. Invalid slots
    contribute nothing; duplicates count as often as they occur; a query without a valid slot gets
    ``O = 0`` and ``lse = +inf``.

    Args:
        q: (S, H, d_qk) bf16, fp32 or fp64, on the CPU fp16 too; d_qk = 576 in DeepSeek's MLA.
        kv: (S_kv, d_qk) or (S_kv, 1, d_qk), or pages (num_pages, 64, d_qk) or (num_pages,
            page_size, 1, d_qk), q's dtype; V is its first `d_v` columns. Or uint8 or int8 with
            656 instead of d_qk = 576: packed rows, see `quantize_kv`.
        indices: (S, topk) or (S, 1, topk) int32, or int64 (copied to int32); any values. A
            paged kv takes ``page * page_size + offset``.
        d_v: columns of V, at most d_qk.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32 or int64, slots in use of each query; clamped to [0, topk].
        attn_sink: (H,) fp32, a logit that takes weight and gives no value: O is scaled by
            ``exp(lse) / (exp(lse) + exp(sink))``; lse is returned without it.
        out, lse: buffers without gaps for the results, which they become. They share no memory
            with the inputs; with them there is no gradient. One of them may be missing.
        return_max_logits: whether the largest logits are returned, too.
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
    operands = q, kv, indices, topk_length, attn_sink
    scale = scale_or_default(sm_scale, q)
    require_bool("return_max_logits", return_max_logits)
    if out is not None or lse is not None:
        inputs = SPARSE_MLA_FWD.normalised(SparseMlaOperands(*operands))
        buffers = buffers_for(inputs, d_v, out, lse, return_max_logits)
        refuse_gradients(inputs)
        call(SPARSE_MLA_FWD_OUT, buffers, (scale,), backend)
        return buffers.outputs
    values = d_v, scale, False, backend, return_max_logits
    results: tuple[Tensor, Tensor, Tensor] = call(SPARSE_MLA_FWD, operands, values, backend)
    return results if return_max_logits else results[:2]


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, str] = "auto",
) -> Tensor:
    """`sparse_mla_fwd`'s O, differentiable in `q`, `kv` and `attn_sink` (not in `indices`).

    Args:
        q: (S, H, d_qk) bf16, fp16, fp32 or fp64; d_qk = 576 in DeepSeek's MLA.
        kv: as for `sparse_mla_fwd`; packed rows have no gradient, and none may be asked for.
        indices: (S, topk) or (S, 1, topk) int32 or int64, any values; see `sparse_mla_fwd`.
        d_v: columns of V, at most d_qk.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32 or int64, slots in use of each query; clamped to [0, topk].
        attn_sink: (H,) fp32, a logit that takes weight and gives no value.
        deterministic: gradients are bit-identical from run to run; otherwise the last bits of
            kv's gradient may differ (order of fp32 additions).
        backend: the name of one or "auto", of both directions or, as a pair, of the forward and
            the backward: ``("cpu", "emulate-sm100")``.

    Returns:
        O (S, H, d_v) in q's dtype. Gradients come in the inputs' dtypes; a gradient of a gradient
        is an error.
    """
    operands = q, kv, indices, topk_length, attn_sink
    forward, backward = _pair(backend)
    values = d_v, scale_or_default(sm_scale, q), deterministic, backward, False
    results: tuple[Tensor, Tensor, Tensor] = call(SPARSE_MLA_FWD, operands, values, forward)
    return results[0]


def mla_bwd(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Gradients of sparse MLA from the forward's results.

    ``P = exp(s - lse')``, ``lse' = logaddexp(lse, attn_sink)``, ``delta = sum_d O dO``,
    ``dS = P (dP - delta) sm_scale``, ``dQ = dS K``, ``dKV = dS^T Q + [P^T dO, 0]``,
    ``d_sink = -sum_s exp(sink - lse') delta``.

    Args:
        q, kv, indices, sm_scale, topk_length, attn_sink, backend: as for `sparse_mla_fwd`; kv in
            q's dtype.
        dO: (S, H, d_v) in q's dtype, the gradient of O.
        lse: (S, H) fp32 (fp64 for fp64 inputs), as the forward returned it (natural logarithm).
        O: (S, H, d_v) in q's dtype, as the forward returned it (scaled by the sink, if any).
        deterministic: dKV is bit-identical from run to run. On Hopper it costs 6 to 10 % more time
            with 64 heads and more where queries have much in common, else 12 to 24 %, hardly any
            beyond 65,536 rows of kv, and with fewer heads up to 33 %; with topk of 512 and less
            up to twice the time; 2 GiB of workspace at most in
            place of 1, and up to three fp32 dKVs in place of one, of 1 GiB together. On Blackwell
            it costs some 40 % (predicted) and a workspace: 2304 bytes for each slot of as many
            queries as fit 1 GiB, and of one query at least.
        dkv_dtype: dtype of dKV: None or fp32, or q's; fp64 for fp64 inputs.

    Returns:
        dQ (S, H, d_qk) in q's dtype, dKV in kv's shape, and where there is a sink d_sink (H,).
        Rows of dKV that no valid slot names are exactly 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `sparse_mla_fwd`.
    """
    operands = q, kv, dO, lse, O, indices, topk_length, attn_sink
    values = scale_or_default(sm_scale, q), deterministic, dkv_dtype
    dq, dkv, d_sink = call(MLA_BWD, operands, values, backend)
    dkv = dkv.view(kv.shape)
    return (dq, dkv) if attn_sink is None else (dq, dkv, d_sink)


def lse_to_base2(lse: Tensor) -> Tensor:
    """A natural-logarithm lse in base 2 (FlashInfer's and TileLang's convention)."""
    require_tensor("lse", lse)
    return lse / math.log(2)


def lse_from_base2(lse: Tensor) -> Tensor:
    """A base-2 lse as the natural logarithm that flashdsa takes."""
    require_tensor("lse", lse)
    return lse * math.log(2)


def lse_for_merge(lse: Tensor) -> Tensor:
    """lse with -inf, the logarithm of 0, for queries without a valid slot, which have +inf.

    Partial attentions over disjoint rows merge by ``logaddexp`` of these: a +inf would give NaN.
    """
    require_tensor("lse", lse)
    return torch.where(torch.isposinf(lse), -math.inf, lse)


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
