"""Training the indexer in float64: the formulas on one query at a time, gradients by autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.reference.quant import f64, full

__all__ = [
    "attention_target",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
    "indexer_kl_loss_dense",
    "indexer_scores",
]


def _slots(indices: Tensor, num_keys: int, topk_length: Tensor | None) -> list[Tensor]:
    """The valid slots of each query, as numbers of columns."""
    table = indices.detach().reshape(indices.shape[0], indices.shape[-1])
    valid = (table >= 0) & (table < num_keys)
    if topk_length is not None:
        valid &= torch.arange(table.shape[1], device=table.device) < topk_length[:, None]
    return [row.nonzero()[:, 0] for row in valid]


def attention_target(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    slope: bool = False,
) -> Tensor:
    """P `[S, topk]` = sum_h exp(sm_scale q . kv - logaddexp(lse, sink)), 0 where invalid.

    `slope`: by how much P moves at most where every logit moves by its own size, sum_h
    exp(logit - lse') |logit|.
    """
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    rows = kv.reshape(-1, kv.shape[-1])
    target = full(q, (indices.shape[0], indices.shape[-1]))
    table = indices.reshape(target.shape).long()
    for s, slots in enumerate(_slots(indices, len(rows), topk_length)):
        logits = scale * (f64(q[s]) @ f64(rows[table[s, slots]]).T)
        total = f64(lse[s])
        if attn_sink is not None:
            total = torch.logaddexp(total, f64(attn_sink))
        heads = total != torch.inf
        logits = logits[heads]
        p = (logits - total[heads, None]).exp()
        target[s, slots] = (p * logits.abs() if slope else p).sum(0)
    return target


def indexer_scores(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    topk_length: Tensor | None = None,
) -> Tensor:
    """I `[S, topk]` = sum_h weights relu(q_index . k_index), -inf where invalid."""
    result = full(q_index, indices.shape, -torch.inf)
    for s, slots in enumerate(_slots(indices, len(k_index), topk_length)):
        keys = f64(k_index[indices[s, slots].long()])
        result[s, slots] = f64(weights[s]) @ torch.relu(f64(q_index[s]) @ keys.T)
    return result


class IndexerGradients(NamedTuple):
    """Gradients of `indexer_scores`, and for each the size of what is summed into it."""

    dq_index: Tensor
    dk_index: Tensor
    d_weights: Tensor
    dq_size: Tensor
    dk_size: Tensor
    dw_size: Tensor
    dq_gates: Tensor
    """`[S]`: by how much dq_index of a query may move if gates next to 0 open or shut."""
    dk_gates: Tensor
    """`[S_kv]`: likewise of dk_index."""
    dq_rounding: tuple[float, float]
    """Mean and standard deviation of `||dq error||^2`, of independent relative errors of rms 1 in
    every gradient of a q . k; slots of a query that name the same key have one together."""
    dk_spread: Tensor
    """`[S_kv]`: the root of the sum of squares of what is summed into a row of dk_index."""
    dk_along: tuple[Tensor, Tensor]
    """`[S_kv]` each, of the parts along a row of dk_index of what is summed into it: the sum of
    their sizes, and the root of the sum of their squares."""


GATE = 2.0**-20
"""Share of sum_d |q_d k_d| within which fp32 sums may have either sign."""


def indexer_bwd(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    grad_scores: Tensor,
    *,
    topk_length: Tensor | None = None,
) -> IndexerGradients:
    """Gradients of `indexer_scores`, by autograd of the plain formula."""
    rows, keys = len(q_index), len(k_index)
    q_all, k_all, w_all = (f64(x).requires_grad_() for x in (q_index, k_index, weights))
    sizes = [full(x, x.shape) for x in (q_index, k_index, weights)]
    gates_q, gates_k, squares_k = (full(k_index, (count,)) for count in (rows, keys, keys))
    mean = variance = 0.0
    total = full(k_index, ())
    terms = []
    # The gradient of one row of a tensor is as large as the tensor; of all rows together it is one.
    q_rows, w_rows = q_all.unbind(), w_all.unbind()
    for s, slots in enumerate(_slots(indices, keys, topk_length)):
        if not len(slots):
            continue
        named = indices[s, slots].long()
        g = f64(grad_scores[s])[slots]
        z = q_rows[s] @ k_all[named].T
        total = total + (g * (w_rows[s] @ torch.relu(z))).sum()
        with torch.no_grad():
            q, k, w = q_rows[s], k_all[named], w_rows[s]
            a = (g * w[:, None]).abs() * (z > 0)
            sizes[0][s] = a @ k.abs()
            sizes[1].index_add_(0, named, a.T @ q.abs())
            sizes[2][s] = torch.relu(z) @ g.abs()
            near = (z.abs() <= GATE * (q.abs() @ k.abs().T)) * (g * w[:, None]).abs()
            gates_q[s] = (near * k.norm(dim=-1)).sum()
            gates_k.index_add_(0, named, (near * q.norm(dim=-1)[:, None]).sum(0))
            rows_named, first = named.unique(return_inverse=True)
            of_row = full(g, rows_named.shape).index_add_(0, first, g)
            own = k_all[rows_named]
            of_z = of_row * w[:, None] * (q @ own.T > 0)
            terms.append((rows_named, of_z, q.detach()))
            squares = of_z.square()
            gram = own @ own.T
            mean += float((squares @ gram.diagonal()).sum())
            variance += 2 * float((squares @ gram.square() * squares).sum())
            squares_k.index_add_(0, rows_named, squares.T @ q.square().sum(-1))
    dq, dk, dw = (full(x, x.shape) for x in (q_all, k_all, w_all))
    if total.requires_grad:
        found = torch.autograd.grad(total, (q_all, k_all, w_all))
        # Of queries without a valid slot nothing is read, NaN included.
        dq, dk, dw = (torch.where(size == 0, 0.0, x) for x, size in zip(found, sizes, strict=True))
    dk = dk.detach()
    norms = dk.norm(dim=-1)
    unit = dk / norms.masked_fill(norms == 0, 1)[:, None]
    along, squares_along = torch.zeros_like(norms), torch.zeros_like(norms)
    for rows_named, of_z, q in terms:
        parts = of_z * (q @ unit[rows_named].T)
        along[rows_named] += parts.abs().sum(0)
        squares_along[rows_named] += parts.square().sum(0)
    return IndexerGradients(
        dq,
        dk,
        dw,
        sizes[0],
        sizes[1],
        sizes[2],
        gates_q,
        gates_k,
        (mean, variance**0.5),
        squares_k.sqrt(),
        (along, squares_along.sqrt()),
    )


def indexer_kl(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """KL `[S]`, and `[S]` sum p |log p - log pi|, the size of what is summed into it."""
    kl = full(scores, scores.shape[:1])
    size = torch.zeros_like(kl)
    for s in range(len(scores)):
        valid = scores[s] != -torch.inf
        p = f64(target[s][valid])
        if not len(p) or p.sum() == 0:
            continue
        p = p / p.sum()
        log_pi = torch.log_softmax(f64(scores[s][valid]), dim=0)
        terms = torch.special.xlogy(p, p) - p * log_pi
        kl[s], size[s] = terms.sum(), terms.abs().sum()
    return kl, size


def indexer_kl_bwd(scores: Tensor, target: Tensor, grad_kl: Tensor) -> Tensor:
    """d_scores `[S, topk]`, by autograd of the plain formula."""
    result = full(scores, scores.shape)
    for s in range(len(scores)):
        valid = scores[s] != -torch.inf
        p = f64(target[s][valid])
        if not len(p) or p.sum() == 0:
            continue
        found = f64(scores[s][valid]).requires_grad_()
        p = p / p.sum()
        loss = torch.nn.functional.kl_div(
            torch.log_softmax(found, dim=0), p, reduction="sum", log_target=False
        )
        (gradient,) = torch.autograd.grad(loss, found)
        result[s, valid] = f64(grad_kl)[s] * gradient
    return result


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
            if lse[s, h] != torch.inf:
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
