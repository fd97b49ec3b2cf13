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

_listed = partial(prefill, heads=16, block=8)
SHARED_LISTED = (
    _listed("three segments, a full log", 9, 2500, 300, num_candidates=250),
    _listed("plateaus", 5, 2500, 300, num_candidates=250, plateaus=True, nan_keys=True),
    _listed("a segment lists too few", 5, 2500, 300, num_candidates=60),
    _listed("more candidates than fit", 5, 1500, 300, num_candidates=180, wide=4096),
    _listed("clusters", 9, 3000, 100, num_candidates=250, plateaus=True, cluster=2),
    _listed("all of a cluster's", 9, 1000, 900, num_candidates=100, cluster=3),
)
"""Calls that choose among listed keys, of shared ones."""
BITS = (*SHARED_LISTED, _listed("as users have it", 5, 2500, 300, num_candidates=250, short=False))
"""Calls that write listed keys as bits."""
_blocks = partial(prefill, heads=16, block=8, no_starts=True)
SHARED_BLOCKS = (
    _blocks("two segments", 5, 9000, 300),
    _blocks("plateaus", 9, 3000, 100, plateaus=True, nan_keys=True),
    _blocks("unscored tiles", 17, 410, 51),
    _blocks("clusters", 9, 3000, 100, cluster=3),
    _blocks("plateaus of clusters", 9, 1200, 40, plateaus=True, nan_keys=True, cluster=2),
)
"""Calls that choose blocks of shared keys."""
SHARED_FURTHER = (
    _listed("64 heads, sorted", 5, 1300, 300, heads=64, num_candidates=150, sorted=True),
    _listed("32 heads, bf16", 9, 1300, 300, heads=32, dtype="bfloat16", num_candidates=150),
    _listed(
        "32 heads, clusters, sorted",
        9,
        1300,
        70,
        heads=32,
        num_candidates=90,
        sorted=True,
        cluster=2,
    ),
    _listed("sparse lists", 5, 1300, 40, block=1, num_candidates=200),
    _listed("blocks of 64", 5, 1300, 300, block=64, num_candidates=13, plateaus=True),
    _blocks("64 heads, sorted", 5, 1300, 100, heads=64, sorted=True, nan_keys=True),
    _blocks("32 heads, bf16", 9, 1300, 100, heads=32, dtype="bfloat16", plateaus=True),
    _blocks("64 heads, clusters", 9, 1300, 100, heads=64, cluster=2, sorted=True),
)
"""Other forms of both, over shared keys."""
