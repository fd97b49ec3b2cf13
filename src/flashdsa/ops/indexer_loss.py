"""Loss of the indexer: KL of the attention's target to the softmax of its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch.dtypes import same_dtype
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Gradient, Operand, Output, Parameter, Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentValueError
from flashdsa.ops.indexer_training import attention_target, indexer_scores

__all__ = ["indexer_kl", "indexer_kl_bwd", "indexer_kl_loss"]

_SUMS = (torch.float32, torch.float64)
Scores = Annotated[Tensor, Operand("S topk", _SUMS, nonempty="expected topk >= 1 columns; got 0")]
Target = Annotated[Tensor, Operand("S topk", same_dtype)]


class IndexerKlOperands(NamedTuple):
    """Operands of `indexer_kl`."""

    scores: Scores
    target: Target


class IndexerKlBwdOperands(NamedTuple):
    """Operands of `indexer_kl_bwd`: those of `indexer_kl`, and the gradient of each row's KL."""

    scores: Scores
    target: Target
    grad_kl: Annotated[Tensor, Operand("S", same_dtype)]


def _arguments_of_backward(
    x: IndexerKlOperands, _: Sequence[Tensor], d_kl: Tensor, __: Parameters
) -> tuple[Any, ...]:
    """`indexer_kl_bwd`'s."""
    return x.scores, x.target, d_kl


INDEXER_KL = register(
    OpSpec(
        "indexer_kl",
        IndexerKlOperands,
        cpu="indexer_training:kl",
        parameters=(Parameter("backward_backend", "str", passed=False),),
        outputs=(Output("kl", "S", ("scores",)),),
        gradient=Gradient(by="indexer_kl_bwd", of=("scores",), arguments=_arguments_of_backward),
    )
)
INDEXER_KL_BWD = register(
    OpSpec(
        "indexer_kl_bwd",
        IndexerKlBwdOperands,
        cpu="indexer_training:kl_backward",
        outputs=(Output("d_scores", "S topk", ("scores",)),),
        backward_of="indexer_kl",
    )
)


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
    index_block: int = 1,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The sparse stage's loss of each query: KL of the attention over the selected keys to the
    softmax of the indexer's scores there (DeepSeek-V3.2, section 2.1).

    `indexer_kl(indexer_scores(...), target)`, where the target is given or is
    `attention_target(q, kv, lse, indices)`. No gradient flows to q, kv, lse or the target.

    Args:
        q_index, k_index, weights, indices, topk_length, deterministic: as for `indexer_scores`.
        q, kv, lse, sm_scale, attn_sink, index_block: as for `attention_target`; without a `target`
            only. With blocks k_index has a row a block.
        target: (S, topk), instead of q, kv and lse: all-reduced over ranks, or summed over layers.
        backend: "auto" or the name of one.

    Returns:
        KL (S,) fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: neither or both of `target` and (q, kv, lse); else as for `indexer_scores`.
    """
    given = [name for name, value in (("q", q), ("kv", kv), ("lse", lse)) if value is not None]
    options = {"sm_scale": sm_scale, "attn_sink": attn_sink}
    more = [name for name, value in options.items() if value is not None]
    more += ["index_block"] if index_block != 1 else []
    if target is not None and (given or more):
        raise ArgumentValueError(
            "target: expected either it or q, kv and lse with their options; got it and "
            f"{', '.join(given + more)}"
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
            index_block=index_block,
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
