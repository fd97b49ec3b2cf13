"""Small calls of the indexer over shared keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.prefill_pieces import Piece
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, PrefillPlan
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
