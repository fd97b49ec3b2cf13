"""A training step with its tokens spread over the ranks, against one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
)
from tests.distributed.checks import norm_error

CU_SEQLENS, FIRST, TOPK, D_V = (0, 150, 400), 60, 24, 16
WIDTHS = {"q": (2, 24), "kv": (24,), "q_index": (4, 128), "k_index": (128,), "weights": (4,)}


def check_weights_learn_as_in_one_process() -> None:
    """Attention and both losses of the indexer, of two documents' late queries (`query_rows`):
    ids are equal, and the gradients of the weights, added over the ranks, those of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    layout = SequenceLayout.packed(CU_SEQLENS, mesh)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(CU_SEQLENS[-1], 32, generator=generator)
    d_out = torch.randn(CU_SEQLENS[-1], 2, D_V, generator=generator)
    learned = [torch.randn(32, *width, generator=generator) / 6 for width in WIDTHS.values()]
    for one in learned:
        one.requires_grad_()
    values = [torch.einsum("sd,d...->s...", hidden, one) for one in learned]

    # One process. Query s of a document sees the keys from `starts` to itself.
    bounds = torch.tensor(CU_SEQLENS)
    starts, ends = flashdsa.causal_ranges(bounds)
    asked = (ends - starts > FIRST).nonzero().flatten()
    q, kv, q_index, k_index, weights = values
    q8, weights8 = flashdsa.quantize_index_q(q_index.detach().bfloat16(), weights.detach())
    k8, scale = flashdsa.quantize_index_k(k_index.detach().bfloat16())
    ids = torch.empty(len(asked), TOPK, dtype=torch.int32)
    ranges = starts[asked], ends[asked]
    flashdsa.dsa_topk_prefill(q8[asked], k8, weights8[asked], *ranges, ids, k_scale=scale)
    out = flashdsa.sparse_mla(q[asked], kv, ids, d_v=D_V)
    index = q_index[asked], k_index, weights[asked]
    expected = _gradients(out, d_out[asked], (q[asked], kv), index, ids, ranges, learned)

    # All ranks.
    rows = (layout.seq_lens > FIRST).nonzero().flatten()
    tokens = layout.positions[rows]
    local_kv, local_k = layout.shard(kv), layout.shard(k_index)
    indices = context_parallel_topk_indexer(
        q8[tokens], local_k.detach().bfloat16(), weights8[tokens], mesh, layout=layout, topk=TOPK,
        query_rows=rows,
    )  # fmt: skip
    selected = layout.token_of(indices)
    where = torch.searchsorted(asked, tokens)
    assert torch.equal(selected, ids[where])
    out = context_parallel_sparse_mla(q[tokens], local_kv, indices, mesh, d_v=D_V)
    whole_kv, whole_k = layout.unshard(local_kv), layout.unshard(local_k)
    index = q_index[tokens], whole_k, weights[tokens]
    ranges = starts[tokens], ends[tokens]
    attention = q[tokens], whole_kv
    found = _gradients(out, d_out[tokens], attention, index, selected, ranges, learned)
    for mine, wanted in zip(found, expected, strict=True):
        dist.all_reduce(mine)
        assert norm_error(mine, wanted) <= 1e-5, tuple(mine.shape)


def _gradients(
    out: Tensor,
    d_out: Tensor,
    attention: tuple[Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    ids: Tensor,
    ranges: tuple[Tensor, Tensor],
    learned: list[Tensor],
) -> tuple[Tensor, ...]:
    """Of the attention's loss, the sparse stage's and the warm-up's, each a sum over queries."""
    q, kv = (one.detach() for one in attention)
    _, lse = flashdsa.sparse_mla_fwd(q, kv, ids, d_v=D_V)
    loss = (out * d_out).sum()
    loss = loss + flashdsa.indexer_kl_loss(*index, ids, q=q, kv=kv, lse=lse).sum()
    start, end = ranges
    loss = loss + flashdsa.indexer_kl_loss_dense(
        *index, q, kv, lse, end, key_start=start, row_weight=torch.ones(len(q))
    )
    return torch.autograd.grad(loss, learned, retain_graph=True)


QUERIES, KEYS, HEADS, INDEX_HEADS = 40, 96, 6, 4


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
