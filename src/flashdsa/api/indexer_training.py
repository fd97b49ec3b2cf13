"""Training the indexer: the attention's target, differentiable scores, and the KL between them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.ops.checks import (
    require_dtype,
    require_shape,
    require_tensor,
    scale_or_default,
)
from flashdsa.ops.registration import call
from flashdsa.ops.table import (
    ATTENTION_TARGET,
    INDEXER_BWD,
    INDEXER_KL,
    INDEXER_KL_BWD,
    INDEXER_SCORES,
)


def attention_target(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    accumulate_into: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the attention's weights: ``P[s, i] = sum_h exp(sm_scale * q . kv_i - lse')``.

    ``lse' = logaddexp(lse, attn_sink)``, so heads that look elsewhere weigh less. It is not
    normalised: sums over the ranks of tensor parallelism and over layers that share an indexer are
    sums of these. No gradient flows through it.

    Args:
        q: (S, H, d_qk) bf16, fp32 or fp64, on the CPU fp16 too.
        kv: (S_kv, d_qk) or (S_kv, 1, d_qk), q's dtype.
        lse: (S, H) fp32 (fp64 for fp64 inputs), natural logarithm without the sink, as
            `sparse_mla_fwd` returns it. A head with lse = +inf adds 0.
        indices: (S, topk) or (S, 1, topk) int32 or int64, any values; see `sparse_mla_fwd`.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32 or int64, slots in use of each query.
        attn_sink: (H,) fp32.
        accumulate_into: (S, topk), the result's dtype: P is added to it, and it is returned.
        backend: "auto" or the name of one.

    Returns:
        P (S, topk) fp32 (fp64 for fp64 inputs), 0 where a slot is invalid.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `sparse_mla_fwd`.
    """
    operands = q, kv, lse, indices, topk_length, attn_sink
    scale = scale_or_default(sm_scale, q)
    target: Tensor = call(ATTENTION_TARGET, operands, (scale,), backend)
    if accumulate_into is None:
        return target
    require_tensor("accumulate_into", accumulate_into)
    require_dtype("accumulate_into", accumulate_into, target.dtype)
    require_shape("accumulate_into", accumulate_into, target.shape, "[S, topk]")
    with torch.no_grad():
        return accumulate_into.add_(target)


