"""Small calls of the indexer over shared keys, and of the choice in two levels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.prefill_pieces import Piece
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, PrefillPlan
from flashdsa.verify.indexer_cases import IndexerCase
from flashdsa.verify.prefill_cases import PrefillCase, causal
from workbench.small_calls.call import SmallCall


def prefill(
    name: str, queries: int, keys: int, topk: int, heads: int = 64, *, dtype: str = "float8_e4m3fn",
    wide: int = 0, short: bool = True, sms: int | None = None, cluster: int = 0, **features: Any,
) -> SmallCall:  # fmt: skip
    """Queries in a causal row of keys.

    Args:
        wide: not 0: the first 128 keys' scores are so many times as large, so that all others fall
            into fewer bins of the window, of 4,096 into a few.
        short: 1,024 keys are ranked at a time and 350 scores of earlier ones are kept, so that
            short rows have several segments and fill the log.
        sms: of the device; None: as many as a cluster has CTAs, or all if rows are not short.
        cluster: not 0: clusters of so many CTAs share tiles, even if that takes longer.
    """
    case = PrefillCase(name, causal(queries, keys), topk, heads, getattr(torch, dtype), **features)

    def widen(x: Any) -> None:
        (x.k_index if x.k_scale is None else x.k_scale)[:128] *= wide

    settings: dict[str, Any] = {}
    if short:
        settings["flashdsa.backends.sm90.prefill_scores:_plan"] = short_segments
    if cluster:
        settings["flashdsa.backends.sm90.prefill:pieces_of"] = partial(in_clusters, cluster)
    if sms is None:
        sms = max(cluster, 1) if short else 0
    plant = widen if wide else None
    return SmallCall("dsa_topk_prefill", case, sms, plant=plant, settings=settings)


def in_clusters(
    size: int, runner: Runner, _: PrefillPlan, queries: int, *__: Any
) -> tuple[Piece, ...]:
    """One launch, of clusters of so many CTAs that share tiles."""
    return (Piece(0, queries, runner.num_sms // size * size, size),)


def short_segments(num_heads: int, dtype: str, **choices: bool) -> PrefillPlan:
    """The plan that a user's call has, but for segments and log."""
    how: dict[str, Any] = {"segment_keys": CHUNK, "log_keys": 350}
    if choices.get("scores_only"):
        how = {}
    return PrefillPlan(num_heads, dtype, **choices, **how)


def prefill_of_64(dtype: str) -> tuple[SmallCall, ...]:
    """Calls of 64 heads, whose tiles are a CTA's each."""
    return (
        prefill("one segment", 5, 400, 100, dtype=dtype),
        prefill("three segments, a full log", 9, 2500, 300, dtype=dtype),
        prefill("plateaus", 5, 3000, 100, dtype=dtype, plateaus=True),
        prefill("no keys for a warpgroup", 5, 60, 20, dtype=dtype),
        prefill("more candidates than fit", 5, 1500, 300, dtype=dtype, wide=4096),
        prefill("warps read places of others", 5, 1000, 300, dtype=dtype),
        prefill("candidates of many warps", 5, 1000, 300, dtype=dtype, wide=128),
        prefill("700 keys", 20, 700, 300, dtype=dtype, short=False),
        prefill("700 keys, plateaus", 20, 700, 300, dtype=dtype, short=False, plateaus=True),
    )


PREFILL_IN_CLUSTERS = (
    prefill("no keys for a CTA", 17, 60, 20, cluster=3),
    prefill("tiles in turns", 17, 700, 100, cluster=3),
    prefill("two clusters", 17, 700, 300, sms=4, cluster=2),
    prefill("plateaus", 9, 3000, 100, cluster=2, plateaus=True),
    prefill("more candidates than fit", 9, 1500, 300, wide=4096, cluster=3),
    prefill("segments, a full log", 9, 5000, 300, cluster=2),
)
"""Calls whose tiles are shared by the CTAs of clusters."""


def _levels(
    name: str, lengths: tuple[int, ...], topk: int, *, sms: int = 2, **features: Any
) -> SmallCall:
    """Blocks of 8, or tokens among them."""
    case = IndexerCase(name, lengths, topk, num_heads=16, block=8, **features)
    return SmallCall("dsa_topk_indexer", case, sms)


def _ranges(name: str, lengths: tuple[int, ...]) -> SmallCall:
    """Blocks of 8 among keys that have no pages: short rows are not ranked."""
    case = PrefillCase(name, tuple((0, end) for end in lengths), 40, num_heads=16, block=8)
    return SmallCall("dsa_topk_prefill", case, 8)


UNLIKE = 65, 33_000, 70, 66, 600, 640
"""Tokens of rows: the CTAs of a cluster of eight rank the second together, then one each."""
MANY = *UNLIKE, 70, 70, 70
LEVELS_OF_TOKENS = (
    _levels("a full list of candidates", (10_000, 65), 512, sms=1, num_candidates=1200),
    _levels("three rows of a CTA", (900, 641, 70), 512, sms=1, num_candidates=99, plateaus=True),
    _levels("a long row, then short ones", MANY, 512, sms=8, num_candidates=1200),
)
LEVELS_OF_BLOCKS = (
    _levels("three rows", (700, 0, 530), 40, plateaus=True, nan_keys=True),
    _levels("rows of unlike lengths", (9_000, *[600] * 12), 40, sms=4),
    _ranges("a long row, then short ones", MANY),
)
SHARED_LEVELS_OF_TOKENS = (
    _levels("CTAs that share a row", (3000,), 512, sms=4, num_candidates=300),
    _levels(
        "equal scores of four CTAs", (10_000, 65), 512, sms=4, num_candidates=1200, zero_scores=True
    ),
    _levels("a long row, then short ones", UNLIKE, 512, sms=8, num_candidates=1200),
)
"""CTAs that share rows have more threads: kernels of their own."""
SHARED_LEVELS_OF_BLOCKS = (
    _levels("CTAs that share a row", (9000,), 700, sms=4, sorted=True),
    _levels("equal scores of four CTAs", (30_000, 65), 512, sms=4, zero_scores=True),
    _levels("two windows of the bitmap", (263_000,), 700, sms=4),
    _ranges("a long row, then short ones", UNLIKE),
)

_of_keys = partial(prefill, heads=16, block=8, sms=3)
LEVELS = (
    _of_keys("candidates", 9, 700, 100, num_candidates=60, plateaus=True, nan_keys=True),
    _of_keys("parts of a tile", 5, 1500, 300, num_candidates=120, sorted=True),
    _of_keys("blocks", 9, 700, 40, no_starts=True, plateaus=True, nan_keys=True),
    _of_keys("parts of a tile, blocks", 5, 1500, 100, no_starts=True, sorted=True),
)
"""Calls over shared keys."""
FURTHER_LEVELS = (
    _of_keys("64 heads", 5, 1300, 300, heads=64, num_candidates=150, sorted=True),
    _of_keys("32 heads, bf16", 9, 900, 300, heads=32, dtype="bfloat16", num_candidates=90),
    _of_keys("sparse lists", 5, 1300, 40, block=1, num_candidates=200),
    _of_keys("64 of a block", 5, 1300, 300, block=64, num_candidates=13, plateaus=True),
    _of_keys("64 heads, blocks", 5, 900, 100, heads=64, no_starts=True, nan_keys=True),
    _of_keys("blocks of 16", 9, 900, 40, heads=32, block=16, no_starts=True),
    _of_keys("bf16, blocks", 9, 900, 90, heads=32, dtype="bfloat16", no_starts=True),
    _of_keys("blocks of 4", 9, 900, 90, block=4),
)
"""Other forms of both."""
