"""Figures of draws: lowest, 5th percentile, median, geometric mean of peers' times over ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flashdsa.bench.result import CEILING, OURS, Row
from workbench.draws.peers import OTHERS, PROMISES
from workbench.ways.judge import SLOW

CONDITIONS = ("hot", "cold")
LOWEST = 10


@dataclass(frozen=True)
class Figures:
    """Statistics of some ratios: more is better."""

    count: int
    lowest: float
    p5: float
    median: float
    geometric_mean: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Figures | None:
        """None of no ratio."""
        found = sorted(ratios)
        if not found:
            return None
        mean = math.exp(math.fsum(map(math.log, found)) / len(found))
        return cls(len(found), found[0], quantile(found, 0.05), quantile(found, 0.5), mean)


def quantile(ordered: Sequence[float], q: float) -> float:
    """By linear interpolation."""
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Cost:
    """Times of ours with an option or by another backend over ours, under one condition."""

    option: str
    condition: str
    largest: float
    p95: float
    mean: float


@dataclass(frozen=True)
class Report:
    """Everything about one operation.

    Attributes:
        figures: by condition. lowest: (ratio, hot or cold, peer, draw), the lowest first.
        at_ceiling: geometric mean of the fastest peer's hot time over that of the same work at the
            chip's ceiling, which no kernel passes; None where no ceiling was timed.
        cost: of the options that cost time, and of other backends.
        unserved: microseconds of ours, and the draw, where no peer serves it.
        missing: draws that a peer did not serve, by its name and why.
        wrong: what is wrong with ours.
    """

    operation: str
    draws: int
    figures: dict[str, Figures] = field(default_factory=dict)
    lowest: list[tuple[float, str, str, str]] = field(default_factory=list)
    at_ceiling: float | None = None
    cost: list[Cost] = field(default_factory=list)
    unserved: list[tuple[float, str]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio_at_ceiling(row: Row) -> float | None:
    """The fastest peer's hot time over that of the row's work at the ceiling's rate."""
    times, peer = row.times.get("hot", {}), row.fastest_peer("hot")
    if peer is None or CEILING not in times:
        return None
    return times[peer].median * 1e3 * row.ceiling_rate("hot") / row.work


def by_operation(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each operation."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.operation, []).append(row)
    return found


def reports(rows: Iterable[Row]) -> Iterator[Report]:
    """One an operation."""
    for operation, of_it in by_operation(rows).items():
        of_ceiling = Figures.of(filter(None, map(ratio_at_ceiling, of_it)))
        largest = of_ceiling.geometric_mean if of_ceiling else None
        report = Report(operation, len(of_it), at_ceiling=largest)
        ratios = [
            (ratio, condition, str(row.fastest_peer(condition)), row.case)
            for row in of_it
            for condition in CONDITIONS
            if (ratio := row.ratio(condition)) is not None
        ]
        for condition in CONDITIONS:
            figures = Figures.of(one[0] for one in ratios if one[1] == condition)
            if figures is not None:
                report.figures[condition] = figures
            for option, name in (PROMISES | OTHERS).items():
                cost = sorted(
                    times[name].median / times[OURS].median
                    for row in of_it
                    if name in (times := row.times.get(condition, {})) and OURS in times
                )
                if (of_cost := Figures.of(cost)) is not None:
                    numbers = cost[-1], quantile(cost, 0.95), of_cost.geometric_mean
                    report.cost.append(Cost(option, condition, *numbers))
        report.lowest.extend(sorted(ratios)[:LOWEST])
        for row in of_it:
            hot = row.times.get("hot", {}).get(OURS)
            if hot is not None and row.ratio("hot") is None:
                report.unserved.append((hot.median, row.case))
            for name, why in row.missing.items():
                reason = f"{name}: {why}"
                report.missing[reason] = report.missing.get(reason, 0) + 1
            for name, findings in row.findings.items():
                ours = name.startswith(OURS)
                lines = [f"{name}, {row.case}: {finding}" for finding in findings]
                if ours:
                    report.wrong.extend(lines)
                else:
                    reason = f"{name}: a wrong result"
                    report.missing[reason] = report.missing.get(reason, 0) + 1
        yield report


@dataclass(frozen=True)
class Change:
    """One operation in two runs of the same draws.

    Attributes:
        figures: by condition, the old run's time of ours over the new one's.
        machine: likewise of the peers' times, in the geometric mean: 1 on machines alike.
        slow: likewise draws whose speed fell below SLOW.
        lowest: (ratio, hot or cold, draw).
    """

    operation: str
    figures: dict[str, Figures]
    machine: dict[str, float]
    slow: dict[str, int]
    lowest: list[tuple[float, str, str]]


def changes(old: Iterable[Row], new: Iterable[Row]) -> Iterator[Change]:
    """One an operation that both have, of the draws that both have timed."""
    before = {(row.operation, row.case): row.times for row in old}
    for operation, rows in by_operation(new).items():
        found = [
            (one[name].median / taken.median, condition, row.case, name)
            for row in rows
            for condition in CONDITIONS
            for one in [before.get((operation, row.case), {}).get(condition, {})]
            for name, taken in row.times.get(condition, {}).items()
            if name in one and name != CEILING
        ]
        ours = [one[:3] for one in found if one[3] == OURS]
        figures, machine, slow = {}, {}, {}
        for condition in CONDITIONS:
            ratios = [one[0] for one in ours if one[1] == condition]
            of_ours = Figures.of(ratios)
            of_peers = Figures.of(
                one[0] for one in found if one[1] == condition and not one[3].startswith(OURS)
            )
            if of_ours is not None:
                figures[condition] = of_ours
                slow[condition] = sum(ratio < SLOW for ratio in ratios)
            if of_peers is not None:
                machine[condition] = of_peers.geometric_mean
        if figures:
            yield Change(operation, figures, machine, slow, sorted(ours)[:LOWEST])


HEAD = (
    "| operation | draws | lowest | 5th percentile | median | geometric mean |\n"
    "|---|---|---|---|---|---|"
)


def markdown(found: Iterable[Report]) -> str:
    """The workbench page's table, hot / cold."""
    lines = [HEAD]
    for report in found:
        of = [report.figures[condition] for condition in CONDITIONS if condition in report.figures]
        if of:
            cells = [
                " / ".join(f"{getattr(one, name):.2f}" for one in of)
                for name in ("lowest", "p5", "median", "geometric_mean")
            ]
            lines.append(f"| {report.operation} | {of[0].count} | {' | '.join(cells)} |")
    return "\n".join(lines)
