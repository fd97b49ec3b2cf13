"""Decode with the cache spread over the ranks, against one process that has all of it."""

from __future__ import annotations

import torch
import torch.distributed as dist

import flashdsa
from flashdsa.distributed import decode_sparse_mla, decode_topk_indexer, local_seq_lens, local_slots
from flashdsa.integrations import vllm
from tests.distributed.inputs import require_error

LENGTHS = (0, 1, 63, 64, 65, 200, 700)
TOPK, HEADS, D_QK, D_V = 40, 4, 24, 16
MAX_PAGES = -(-max(LENGTHS) // 64)


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of each request in one process (B, MAX_PAGES), and this rank's, of the same cache."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    count = len(LENGTHS) * MAX_PAGES
    whole = torch.randperm(count, generator=generator).view(len(LENGTHS), -1).int()
    return whole, whole[:, rank::size].contiguous()


def check_decode_topk_is_exact() -> None:
    whole, mine = _tables()
    generator = torch.Generator().manual_seed(1)
    tokens = whole.numel() * 64
    k = torch.randn(tokens, 128, generator=generator).bfloat16()
    # Plateaus of equal scores that cross pages, and with them ranks.
    row = (whole[6, :, None] * 64 + torch.arange(64)).flatten().long()
    k[row] = k[row[torch.arange(len(row)) // 150 * 150]]
    cache = torch.zeros(whole.numel(), 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(k, torch.arange(tokens), cache)
    lengths = torch.tensor(LENGTHS).int()
    q = torch.randn(len(LENGTHS), HEADS, 128, generator=generator)
    q8, weights = flashdsa.quantize_index_q(q, torch.randn(len(q), HEADS, generator=generator))
    weights[5] = float("nan")
    expected = torch.empty(len(LENGTHS), TOPK, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(q8, cache, weights, lengths, whole, expected, ids="position")
    group = dist.group.WORLD
    found = decode_topk_indexer(q8, cache, weights, lengths, mine, group, topk=TOPK)
    assert torch.equal(found, expected)
    local = local_seq_lens(lengths, group)
    dist.all_reduce(local)
    assert torch.equal(local, lengths)


def check_decode_attention_merges() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole, mine = _tables()
    generator = torch.Generator().manual_seed(2)
    # The first request has no key; the second one's lie on rank 0 only.
    positions = torch.stack(
        [torch.randint(0, max(length, 1), (TOPK,), generator=generator) for length in LENGTHS]
    ).int()
    positions[0] = -1
    positions[5, ::3] = -1
    page = whole.gather(1, positions.clamp_min(0).long() // 64)
    ids = torch.where(positions < 0, -1, page * 64 + positions % 64).int()
    slots = local_slots(positions, mine, group)
    for found, row, wanted in zip(slots, positions, ids, strict=True):
        of_rank = wanted[(row >= 0) & (row // 64 % size == rank)]
        assert found.tolist() == of_rank.tolist() + [-1] * (TOPK - len(of_rank))
    heads = HEADS // size
    of_rank = slice(rank * heads, (rank + 1) * heads)
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        q = torch.randn(len(LENGTHS), HEADS, D_QK, generator=generator).to(dtype)
        kv = torch.randn(whole.numel() * 64, D_QK, generator=generator).to(dtype)
        own = torch.zeros_like(kv, dtype=torch.bool)
        own.view(-1, 64, D_QK)[mine.flatten().long()] = True
        kv_local = kv.masked_fill(~own, float("nan"))  # rows of others are not here
        sink = torch.tensor([0.5, -1.0, float("-inf"), float("inf")])
        for attn_sink in (None, sink):
            expected, _ = flashdsa.sparse_mla_fwd(q, kv, ids, d_v=D_V, attn_sink=attn_sink)
            found = decode_sparse_mla(
                q[:, of_rank],
                kv_local,
                slots,
                group,
                d_v=D_V,
                attn_sink=None if attn_sink is None else attn_sink[of_rank],
            )
            assert found.dtype == dtype
            wanted = expected[:, of_rank].double()
            error = (found.double() - wanted).norm()
            assert error <= limit * wanted.norm(), (dtype, attn_sink)
            assert (found[0] == 0).all()


def check_decode_under_autocast() -> None:
    """As with operands that were cast by hand."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(3)
    q, kv = torch.randn(2, 2, D_QK, generator=generator), torch.randn(64, D_QK, generator=generator)
    slots = torch.arange(2 * 9).view(2, 9).int()
    for sink in (None, torch.ones(2)):
        expected = decode_sparse_mla(
            q.bfloat16(), kv.bfloat16(), slots, group, d_v=D_V, attn_sink=sink
        )
        with torch.autocast("cpu", torch.bfloat16):
            found = decode_sparse_mla(q, kv, slots, group, d_v=D_V, attn_sink=sink)
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def check_decode_errors() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    kv, slots = torch.zeros(64, D_QK), torch.zeros(2, 3, dtype=torch.int32)
    require_error(
        lambda: decode_sparse_mla(torch.zeros(2, 1 + rank, D_QK), kv, slots, group, d_v=D_V),
        ValueError,
        "q_local: float32 [2, 1, 24] on cpu on rank 0, float32 [2, 2, 24] on cpu on rank 1",
    )
    require_error(
        lambda: decode_sparse_mla(torch.zeros(2, 1, D_QK), kv, slots[: 2 - rank], group, d_v=D_V),
        ValueError,
        "slots_local: expected shape [B, topk] = [2, 3]; got shape [1, 3]",
    )


def check_vllms_decode_context_parallelism() -> None:
    """Each rank attends to its tokens; vLLM's formula (`correct_attn_out`) makes it the whole."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(3)
    rows = torch.randn(64, 576, generator=generator)
    q = torch.randn(5, 4, 576, generator=generator)
    ids = torch.stack([torch.randperm(64, generator=generator)[:12] for _ in range(5)]).int()
    ids[1] = ids[1] // 2 * 2  # all on rank 0
    counts = torch.tensor([12, 12, 7, 1, 0], dtype=torch.int32)
    whole, _ = vllm.attend(q, rows, ids, counts, 0.1)
    used = (torch.arange(12) < counts[:, None]) & (ids % 2 == rank)
    order = used.int().argsort(dim=1, descending=True, stable=True)
    local = torch.where(used, ids // 2, -1).gather(1, order)
    out, lse = vllm.attend(q, rows[rank::2], local, used.sum(1).int(), 0.1)
    assert lse is not None
    lses = [torch.empty_like(lse) for _ in range(2)]
    dist.all_gather(lses, lse)
    both = torch.stack(lses)
    top = both.amax(0).clamp(min=-3e38)
    out *= ((lse - top).exp() / (both - top).exp().sum(0).clamp(min=1e-30))[..., None]
    dist.all_reduce(out)
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-6)
