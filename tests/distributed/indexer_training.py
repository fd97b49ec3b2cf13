"""Tensor parallelism of the indexer's training: heads are split, the target is summed."""

from __future__ import annotations

import torch
import torch.distributed as dist

import flashdsa

QUERIES, KEYS, HEADS, INDEX_HEADS, TOPK = 40, 96, 6, 4, 24


def check_targets_of_two_ranks() -> None:
    """Each rank has half of the attention's heads and the whole indexer: its ids, its loss and its
    gradients are those of one process."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, kv = normal(QUERIES, HEADS, 576), normal(KEYS, 576)
    indexer = [normal(QUERIES, INDEX_HEADS, 128), normal(KEYS, 128), normal(QUERIES, INDEX_HEADS)]
    learned = [x.requires_grad_() for x in indexer]
    ids = torch.empty(QUERIES, TOPK, dtype=torch.int32)
    ends = torch.arange(KEYS - QUERIES, KEYS, dtype=torch.int32) + 1
    q_index, k_index, weights = (x.detach().float() for x in indexer)
    flashdsa.dsa_topk_prefill(q_index, k_index, weights, None, ends, ids)

    def target_of(heads: slice) -> torch.Tensor:
        own = q[:, heads].contiguous()
        _, lse = flashdsa.sparse_mla_fwd(own, kv, ids)
        return flashdsa.attention_target(own, kv, lse, ids)

    def learn(target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = flashdsa.indexer_kl_loss(*learned, ids, target=target)
        return loss.detach(), *torch.autograd.grad(loss.mean(), learned)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_rank = HEADS // ranks
    target = target_of(slice(rank * of_rank, (rank + 1) * of_rank))
    dist.all_reduce(target)
    # The sum is of like keys: every rank selected the same slots in the same order.
    everyones = [torch.empty_like(ids) for _ in range(ranks)]
    dist.all_gather(everyones, ids)
    assert all(torch.equal(one, ids) for one in everyones)
    whole = target_of(slice(None))
    torch.testing.assert_close(target, whole, rtol=1e-11, atol=1e-14)
    for mine, expected in zip(learn(target), learn(whole), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
