"""Small well-formed inputs for the tests of the custom ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import flashdsa
from workbench.public_calls import Call, Sizes, public_calls

PAGES = 5
SIZES = Sizes(s=3, s_kv=64, h=4, h_index=4, topk=8, indexer_topk=8, pages=4)


class Attention(NamedTuple):
    """q (S, H, d_qk), kv (S_kv, d_qk), indices (S, topk) with invalid slots and duplicates."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor
    attn_sink: Tensor
    d_v: int


def attention(dtype: torch.dtype, num_queries: int = 3, seed: int = 0) -> Attention:
    generator = torch.Generator().manual_seed(seed)
    num_heads, topk, s_kv, d_qk, d_v = 2, 6, 7, 12, 8
    indices = torch.randint(-2, s_kv + 2, (num_queries, topk), generator=generator)
    indices[0] = -1
    return Attention(
        q=torch.randn(num_queries, num_heads, d_qk, generator=generator, dtype=torch.float32).to(
            dtype
        ),
        kv=torch.randn(s_kv, d_qk, generator=generator, dtype=torch.float32).to(dtype),
        indices=indices.int(),
        topk_length=torch.full((num_queries,), topk - 1, dtype=torch.int32),
        attn_sink=torch.randn(num_heads, generator=generator, dtype=torch.float32),
        d_v=d_v,
    )


class Indexer(NamedTuple):
    """The indexer's five inputs in the order of its arguments."""

    q_index_fp8: Tensor
    k_index_cache_fp8: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor


def indexer(seed: int = 0) -> Indexer:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.zeros(PAGES, 64, 1, 132, dtype=torch.uint8)
    pages = cache.view(PAGES, -1)
    pages[:, :8192] = (
        torch.randn(PAGES, 8192, generator=generator, dtype=torch.float32)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    pages[:, 8192:].view(torch.float32).copy_(
        torch.rand(PAGES, 64, generator=generator, dtype=torch.float32)
    )
    return Indexer(
        q_index_fp8=torch.randn(2, 4, 128, generator=generator, dtype=torch.float32).to(
            torch.float8_e4m3fn
        ),
        k_index_cache_fp8=cache,
        weights=torch.randn(2, 4, generator=generator, dtype=torch.float32),
        seq_lens=torch.tensor([130, 70], dtype=torch.int32),
        block_table=torch.tensor([[3, 0, 4], [1, 2, 0]], dtype=torch.int32),
    )


def small_calls() -> dict[str, Call]:
    """`public_calls` of few rows and heads, with keys in the caches."""
    calls, scored = public_calls("cpu", SIZES), indexer()._asdict()
    for name, call in calls.items():
        if "q_index_fp8" in call.arguments:
            arguments = {**call.arguments, **scored}
            if call.written:
                arguments["topk_indices"] = torch.full((2, 8), -7, dtype=torch.int32)
            calls[name] = call._replace(arguments=arguments)
    cache = calls["read_index_k_cache"].arguments["cache"]
    cache.copy_(scored["k_index_cache_fp8"][: len(cache)])
    for form in ("", ", packed"):
        held = {name: calls["read_kv_cache" + form].arguments[name] for name in ("cache", "slots")}
        flashdsa.write_kv_cache(calls["write_kv_cache"].arguments["kv"], **held)
    return calls
