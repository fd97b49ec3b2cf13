"""The judgement: what the choice loses without each kind of way, replayed over a document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOW = 0.9
"""A draw is counted whose speed falls below this without a way."""
LEAST_GAIN, LEAST_SHARE, MOST_LINES = 0.5, 3.0, 500.0
"""A kind stays if it earns this many % of the mean, at fewer lines a %; or if without it this many
% of the draws fall below SLOW."""
CONDITIONS = ("hot", "cold")
KERNELS = Path(__file__).parents[2] / "src/flashdsa/kernels"
FOLDERS = {
    "decode, few heads, clusters": "attention/sm90/decode/few_heads",
    "decode, few heads, stream-K": "attention/sm90/decode/few_heads/stream_k",
    "decode, 64 heads, clusters": "attention/sm90/decode/full",
    "decode, 64 heads, stream-K": "attention/sm90/decode/full/stream_k",
    "ranked": "indexer/sm90/rank",
}
"""Folders of kernels, by kind; other kinds share theirs and count as 0 lines."""


@dataclass(frozen=True)
class Verdict:
    """The earnings of a kind of way.

    Attributes:
        taken: share of the draws that it serves, %.
        lost: time without it over today's, in the mean of all draws, %; hot, cold.
        worst: the same of the draw that loses most, a ratio.
        below: draws whose speed falls below SLOW, of `draws`.
        better: draws that another way serves in less than SLOW of the time, and the choice does not
            see it.
    """

    kind: str
    taken: float
    lost: tuple[float, float]
    worst: float
    below: int
    better: int
    draws: int

    def stays(self, lines: int) -> bool:
        """Whether the rule keeps it.

        Args:
            lines: that exist for it alone.
        """
        gain = max(self.lost)
        earns = gain >= LEAST_GAIN and lines < MOST_LINES * gain
        return earns or 100 * self.below >= LEAST_SHARE * self.draws


def replay(ways: Mapping[str, Mapping[str, Any]], without: str = "") -> str | None:
    """The way that the choice takes: the least estimate, the first of equal ones.

    Args:
        ways: of a draw, the taken one first. without: a kind that there is not.
    """
    left = {name: way for name, way in ways.items() if way["kind"] != without}
    if not left:
        return None

    def estimate(name: str) -> float:
        found = left[name]["estimate"]
        return math.inf if found is None else float(found)

    return min(left, key=estimate)


def ratio(ways: Mapping[str, Mapping[str, Any]], other: str, condition: str) -> float:
    """Time of another way over that of the one that is taken."""
    taken = next(iter(ways))
    if other == taken:
        return 1.0
    return float(ways[other][condition]) / float(ways[taken][condition])


def judge(draws: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Verdicts on all kinds that serve a draw, the one that earns least first.

    A draw that no other kind serves does not count: there is nothing to replace it by.
    """
    tables = [row["ways"] for row in draws]
    kinds = sorted({way["kind"] for ways in tables for way in ways.values()})
    found = (_verdict(kind, tables) for kind in kinds)
    return sorted((one for one in found if one.taken), key=lambda one: max(one.lost))


def _verdict(kind: str, tables: list[Mapping[str, Any]]) -> Verdict:
    logs: dict[str, list[float]] = {condition: [] for condition in CONDITIONS}
    taken = below = better = 0
    worst = 1.0
    for ways in tables:
        mine = ways[next(iter(ways))]["kind"] == kind
        taken += mine
        other = replay(ways, kind) if mine else None
        lost = [ratio(ways, other, each) if other else 1.0 for each in CONDITIONS]
        for condition, each in zip(CONDITIONS, lost, strict=True):
            logs[condition].append(math.log(each))
        worst, below = max(worst, *lost), below + (max(lost) > 1 / SLOW)
        fastest = min(
            (max(ratio(ways, name, each) for each in CONDITIONS) for name in ways), default=1.0
        )
        better += mine and fastest < SLOW
    means = (100 * (math.exp(math.fsum(log) / len(log)) - 1) for log in logs.values())
    hot, cold = means
    share = 100 * taken / len(tables)
    return Verdict(kind, share, (hot, cold), worst, below, better, len(tables))


def regret(draws: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Time of the choice over that of each draw's fastest way, in the mean; hot, cold."""
    tables = [row["ways"] for row in draws]

    def mean(condition: str) -> float:
        logs = [-math.log(min(ratio(ways, name, condition) for name in ways)) for ways in tables]
        return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0

    return mean("hot"), mean("cold")


def lines_of(kind: str) -> int:
    """Lines of the kind's folder, without folders inside it."""
    folder = FOLDERS.get(kind)
    files = (KERNELS / folder).glob("*.py") if folder else ()
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
