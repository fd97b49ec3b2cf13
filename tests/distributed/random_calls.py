"""Good and bad calls in random order, bad on a random rank: each rank raises, results are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    decode_sparse_mla,
    decode_topk_indexer,
    gather_latents,
)
from flashdsa.errors import FlashDsaError
from tests.distributed.disagreements import without_cpu

Arguments = dict[str, Any]
STEPS = 60
SIZES = (1, 2, 3)
D_QK, D_V = 8, 4


class Case(NamedTuple):
    """A call of one size.

    Attributes:
        arguments: by name, this rank's. expected: this rank's result.
        wrong: values that an argument may not have, by its name.
    """

    call: Callable[..., Tensor]
    arguments: Arguments
    expected: Tensor
    wrong: dict[str, list[Any]]


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mine(whole: Tensor) -> Tensor:
    """This rank's part of the rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def topk_case(size: int) -> Case:
    """Decode's indexer; wrong values of lengths and pages among the wrong arguments."""
    rank, ranks, pages = dist.get_rank(), dist.get_world_size(), 4
    lengths = torch.tensor([100, 0, 250][:size], dtype=torch.int32)
    table = _normal(size, size * pages).argsort().view(size, pages).int()
    cache = torch.zeros(table.numel(), 64, 1, 132, dtype=torch.uint8)
    count = table.numel() * 64
    flashdsa.write_index_k_cache(_normal(size, count, 128), torch.arange(count), cache)
    q8, weights = flashdsa.quantize_index_q(
        _normal(1, size, 4, 128).bfloat16(), _normal(2, size, 4)
    )
    expected = torch.empty(size, 20, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(q8, cache, weights, lengths, table, expected, ids="position")
    mine = table[:, rank::ranks].contiguous()
    arguments = {
        "q_index_fp8": q8,
        "k_index_cache_local": cache,
        "weights": weights,
        "seq_lens": lengths,
        "block_table_local": mine,
        "topk": 20,
    }
    wrong = {
        "q_index_fp8": [None, q8.float(), q8[0], q8[:, :, :64]],
        "k_index_cache_local": [
            None,
            cache.int(),
            cache[0],
            cache[:, :32],
            cache[..., :-1],
            cache[:0],
        ],
        "weights": [None, weights.double(), weights[:, :2], 3],
        "seq_lens": [None, lengths - 400, lengths + 4000, lengths.float(), lengths[None]],
        "block_table_local": [None, mine + count, mine - count, mine.float(), mine[0], mine[:, :0]],
        "topk": [0, "20", None, 21],
        "backend": ["sm90", "none", None, []],
    }
    return Case(decode_topk_indexer, arguments, expected, wrong)


def attention_case(size: int) -> Case:
    """Decode's attention: rank r has every request's keys r, r + ranks, ..."""
    rank, ranks, heads = dist.get_rank(), dist.get_world_size(), 2
    q, kv = _normal(3, size, ranks * heads, D_QK), _normal(4, 40, D_QK)
    slots = torch.arange(size * 6).view(size, 6).int()
    expected, _ = flashdsa.sparse_mla_fwd(q, kv, slots, d_v=D_V)
    own = slots.masked_fill(slots % ranks != rank, -1)
    mine = slice(rank * heads, (rank + 1) * heads)
    arguments = {"q_local": q[:, mine], "kv_local": kv, "slots_local": own, "d_v": D_V}
    wrong = {
        "q_local": [None, q[0], q[:, :, :-1], q[:, :1], q[:, mine].half(), q.int()],
        "kv_local": [None, kv.double(), kv[:, :-1], kv[0], kv.t().contiguous().t()],
        "slots_local": [None, own.float(), own[0], own[:, :-1], [[0]]],
        "attn_sink": [[0.0], torch.zeros(3), torch.zeros(2, dtype=torch.float16)],
        "d_v": [0, D_QK + 1, "4", None],
        "sm_scale": [float("nan"), "1", [], 0.5],
        "backend": ["sm90", "none", None, []],
    }
    wrong["q_local"].append(q[:, mine].clone().requires_grad_())
    return Case(decode_sparse_mla, arguments, expected[:, mine], wrong)


def context_case(size: int) -> Case:
    """Attention over gathered rows."""
    ranks = dist.get_world_size()
    q, kv = _normal(5, ranks * 2, 2, D_QK), _normal(6, ranks * 64 * size, D_QK)
    slots = torch.arange(q.shape[0] * 5).view(-1, 5).int() * 3
    expected = flashdsa.sparse_mla(q, kv, slots, d_v=D_V)
    arguments = {"q_local": _mine(q), "kv_local": _mine(kv), "indices": _mine(slots), "d_v": D_V}
    layout = SequenceLayout.zigzag(64, (1, ranks + 1))
    wrong = {
        "q_local": [None, q[0], q[:, :, :-1], q.double(), _mine(q).clone().requires_grad_()],
        "kv_local": [None, kv.double(), kv[:, :-1], kv[0], kv[:5]],
        "indices": [None, slots.float(), slots[0], slots[:1]],
        "topk_length": [[1, 2], torch.zeros(9, dtype=torch.int32), torch.zeros(2)],
        "attn_sink": [[0.0], torch.zeros(3)],
        "layout": [layout, 3],
        "ids": ["positions", "none", None],
        "grad_wire": ["bf16", "none", None, 1],
        "kv_gathered": [kv, 3],
        "save_gathered": [True],
        "deterministic": [True],
        "d_v": [0, D_QK + 1, "4", None],
        "sm_scale": [float("inf"), "1", 0.5],
        "backend": ["sm90", "none", None],
        "nothing": [None],
    }
    return Case(context_parallel_sparse_mla, arguments, _mine(expected), wrong)


def indexer_case(size: int) -> Case:
    """The indexer of all tokens."""
    layout = SequenceLayout.zigzag(150 * size, dist.group.WORLD)
    k = _normal(7, layout.seq_len, 128)
    q8 = _normal(8, layout.seq_len, 4, 128).to(torch.float8_e4m3fn)
    weights = _normal(9, layout.seq_len, 4)
    ends = torch.arange(1, layout.seq_len + 1).int()
    tokens = torch.empty(layout.seq_len, 20, dtype=torch.int32)
    k8, scale = flashdsa.quantize_index_k(k)
    flashdsa.dsa_topk_prefill(q8, k8, weights, None, ends, tokens, k_scale=scale)
    tokens = layout.shard(tokens, padding=-1)
    q_local = layout.shard(q8)
    local_weights = layout.shard(weights)
    arguments = {
        "q_index_fp8": q_local,
        "k_index_local": layout.shard(k),
        "weights": local_weights,
        "layout": layout,
        "topk": 20,
    }
    rows = layout.num_local
    wrong = {
        "q_index_fp8": [None, q_local.float(), q_local[1:], q_local[0]],
        "k_index_local": [None, k[:3], layout.shard(k).double(), torch.zeros(128, rows).t()],
        "weights": [None, local_weights[1:], local_weights.double(), torch.zeros(4, rows).t()],
        "layout": [None, SequenceLayout.zigzag(64, (1, 5))],
        "query_rows": [torch.full((rows,), rows), torch.full((rows,), -1), torch.zeros(rows), 3],
        "topk": [0, None, 19],
        "query_chunk": [0, "1"],
        "sorted": [True],
        "backend": ["none", None],
    }
    return Case(context_parallel_topk_indexer, arguments, layout.key_row(tokens), wrong)


def gather_case(size: int) -> Case:
    """Latents alone."""
    kv = _normal(10, dist.get_world_size() * size, D_QK)
    wrong = {"kv_local": [None, [1.0], kv.sum(), kv.double(), kv, _mine(kv)[:, :3]]}
    return Case(gather_latents, {"kv_local": _mine(kv)}, kv, wrong)


CASES = (topk_case, attention_case, context_case, indexer_case, gather_case)


def _run(case: Case, arguments: Arguments) -> Tensor:
    return case.call(**arguments, mesh=dist.group.WORLD)


def random_calls(seed: int, steps: int) -> None:
    """Every rank makes the same plan of the steps, and keeps to its own part."""
    plan, rank = random.Random(seed), dist.get_rank()
    cases = [[case(size) for size in SIZES] for case in CASES]
    for step in range(steps):
        operation, size, other = plan.randrange(len(cases)), plan.choice(SIZES), plan.choice(SIZES)
        case = cases[operation][size - 1]
        mistaken, kind = plan.randrange(dist.get_world_size()), plan.choice(("good", "bad", "else"))
        name = plan.choice(sorted(case.wrong))
        which, another = plan.randrange(len(case.wrong[name])), plan.randrange(1, len(cases))
        where = f"seed {seed}, step {step}: {kind}, {case.call.__name__}, size {size}, {name}"
        arguments = case.arguments
        if rank == mistaken and kind == "bad":
            arguments = arguments | {name: case.wrong[name][which]}
        elif rank == mistaken and kind == "else":  # a right call, but not that of the others
            same = other != size
            case = cases[(operation + another * (not same)) % len(cases)][other - 1]
            arguments = case.arguments
        try:
            found = _run(case, arguments)
        except FlashDsaError:
            assert kind != "good", where
        else:
            assert kind == "good", f"{where}, value {which}: no error"
            torch.testing.assert_close(found, case.expected, rtol=1e-5, atol=1e-5, msg=where)


def check_random_calls() -> None:
    random_calls(0, STEPS)


def check_random_calls_on_a_channel_of_its_own() -> None:
    with without_cpu():
        random_calls(1, STEPS)
