"""The warm-up's loss over every visible key, in float64, gradients by autograd of the formula."""

import math

import torch
from torch import Tensor

from flashdsa.reference.quant import f64, full

__all__ = ["indexer_kl_loss_dense"]


def indexer_kl_loss_dense(
    index: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    ranges: list[tuple[int, int]],
    row_weight: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The loss, and its gradients of the three index operands.

    index: q_index `[S, H_I, 128]`, k_index `[S_kv, 128]`, weights `[S, H_I]`; q `[S, H, d]`,
    k `[S_kv, d]`, lse `[S, H]`; ranges: first key and the one behind the last, of each query.
    """
    q_index, k_index, weights = (f64(x).requires_grad_() for x in index)
    scale = q.shape[-1] ** -0.5
    loss = full(q, ())
    for s, (first, last) in enumerate(ranges):
        first, last = max(first, 0), min(last, len(k_index))
        if first >= last:
            continue
        p = full(q, (last - first,))
        for h in range(q.shape[1]):
            if lse[s, h] != math.inf:
                p += (scale * (f64(k[first:last]) @ f64(q[s, h])) - f64(lse[s, h])).exp()
        if p.sum() == 0:
            continue
        p = p / p.sum()
        scores = weights[s] @ torch.relu(q_index[s] @ k_index[first:last].T)
        log_pi = torch.log_softmax(scores, dim=0)
        kl = (torch.special.xlogy(p, p) - p * log_pi).sum()
        loss = loss + f64(row_weight[s]) * kl
    dq, dk, dw = torch.autograd.grad(loss, (q_index, k_index, weights))
    return loss.detach(), (dq, dk, dw)
