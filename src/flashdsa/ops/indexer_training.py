"""Training the indexer: the attention's target, and scores that are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch import dtypes
from flashdsa.dispatch.buffers import Total, require_totals
from flashdsa.dispatch.checks import int32_slots, require_positive, scale_or_default
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Gradient, Operand, Output, Parameter, Parameters, fold_batch
from flashdsa.dispatch.spec import OpSpec
from flashdsa.ops import attention
from flashdsa.ops.attention_backward import Lse
from flashdsa.ops.blocks import expand_blocks
from flashdsa.problem import INDEX_HEAD_DIM

__all__ = ["attention_target", "indexer_bwd", "indexer_scores"]


def _require_dk_dtype(name: str, value: torch.dtype | None, operands: IndexerBwdOperands) -> None:
    """dk_index in the precision of its sums, or in k_index's dtype."""
    dtypes.require_sums_or_same(name, value, operands.k_index.dtype)


QIndex = Annotated[
    Tensor,
    Operand(
        f"S H {INDEX_HEAD_DIM}",
        dtypes.ATTENTION_DTYPES,
        batched=fold_batch("q_index", "k_index", attention.VALID_INDICES),
        nonempty="expected shape [S, H, 128] with H >= 1; got H = 0",
    ),
]
KIndex = Annotated[Tensor, Operand(f"S_kv {INDEX_HEAD_DIM}", dtypes.same_dtype)]
Weights = Annotated[Tensor, Operand("S H", dtypes.sums_or_same)]


class AttentionTargetOperands(NamedTuple):
    """Operands of `attention_target`: those of `sparse_mla_fwd`, and its lse."""

    q: attention.Q
    kv: attention.Kv
    lse: Lse
    indices: attention.Indices
    topk_length: attention.TopkLength = None
    attn_sink: attention.AttnSink = None


class IndexerScoresOperands(NamedTuple):
    """Operands of `indexer_scores`."""

    q_index: QIndex
    k_index: KIndex
    weights: Weights
    indices: attention.Indices
    topk_length: attention.TopkLength = None


class IndexerBwdOperands(NamedTuple):
    """Operands of `indexer_bwd`: those of `indexer_scores`, and the gradient of the scores."""

    q_index: QIndex
    k_index: KIndex
    weights: Weights
    indices: attention.Indices
    grad_scores: Annotated[Tensor, Operand("S topk", dtypes.sum_dtypes)]
    topk_length: attention.TopkLength = None


def _arguments_of_backward(
    x: IndexerScoresOperands, _: Sequence[Tensor], d_scores: Tensor, parameters: Parameters
) -> tuple[Any, ...]:
    """`indexer_bwd`'s; gradients come in the inputs' dtypes."""
    operands = x.q_index, x.k_index, x.weights, x.indices, d_scores, x.topk_length
    return *operands, parameters["deterministic"], x.k_index.dtype


ATTENTION_TARGET = register(
    OpSpec(
        "attention_target",
        AttentionTargetOperands,
        cpu="indexer_training:attention_target",
        parameters=(attention.SCALE,),
        outputs=(Output("target", "S topk", (dtypes.sum_dtype,)),),
        autocast=("q", "kv"),
        normalise=attention.rows_and_slots,
        detached=True,
    )
)
INDEXER_SCORES = register(
    OpSpec(
        "indexer_scores",
        IndexerScoresOperands,
        cpu="indexer_training:scores",
        parameters=attention.OF_BACKWARD,
        outputs=(Output("scores", "S topk", (dtypes.sum_dtype,)),),
        autocast=("q_index", "k_index"),
        normalise=int32_slots,
        gradient=Gradient(
            by="indexer_bwd", of=("q_index", "k_index", "weights"), arguments=_arguments_of_backward
        ),
    )
)
INDEXER_BWD = register(
    OpSpec(
        "indexer_bwd",
        IndexerBwdOperands,
        cpu="indexer_training:backward",
        parameters=(
            attention.DETERMINISTIC,
            Parameter(
                "dk_dtype",
                "ScalarType?",
                default=lambda q_index: dtypes.sum_dtype(q_index.dtype),
                rule=_require_dk_dtype,
            ),
        ),
        outputs=(
            Output("dq_index", f"S H {INDEX_HEAD_DIM}", ("q_index",)),
            Output("dk_index", f"S_kv {INDEX_HEAD_DIM}", ("dk_dtype", dtypes.sum_dtype)),
            Output("d_weights", "S H", ("weights",)),
        ),
        normalise=int32_slots,
        backward_of="indexer_scores",
    )
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
    index_block: int = 1,
    accumulate_into: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the attention's weights: ``P[s, i] = sum_h exp(sm_scale * q . kv_i - lse')``.

    ``lse' = logaddexp(lse, attn_sink)``, so heads that look elsewhere weigh less: with the lse of
    two sources also those that look at the other one. It is not
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
        index_block: rows of kv that an id names, see `sparse_mla_fwd`; P is their sum.
        accumulate_into: (S, topk), the result's dtype: P is added to it, and it is returned.
        backend: "auto" or the name of one.

    Returns:
        P (S, topk) fp32 (fp64 for fp64 inputs), 0 where a slot is invalid.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `sparse_mla_fwd`.
    """
    scale = scale_or_default(sm_scale, q)
    require_positive("index_block", index_block)
    operands = AttentionTargetOperands(q, kv, lse, indices, topk_length, attn_sink)
    if index_block > 1 or accumulate_into is not None:
        operands = ATTENTION_TARGET.normalised(operands)
    if accumulate_into is not None:
        total = Total("accumulate_into", accumulate_into, operands.indices.shape, "[S, topk]")
        require_totals([total], dtypes.sum_dtype(q.dtype), ATTENTION_TARGET, operands)
    if index_block > 1:
        # Rows beyond those of kv are invalid slots.
        index_block = max(1, min(index_block, operands.kv.shape[0]))
        operands = _with_ids_of_rows(operands, index_block)
    target: Tensor = call(ATTENTION_TARGET, operands, (scale,), backend)
    if index_block > 1:
        target = target.unflatten(1, (-1, index_block)).sum(2)
    if accumulate_into is None:
        return target
    with torch.no_grad():
        return accumulate_into.add_(target)


def _with_ids_of_rows(x: AttentionTargetOperands, block: int) -> AttentionTargetOperands:
    """The operands with ids of rows in place of those of blocks."""
    lengths = x.topk_length
    if lengths is not None:
        lengths = lengths.long() * block  # INVARIANT: fits int64
    return x._replace(indices=expand_blocks(x.indices, block), topk_length=lengths)


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
