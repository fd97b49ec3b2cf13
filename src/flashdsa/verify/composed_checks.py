"""Checks of functions without a backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flashdsa.verify import judge_composed
from flashdsa.verify.check_list import Check
from flashdsa.verify.compare import Comparison
from flashdsa.verify.sparse_mla_cases import SparseMlaCase


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """A case or two of each function."""
    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = [
        (
            "merge_attention",
            f"3 parts, {name}",
            partial(
                judge_composed.check_merge,
                SparseMlaCase("parts", 6, 200, 16, 48, dtype=dtype),
                seed,
                device,
            ),
        )
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    ]
    for name in ("lse_for_merge", "lse_to_base2", "lse_from_base2"):
        convert = partial(judge_composed.check_lse_conversions, name, seed, device)
        rows.append((name, "8 x 16, infinities", convert))
    rows += [
        (
            "quantize_kv",
            "300 rows of any size",
            partial(judge_composed.check_quantize_kv, seed, device),
        ),
        (
            "write_kv_cache",
            "50 rows, some padding",
            partial(judge_composed.check_write_kv_cache, seed, device),
        ),
        ("read_kv_cache", "60 slots", partial(judge_composed.check_read_kv_cache, seed, device)),
        (
            "causal_ranges",
            "5 sequences, one empty",
            partial(judge_composed.check_causal_ranges, device),
        ),
        ("expand_blocks", "12 queries", partial(judge_composed.check_expand_blocks, seed, device)),
        (
            "fake_quantize_index",
            "160 vectors",
            partial(judge_composed.check_fake_quantize, seed, device),
        ),
    ]
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        dense = partial(judge_composed.check_dense_kl_loss, dtype, seed, device)
        rows.append(("indexer_kl_loss_dense", f"9 queries of 80 keys, {name}", dense))
    return [Check(name, case, check, check) for name, case, check in rows]