def indexer_scores(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    topk_length: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The indexer's scores at given slots: ``I[s, i] = sum_h weights[s, h] relu(q_index . k_i)``.

    Differentiable in `q_index`, `k_index` and `weights`; the relu has gradient 0 at 0.

    Args:
        q_index: (S, H, 128) bf16, fp32 or fp64, on the CPU fp16 too; any H on the CPU.
        k_index: (S_kv, 128), q_index's dtype.
        weights: (S, H) fp32 or q_index's dtype (fp64 for fp64 inputs); may be negative.
        indices: (S, topk) or (S, 1, topk) int32 or int64, any values; see `sparse_mla_fwd`.
        topk_length: (S,) int32 or int64, slots in use of each query.
        deterministic: the gradient of k_index is bit-identical from run to run.
        backend: "auto" or the name of one, of both directions.

    Returns:
        I (S, topk) fp32 (fp64 for fp64 inputs), -inf where a slot is invalid.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, rank, shape, device or layout.
        NotImplementedError: no implementation serves the call.
    """
    operands = q_index, k_index, weights, indices, topk_length
    scores: Tensor = call(INDEXER_SCORES, operands, (deterministic, backend), backend)
    return scores


def indexer_bwd(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    grad_scores: Tensor,
    *,
    topk_length: Tensor | None = None,
    deterministic: bool = False,
    dk_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `indexer_scores` from any gradient of the scores.

    ``z = q_index . k_index``, ``A = grad_scores weights [z > 0]``, ``dq_index = A K``,
    ``dk_index = A^T Q`` over every slot that names the key, ``d_weights = sum_i grad_scores
    relu(z)``.

    Args:
        q_index, k_index, weights, indices, topk_length, backend: as for `indexer_scores`.
        grad_scores: (S, topk) fp32 (fp64 for fp64 inputs); what invalid slots hold is not used.
        deterministic: dk_index is bit-identical from run to run.
        dk_dtype: of dk_index: None or fp32, or k_index's; fp64 for fp64 inputs.

    Returns:
        dq_index (S, H, 128) in q_index's dtype, dk_index (S_kv, 128), and d_weights (S, H) in
        weights' dtype, summed in fp32.
    """
    operands = q_index, k_index, weights, indices, grad_scores, topk_length
    gradients: tuple[Tensor, Tensor, Tensor] = call(
        INDEXER_BWD, operands, (deterministic, dk_dtype), backend
    )
    return gradients


def indexer_kl(scores: Tensor, target: Tensor, *, backend: str = "auto") -> Tensor:
    """``KL(target / sum(target) || softmax(scores))`` of each row, differentiable in `scores`.

    Args:
        scores: (S, topk) fp32 or fp64. A slot with -inf is invalid, and its target counts as 0.
        target: (S, topk), scores' dtype, >= 0, of any positive sum.
        backend: "auto" or the name of one, of both directions.

    Returns:
        KL (S,) in scores' dtype: 0, with gradient 0, for a row without a valid slot and for one
        whose target is 0. Mean, sum, masks and weights are the caller's.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `indexer_scores`.
    """
    kl: Tensor = call(INDEXER_KL, (scores, target), (backend,), backend)
    return kl


def indexer_kl_bwd(
    scores: Tensor, target: Tensor, grad_kl: Tensor, *, backend: str = "auto"
) -> Tensor:
    """The gradient of `indexer_kl`: ``grad_kl * (softmax(scores) - target / sum(target))``.

    Args:
        scores, target, backend: as for `indexer_kl`.
        grad_kl: (S,) in scores' dtype.

    Returns:
        d_scores (S, topk) in scores' dtype, 0 where a slot is invalid.
    """
    d_scores: Tensor = call(INDEXER_KL_BWD, (scores, target, grad_kl), (), backend)
    return d_scores


def indexer_kl_loss(  # noqa: PLR0913 - what it composes has these arguments
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    q: Tensor | None = None,
    kv: Tensor | None = None,
    lse: Tensor | None = None,
    target: Tensor | None = None,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The sparse stage's loss of each query: KL of the attention over the selected keys to the
    softmax of the indexer's scores there (DeepSeek-V3.2, section 2.1).

    `indexer_kl(indexer_scores(...), target)`, where the target is given or is
    `attention_target(q, kv, lse, indices)`. No gradient flows to q, kv, lse or the target.

    Args:
        q_index, k_index, weights, indices, topk_length, deterministic: as for `indexer_scores`.
        q, kv, lse, sm_scale, attn_sink: as for `attention_target`; without a `target` only.
        target: (S, topk), instead of q, kv and lse: all-reduced over ranks, or summed over layers.
        backend: "auto" or the name of one.

    Returns:
        KL (S,) fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: neither or both of `target` and (q, kv, lse); else as for `indexer_scores`.
    """
    given = [name for name, value in (("q", q), ("kv", kv), ("lse", lse)) if value is not None]
    if target is not None and given:
        raise ArgumentValueError(
            f"target: expected either it or q, kv and lse; got it and {', '.join(given)}"
        )
    if target is None:
        if q is None or kv is None or lse is None:
            got = ", ".join(given) or "none of them"
            raise ArgumentValueError(f"target: expected it, or q, kv and lse; got {got}")
        target = attention_target(
            q,
            kv,
            lse,
            indices,
            sm_scale=sm_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            backend=backend,
        )
    scores = indexer_scores(
        q_index,
        k_index,
        weights,
        indices,
        topk_length=topk_length,
        deterministic=deterministic,
        backend=backend,
    )
    return indexer_kl(scores, target, backend=backend)
