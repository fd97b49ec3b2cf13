"""Small calls of the choice in two levels."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashdsa.verify.indexer_cases import IndexerCase
from workbench.small_calls.call import SmallCall
from workbench.small_calls.prefill import prefill


def _levels(
    name: str, lengths: tuple[int, ...], topk: int, *, sms: int = 2, **features: Any
) -> SmallCall:
    """Blocks of 8, or tokens among them."""
    case = IndexerCase(name, lengths, topk, num_heads=16, block=8, **features)
    return SmallCall("dsa_topk_indexer", case, sms)


TOKENS = (
    _levels("a full list of candidates", (10_000, 65), 512, sms=1, num_candidates=1200),
    _levels("CTAs that share a row", (3000,), 512, sms=4, num_candidates=300),
    _levels("three rows of a CTA", (900, 641, 70), 512, sms=1, num_candidates=99, plateaus=True),
    _levels(
        "equal scores of four CTAs", (10_000, 65), 512, sms=4, num_candidates=1200, zero_scores=True
    ),
)
BLOCKS = (
    _levels("three rows", (700, 0, 530), 40, plateaus=True, nan_keys=True),
    _levels("CTAs that share a row", (9000,), 700, sms=4, sorted=True),
    _levels("equal scores of four CTAs", (30_000, 65), 512, sms=4, zero_scores=True),
    _levels("two windows of the bitmap", (263_000,), 700, sms=4),
    _levels("rows of unlike lengths", (9_000, *[600] * 12), 40, sms=4),
)

_levels_of_keys = partial(prefill, heads=16, block=8, sms=3)
SHARED = (
    _levels_of_keys("candidates", 9, 700, 100, num_candidates=60, plateaus=True, nan_keys=True),
    _levels_of_keys("parts of a tile", 5, 1500, 300, num_candidates=120, sorted=True),
    _levels_of_keys("blocks", 9, 700, 40, no_starts=True, plateaus=True, nan_keys=True),
    _levels_of_keys("parts of a tile, blocks", 5, 1500, 100, no_starts=True, sorted=True),
)
"""Calls over shared keys."""
SHARED_FURTHER = (
    _levels_of_keys("64 heads", 5, 1300, 300, heads=64, num_candidates=150, sorted=True),
    _levels_of_keys("32 heads, bf16", 9, 900, 300, heads=32, dtype="bfloat16", num_candidates=90),
    _levels_of_keys("sparse lists", 5, 1300, 40, block=1, num_candidates=200),
    _levels_of_keys("64 of a block", 5, 1300, 300, block=64, num_candidates=13, plateaus=True),
    _levels_of_keys("64 heads, blocks", 5, 900, 100, heads=64, no_starts=True, nan_keys=True),
    _levels_of_keys("blocks of 16", 9, 900, 40, heads=32, block=16, no_starts=True),
    _levels_of_keys("bf16, blocks", 9, 900, 90, heads=32, dtype="bfloat16", no_starts=True),
    _levels_of_keys("blocks of 4", 9, 900, 90, block=4),
)
"""Other forms of both."""
