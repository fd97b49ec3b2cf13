"""Findings of several schedules as one list: each once, with the seeds that show it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ptxemu.api import LaunchResult
from ptxemu.check import Finding
from ptxemu.check.findings import BY_LINES, SEVERITY, UNORDERED, Site
from ptxemu.cli.outcome import Outcome, Results
from ptxemu.exploration import Order
from ptxemu.sched.policy import Policy

_Key: TypeAlias = "tuple[object, ...]"
_ADDRESS = re.compile("0x[0-9a-f]+")
"""Arrays have other addresses in each process."""


@dataclass
class Tried:
    """One schedule, and the outcome of the run under it."""

    seed: int
    asynchronous: str
    outcome: Outcome | None = None
    path: tuple[int, ...] | None = None
    """The order of synchronisation, where that was chosen."""

    @property
    def options(self) -> str:
        """Options that repeat it."""
        if self.path is not None:
            return f"--order {','.join(map(str, self.path)) or '-'}"
        usual = self.asynchronous == Policy().asynchronous
        return f"--seed {self.seed}" + ("" if usual else f" --async {self.asynchronous}")


def merged(runs: Sequence[Tried]) -> Outcome:
    """One outcome of all runs, in the order of their seeds whichever came first.

    Launches, arrays and notes are those of the first run that has them; the exit code is the first
    that is not 0.
    """
    outcomes = [(one, one.outcome) for one in runs if one.outcome is not None]
    if not outcomes:
        return Outcome("", "", 0, Results())
    first = next((outcome for _, outcome in outcomes if outcome.name), outcomes[0][1])
    worst = next((outcome for _, outcome in outcomes if outcome.exit_code), first)
    results = Results(
        _launches(outcomes),
        _findings((one, outcome.ran.findings) for one, outcome in outcomes),
        _failures(outcomes),
        list(dict.fromkeys(_notes(outcomes))),
        max(outcome.ran.unfinished for _, outcome in outcomes),
    )
    return replace(
        first,
        exit_code=worst.exit_code,
        ran=results,
        error=worst.error,
        seeds=tuple(one.seed for one in runs),
    )


def _notes(outcomes: Sequence[tuple[Tried, Outcome]]) -> Iterator[str]:
    """Notes of the runs, and which of them ended with an exit code of their own."""
    seeds: dict[int, list[int]] = {}
    for one, outcome in outcomes:
        yield from outcome.ran.notes
        seeds.setdefault(outcome.exit_code, []).append(one.seed)
    if len(seeds) > 1:
        for code, shown in seeds.items():
            if code:
                yield f"the host code ends with exit code {code} under {seed_names(shown)}"


def _findings(runs: Iterable[tuple[Tried, Sequence[Finding]]]) -> list[Finding]:
    """The findings of runs: one is the same in two of them if code and instructions are.

    Of those that are the same the first of the gravest is kept. A run's findings of several
    launches stay apart.
    """
    kept: dict[_Key, tuple[Finding, Tried]] = {}
    seeds: dict[_Key, list[int]] = {}
    for one, findings in runs:
        before: Counter[_Key] = Counter()
        for finding in findings:
            about = _key(finding)
            key = (*about, before[about])
            before[about] += 1
            seeds.setdefault(key, []).append(one.seed)
            if key not in kept or SEVERITY[finding.level] > SEVERITY[kept[key][0].level]:
                kept[key] = finding, one
    return [
        replace(finding, seeds=tuple(seeds[key]), repeat=one.options)
        for key, (finding, one) in kept.items()
    ]


def _key(finding: Finding) -> _Key:
    """Return what tells findings apart, as within a run (`check.findings`)."""
    sites = [_place(site) for site in (finding.first, finding.second)]
    if finding.code in UNORDERED:
        return "unordered", *sorted(map(str, sites))
    if finding.code in BY_LINES:
        return finding.code, *sorted(finding.lines)
    about = _ADDRESS.sub("", finding.message) if finding.second is None else ""
    return finding.code, *map(str, sites), about


def _place(site: Site | None) -> tuple[str, int | None]:
    return ("", None) if site is None else (site.kernel, site.pc)


def _launches(outcomes: Sequence[tuple[Tried, Outcome]]) -> list[LaunchResult]:
    """The launches of the run with most of them, each with what all runs found in it."""
    longest = max((outcome.ran.launches for _, outcome in outcomes), key=len)
    return [
        replace(launch, findings=_findings(_of_launch(outcomes, number, launch.kernel)))
        for number, launch in enumerate(longest)
    ]


def _of_launch(
    outcomes: Sequence[tuple[Tried, Outcome]], number: int, kernel: str
) -> Iterator[tuple[Tried, Sequence[Finding]]]:
    for one, outcome in outcomes:
        launches = outcome.ran.launches
        if number < len(launches) and launches[number].kernel == kernel:
            yield one, launches[number].findings


def of_orders(orders: Iterable[Order]) -> tuple[list[Finding], list[str]]:
    """The findings and failures of all orders: each once, with the first order that shows it."""
    runs = [(Tried(number, "", path=order.path), order) for number, order in enumerate(orders)]
    findings = [
        replace(finding, orders=len(finding.seeds), seeds=())
        for finding in _findings((one, order.findings) for one, order in runs)
    ]
    failures: dict[str, tuple[Order, int]] = {}
    for _, order in runs:
        if order.failure is not None:
            line = _ADDRESS.sub("", order.failure.splitlines()[0])
            first, count = failures.get(line, (order, 0))
            failures[line] = first, count + 1
    texts = []
    for first, count in failures.values():
        assert first.failure is not None
        line, *rest = first.failure.splitlines()
        repeat = Tried(0, "", path=first.path).options
        orders_ = "order" if count == 1 else "orders"
        texts.append("\n".join([f"{line} [{count} {orders_}; repeat with {repeat}]", *rest]))
    return findings, texts


def _failures(outcomes: Sequence[tuple[Tried, Outcome]]) -> list[str]:
    """Failures with the seeds that show them: the same if their first lines are."""
    texts: dict[str, tuple[str, Tried]] = {}
    seeds: dict[str, list[int]] = {}
    for one, outcome in outcomes:
        for failure in outcome.ran.failures:
            key = _ADDRESS.sub("", failure.splitlines()[0])
            texts.setdefault(key, (failure, one))
            seeds.setdefault(key, []).append(one.seed)
    found = []
    for key, (text, one) in texts.items():
        line, *rest = text.splitlines()
        facts = f"{line} [{seed_names(seeds[key])}; repeat with {one.options}]"
        found.append("\n".join([facts, *rest]))
    return found


def seed_names(seeds: Sequence[int]) -> str:
    """Seeds for people: "seed 3", "seeds 0 to 7", "seeds 1, 4, 5"."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"
