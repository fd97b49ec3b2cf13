"""Small calls of the choice in two levels."""

from __future__ import annotations

from typing import Any

from flashdsa.verify.indexer_cases import IndexerCase
from workbench.small_calls.call import SmallCall


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
)
BLOCKS = (
    _levels("three rows", (700, 0, 530), 40, plateaus=True, nan_keys=True),
    _levels("CTAs that share a row", (9000,), 700, sms=4, sorted=True),
)
