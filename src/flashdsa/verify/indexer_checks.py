"""Checks of the indexer: over pages, over shared keys, and its single steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from flashdsa.verify import calls, judge_indexer, judge_prefill
from flashdsa.verify import check_cases as cases
from flashdsa.verify.check_list import Check, each
from flashdsa.verify.compare import Comparison
from flashdsa.verify.indexer_cases import IndexerCase, IndexerInputs, make_indexer_inputs
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, make_prefill_inputs


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """Those of each list of cases; single steps have plain random inputs."""
    return [
        *_paged(seed, backend, device),
        *_over_shared_keys(seed, backend, device),
        *_single_steps(seed, backend, device),
    ]


def _paged(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_indexer_inputs, seed=seed, device=device))
    runs = (
        ("indexer_logits", calls.indexer_logits, _judge_scores),
        ("dsa_topk_indexer", calls.dsa_topk_indexer, _judge_selection),
    )
    bound = IndexerCase("3 rows, bound", (600, 100, 0), 512, num_heads=16)
    run_bound = ("dsa_topk_indexer", calls.dsa_topk_indexer, judge_indexer.check_bound)
    return [
        *each(runs, cases.INDEXER, make, backend, _tokens),
        *each([run_bound], [bound], make, backend, _tokens),
    ]


def _tokens(case: IndexerCase) -> int:
    return sum(case.seq_lens)


def _judge_scores(inputs: IndexerInputs, backend: str) -> list[Comparison]:
    return judge_indexer.check_scores(inputs, backend)[1]


def _judge_selection(inputs: IndexerInputs, backend: str) -> list[Comparison]:
    scores = calls.indexer_logits(inputs, backend)
    return judge_indexer.check_selection(inputs, scores, backend)


def _over_shared_keys(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_prefill_inputs, seed=seed, device=device))
    runs = (
        ("prefill_logits", calls.prefill_logits, _judge_prefill_scores),
        ("dsa_topk_prefill", calls.dsa_topk_prefill, _judge_prefill_selection),
    )
    return each(runs, cases.PREFILL, make, backend, _keys_seen)


def _keys_seen(case: PrefillCase) -> int:
    return sum(end - start for start, end in case.ranges)


def _judge_prefill_scores(inputs: PrefillInputs, backend: str) -> list[Comparison]:
    return judge_prefill.check_prefill_scores(inputs, backend)[1]


def _judge_prefill_selection(inputs: PrefillInputs, backend: str) -> list[Comparison]:
    scores = calls.prefill_logits(inputs, backend)
    return judge_prefill.check_prefill_selection(inputs, scores, backend)


def _single_steps(seed: int, backend: str, device: str) -> list[Check]:
    """topk_indices, and quantization and the cache: exact operations on plain random data."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 6000, generator=generator)
    coarse = (scores * 2).round() / 2
    coarse[:, ::5] = torch.nan
    lengths = torch.tensor([6000, 0, 2048, 3001], dtype=torch.int32).to(device)
    wide_k = torch.randn(1000, 128, generator=generator).to(device)
    wide_q = torch.randn(8, 64, 128, generator=generator).to(device)
    k, q = wide_k.to(torch.bfloat16), wide_q.to(torch.bfloat16)
    weights = torch.randn(8, 64, generator=generator).to(device)
    slots = torch.randperm(20 * 64, generator=generator)[:1000]
    padded = torch.where(torch.arange(1000) % 9 == 4, -1, slots).to(device)
    cache = torch.randint(256, (20, 64, 1, 132), generator=generator).to(torch.uint8).to(device)

    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = []
    for name, values, topk, by_score in (
        ("2048 of 6000", scores, 2048, False),
        ("512 of 6000", scores, 512, False),
        ("1000 of 6000", scores, 1000, False),
        ("ties and NaN", coarse, 2048, False),
        ("ties and NaN, 1024", coarse, 1024, False),
        ("ties and NaN, sorted", coarse, 2048, True),
    ):
        check = partial(
            judge_indexer.check_topk, values.to(device), lengths, topk, backend, sorted=by_score
        )
        rows.append(("topk_indices", name, check))
    for dtype, some_k, some_q in (("", k, q), (", fp32", wide_k, wide_q)):
        write_slots = padded.int() if dtype else padded
        rows += [
            (
                "quantize_index_k",
                f"1000 keys{dtype}",
                partial(judge_indexer.check_quantize_k, some_k, backend),
            ),
            (
                "quantize_index_q",
                f"8 x 64 heads{dtype}",
                partial(judge_indexer.check_quantize_q, some_q, weights, backend),
            ),
            (
                "write_index_k_cache",
                f"1000 slots, some padding{dtype}",
                partial(judge_indexer.check_cache_write, some_k, write_slots, cache, backend),
            ),
        ]
    in_fp4 = cache[..., :68].contiguous()
    in_fp4.flatten(1)[:, 4096:] %= 20  # exponents that may be far apart
    for name, pages in (("1000 slots", cache), ("1000 slots of 68 bytes", in_fp4)):
        read = partial(judge_indexer.check_cache_read, pages, slots.to(device), backend)
        rows.append(("read_index_k_cache", name, read))
    write = partial(judge_indexer.check_cache_write, k, padded, in_fp4, backend)
    rows.append(("write_index_k_cache", "1000 slots of 68 bytes", write))
    of_k = partial(judge_indexer.check_quantize_k, wide_k, backend, mxfp4=True)
    of_q = partial(judge_indexer.check_quantize_q, q, weights, backend, mxfp4=True)
    rows += [("quantize_index_k", "MXFP4", of_k), ("quantize_index_q", "MXFP4", of_q)]
    # What these call is so little that the judge serves as the call.
    return [Check(name, case, check, check) for name, case, check in rows]
