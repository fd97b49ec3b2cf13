"""The index over entries and pools: who sees what, rows of pools, a loss that trains on them."""

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.errors import ArgumentValueError
from tests.support.hopper_gpu import HOPPER_GPU


@pytest.mark.parametrize(
    ("ratio", "visible"), [(4, {0: 0, 2: 0, 3: 1, 7: 2}), (1, {0: 1}), (128, {126: 0, 127: 1})]
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


def test_pools_touch_nothing_beside_their_ids():
    """Ids and positions lie between canaries; rows are short, and every slot is written."""
    room = torch.full((14, 9), 7777)
    ids, positions = room[1:13, 2:7], room[1:13, 8]
    ids.copy_(torch.arange(60).view(12, 5) % 11 - 1)
    ids[torch.arange(5) >= torch.arange(12)[:, None] % 6] = -1
    positions.copy_(torch.arange(12))
    before = room.clone()
    found = flashdsa.expand_blocks(ids, 4, positions=positions)
    assert torch.equal(room, before)
    assert found.untyped_storage().nbytes() == 4 * found.numel() == 4 * 12 * 23
    rows = reference.expand_blocks(ids.tolist(), 4, positions.tolist())
    assert found.tolist() == torch.tensor(rows).view(12, 23).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=HOPPER_GPU)])
def test_more_entries_than_16_bits_count(device, seed):
    """262,155 tokens: pooled, ranked, and attended to as entries and as pools of tokens."""
    tokens, on_gpu = 262_155, device == "cuda"
    d, dtype = (512, torch.bfloat16) if on_gpu else (8, torch.float64)
    kv, gate = (normal(seed + i, tokens, d).to(device, dtype) for i in range(2))
    entries = flashdsa.compress_kv(kv, gate, ratio=4)
    count, last = 65_538, 65_537
    windows = kv[: 4 * count].double().unflatten(0, (-1, 4))
    weights = gate[: 4 * count].double().unflatten(0, (-1, 4)).softmax(1)
    expected = (weights * windows).sum(1)
    assert (entries - expected).norm() < (2e-3 if on_gpu else 1e-12) * expected.norm()
    _, ends = flashdsa.causal_ranges(torch.tensor([0, tokens], device=device), ratio=4)
    assert ends[[-5, -4, -1]].tolist() == [last, count, count]

    keys = torch.zeros(count, 128)
    keys[[3, 65_535, 65_536, last], 0] = torch.tensor([1.0, 3, 2, 4])
    k8, scale = flashdsa.quantize_index_k(keys.to(device))
    q8, heads = flashdsa.quantize_index_q(torch.ones(2, 16, 128), torch.ones(2, 16))
    ids = torch.empty(2, 4, dtype=torch.int32, device=device)
    flashdsa.dsa_topk_prefill(q8.to(device), k8, heads.to(device), None, ends[[-5, -1]], ids,
                              k_scale=scale, sorted=True)  # fmt: skip
    assert ids.tolist() == [[65_535, 65_536, 3, 0], [last, 65_535, 65_536, 3]]

    q = torch.zeros(2, 16, d, device=device, dtype=dtype)
    chosen, near = ids[1].long(), {"rtol": 0, "atol": 1e-2 if on_gpu else 1e-12}
    out, _ = flashdsa.sparse_mla_fwd(q, entries, ids, d_v=d)
    torch.testing.assert_close(out[1, 0].double(), entries[chosen].double().mean(0), **near)
    own = kv[4 * chosen[:, None] + torch.arange(4, device=device)].double().mean((0, 1))
    blocks = flashdsa.sparse_mla_fwd(q, kv, ids, d_v=d, index_block=4)
    rows = flashdsa.sparse_mla_fwd(q, kv, flashdsa.expand_blocks(ids, 4), d_v=d)
    for of_pools in (blocks, rows):
        torch.testing.assert_close(of_pools[0][1, 0].double(), own, **near)


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


