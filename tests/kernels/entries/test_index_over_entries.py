"""The index over entries and pools: who sees what, rows of pools, a loss that trains on them."""

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.errors import ArgumentValueError


@pytest.mark.parametrize(
    ("ratio", "visible"),
    [(4, {0: 0, 2: 0, 3: 1, 7: 2}), (1, {0: 1}), (128, {126: 0, 127: 1})],
)
def test_a_query_sees_the_entries_that_are_complete(ratio, visible):
    starts, ends = flashdsa.causal_ranges(torch.tensor([0, 130]), ratio=ratio)
    assert {p: int(ends[p] - starts[p]) for p in visible} == visible


def test_entries_of_packed_sequences_follow_each_other():
    """A chunk of 3 tokens behind 4, and a sequence of 5: entries 0 and 1, as `compress_kv` has."""
    starts, ends = flashdsa.causal_ranges(
        torch.tensor([0, 3, 8]), torch.tensor([0, 7, 12]), ratio=4
    )
    assert starts.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert ends.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]
    with pytest.raises(ArgumentValueError, match="ratio: expected at least 1; got 0"):
        flashdsa.causal_ranges(torch.tensor([0, 3]), ratio=0)


def test_pools_are_their_tokens_and_the_own_pool_is_always_seen():
    ids = flashdsa.expand_blocks(
        torch.tensor([[0, -1], [0, -1], [-1, -1]]), 4, positions=torch.tensor([5, 3, 2])
    )
    none = [-1] * 4
    assert ids.tolist() == [
        [0, 1, 2, 3, *none, 4, 5, -1],
        [0, 1, 2, 3, *none, -1, -1, -1],
        [*none, *none, 0, 1, 2],
    ]
    assert ids.dtype == torch.int32


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def v4_layer(seed):
    """Queries, window rows, entries, and the lists of both."""
    S, H, d = 24, 4, 16
    positions = torch.arange(S)
    entries = flashdsa.compress_kv(normal(seed + 1, S, 32), normal(seed + 2, S, 32), ratio=4,
                                   overlap=True)  # fmt: skip
    _, ends = flashdsa.causal_ranges(torch.tensor([0, S]), ratio=4)
    ids = torch.arange(3).expand(S, 3)
    ids = torch.where(ids < ends[:, None], ends[:, None] - 1 - ids, -1).int()
    window = ((positions - 4).int(), (positions + 1).int())
    return normal(seed, S, H, d), normal(seed + 3, S, d), entries, ids, window


def test_weights_of_entries_window_and_sink_add_up_to_the_heads(seed):
    """The joint lse has all of them in it."""
    q, rows, entries, ids, window = v4_layer(seed)
    sink = normal(seed + 4, 4).float()
    _, lse = flashdsa.sparse_mla_fwd(
        q, entries, ids, extra_kv=rows, extra_indices=window, attn_sink=sink, d_v=16
    )
    options = {"attn_sink": sink}
    of_entries = flashdsa.attention_target(q, entries, lse, ids, **options)
    starts, ends = window
    own = starts[:, None] + torch.arange(5)
    own = torch.where(own < ends[:, None], own, -1).int()
    of_window = flashdsa.attention_target(q, rows, lse, own, **options)
    of_sink = (sink - torch.logaddexp(lse, sink.double())).exp().sum(1)
    total = of_entries.sum(1) + of_window.sum(1) + of_sink
    torch.testing.assert_close(total, torch.full_like(total, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        of_entries, reference.attention_target(q, entries, lse, ids, **options)
    )


def test_the_indexer_learns_which_entries_the_attention_looks_at(seed):
    """Gradients are those of the formula, and steps along them lower the KL."""
    q, rows, entries, ids, window = v4_layer(seed)
    _, lse = flashdsa.sparse_mla_fwd(q, entries, ids, extra_kv=rows, extra_indices=window, d_v=16)
    tokens = len(q)
    kv, gate, ape = (
        normal(seed + 5 + i, *x) for i, x in enumerate([(tokens, 256)] * 2 + [(4, 256)])
    )
    index = [normal(seed + 8, tokens, 2, 128) * 0.3, normal(seed + 9, tokens, 2) * 0.3]
    leaves = [x.requires_grad_() for x in (kv, gate, ape, *index)]
    target = flashdsa.attention_target(q, entries, lse, ids)

    def loss():
        keys = flashdsa.compress_kv(kv, gate, ape, ratio=4, overlap=True)
        return flashdsa.indexer_kl_loss(index[0], keys, index[1], ids, target=target).mean()

    first = loss()
    scores = reference.indexer_scores(
        index[0], flashdsa.compress_kv(kv, gate, ape, ratio=4, overlap=True), index[1], ids
    )
    expected, _ = reference.indexer_kl(scores, target)
    torch.testing.assert_close(first, expected.mean())
    for _ in range(20):
        gradients = torch.autograd.grad(loss(), leaves)
        assert all(x.any() for x in gradients)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf -= 0.3 * gradient
    assert loss() < 0.8 * first


def test_the_target_of_a_pool_is_that_of_its_tokens(seed):
    q, kv = normal(seed, 6, 4, 16), normal(seed + 1, 30, 16)
    pools = torch.tensor([[0, 7, -1], [3, 3, 1], [-1, -1, -1], [6, 2, 5], [9, 0, 1], [4, 5, 6]])
    lengths = torch.tensor([3, 2, 3, 1, 3, 3])
    _, lse = flashdsa.sparse_mla_fwd(q, kv, pools, index_block=4, topk_length=lengths, d_v=16)
    options = {"index_block": 4, "topk_length": lengths}
    target = flashdsa.attention_target(q, kv, lse, pools, **options)
    tokens = flashdsa.expand_blocks(pools, 4)
    each = reference.attention_target(q, kv, lse, tokens, topk_length=lengths * 4)
    torch.testing.assert_close(target, each.unflatten(1, (3, 4)).sum(2))
    heads = torch.tensor([4.0, 4, 0, 4, 4, 4], dtype=torch.float64)
    torch.testing.assert_close(target.sum(1), heads)
    keys, weights = normal(seed + 2, 8, 128), normal(seed + 3, 6, 2)
    index = normal(seed + 4, 6, 2, 128), keys, weights, pools
    loss = flashdsa.indexer_kl_loss(*index, q=q, kv=kv, lse=lse, **options)
    scores = flashdsa.indexer_scores(*index, topk_length=lengths)
    torch.testing.assert_close(loss, flashdsa.indexer_kl(scores, target))