def pooled(kv, gate, ape, weight, cos, sin):
    """Entries of windows of 4 that overlap, differentiable by torch: pooled, normed, turned."""
    d = len(weight)

    def slots(x, nothing):
        windows = x.unflatten(0, (-1, 4))
        before = torch.cat((torch.full_like(windows[:1], nothing), windows[:-1]))
        return torch.cat((before[..., :d], windows[..., d:]), dim=1)

    e = (slots(gate + ape.repeat(len(kv) // 4, 1), -torch.inf).softmax(1) * slots(kv, 0)).sum(1)
    n = e / (e.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    a, b = n[:, -2 * cos.shape[1] :: 2], n[:, -2 * cos.shape[1] + 1 :: 2]
    turned = torch.stack((a * cos[::4] - b * sin[::4], a * sin[::4] + b * cos[::4]), dim=2)
    return torch.cat((n[:, : -2 * cos.shape[1]], turned.flatten(1)), dim=1)


@pytest.mark.parametrize("everything", [False, True], ids=["selected", "all visible"])
def test_a_step_of_the_indexer_over_entries_is_that_of_the_formula(seed, everything):
    """The teacher's lse has window and sink in it; gradients down to the compressor's weights."""
    q, rows, entries, ids, window = v4_layer(seed)
    tokens, sink = len(q), normal(seed + 4, 4)
    angles = normal(seed + 6, tokens, 32)
    tables = angles.cos(), angles.sin()
    _, ends = flashdsa.causal_ranges(torch.tensor([0, tokens]), ratio=4)
    _, lse = flashdsa.sparse_mla_fwd(
        q, entries, ids, extra_kv=rows, extra_indices=window, attn_sink=sink, d_v=16
    )
    sizes = (tokens, 256), (tokens, 256), (4, 256), (128,), (tokens, 2, 128), (tokens, 2)
    leaves = [normal(seed + 10 + i, *size).requires_grad_() for i, size in enumerate(sizes)]
    kv, gate, ape, weight, q_index, head_weights = leaves
    keys = flashdsa.compress_kv(
        kv, gate, ape, ratio=4, overlap=True, norm_weight=weight, rotation=tables
    )
    total = torch.logaddexp(lse, sink)
    if everything:
        teacher = q, entries, total, ends
        loss = flashdsa.indexer_kl_loss_dense(q_index, keys, head_weights, *teacher)
    else:
        options = {"q": q, "kv": entries, "lse": lse, "attn_sink": sink}
        loss = flashdsa.indexer_kl_loss(q_index, keys, head_weights, ids, **options).mean()

    entry = torch.arange(len(entries))
    seen = entry < ends[:, None]
    if not everything:
        seen &= (ids[..., None] == entry).any(1)
    some = seen.any(1)
    p = torch.einsum("shd,td->sht", q, entries) / 4 - total[..., None]
    p = p.exp().sum(1).masked_fill(~seen, 0)[some]
    p = p / p.sum(1, keepdim=True)
    products = torch.einsum("shk,tk->sht", q_index, pooled(*leaves[:4], *tables)).relu()
    scores = torch.einsum("sht,sh->st", products, head_weights)[some]
    log_pi = scores.masked_fill(~seen[some], -torch.inf).log_softmax(1).masked_fill(~seen[some], 0)
    expected = (torch.special.xlogy(p, p) - p * log_pi).sum() / tokens
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    found = torch.autograd.grad(loss, leaves)
    for mine, wanted in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        assert wanted.any()
        assert (mine - wanted).norm() < 1e-11 * wanted.norm()


@pytest.mark.parametrize("topk", [512, 1024])
def test_tokens_to_the_entries_that_a_layer_attends_to(seed, topk):
    """Index keys go from tokens straight into pages; the choice among them and among rows is the
    same, and the best by the formula; attention over it and the window is that over joint rows."""
    tokens, d, heads = 4 * (topk + 150) + 3, 16, 16
    positions = torch.tensor([2, 3, 2046, 4 * topk + 2, 4 * topk + 3, tokens - 1])
    kv, gate = (normal(seed + i, tokens, 256).float() for i in range(2))
    pooling = {"ratio": 4, "overlap": True, "norm_weight": torch.ones(128)}
    pages = -(-tokens // 256)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    entry = torch.arange(tokens) // 4
    cache = torch.zeros(pages, 64, 1, 132, dtype=torch.uint8)
    slots = table[entry // 64] * 64 + entry % 64
    flashdsa.compress_kv(kv, gate, out=cache, slots=slots, **pooling)
    lengths = ((positions + 1) // 4).int()
    given = normal(seed + 2, len(positions), heads, 128), normal(seed + 3, len(positions), heads)
    q8, weights = flashdsa.quantize_index_q(*(x.float() for x in given))
    ids = torch.empty(len(positions), topk, dtype=torch.int32)
    tables = table.int().expand(len(positions), -1).contiguous()
    flashdsa.dsa_topk_indexer(q8, cache, weights, lengths, tables, ids, ids="position")

    k8, scale = flashdsa.quantize_index_k(flashdsa.compress_kv(kv, gate, **pooling))
    of_rows = torch.empty_like(ids)
    flashdsa.dsa_topk_prefill(q8, k8, weights, None, lengths, of_rows, k_scale=scale)
    assert torch.equal(ids, of_rows)
    products = torch.einsum("shk,tk->sht", q8.double(), k8.double()).relu()
    scores = torch.einsum("sht,sh->st", products, weights.double()) * scale.double()
    for s, visible in enumerate(lengths.tolist()):
        count = min(topk, visible)
        chosen = ids[s, :count].long()
        assert (ids[s, count:] == -1).all() and len(chosen.unique()) == count
        assert count == 0 or (chosen.min() >= 0 and chosen.max() < visible)
        best = scores[s, :visible].topk(count).values
        got = scores[s, chosen].sort(descending=True).values
        torch.testing.assert_close(got, best, rtol=1e-5, atol=1e-3)

    q, rows = normal(seed + 4, len(positions), 2, d), normal(seed + 5, tokens, d)
    entries = normal(seed + 6, tokens // 4, d)
    window = positions.int() - 127, positions.int() + 1
    out = flashdsa.sparse_mla(q, entries, ids, extra_kv=rows, extra_indices=window, d_v=d)
    for s, position in enumerate(positions.tolist()):
        near = rows[max(0, position - 127) : position + 1]
        joint = torch.cat((entries[ids[s][ids[s] >= 0].long()], near))
        expected = (q[s] @ joint.T / d**0.5).softmax(1) @ joint
        torch.testing.assert_close(out[s], expected, rtol=0, atol=1e-12)


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
