"""The result of a mutation run as a table by category, a list of survivors, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ptxemu.mutate.runner import (
    CAUGHT,
    EQUIVALENT,
    NOT_REACHED,
    NOTED,
    REDUNDANT,
    SURVIVED,
    Baseline,
    Result,
)
from ptxemu.mutate.sites import CATEGORIES
from ptxemu.trace.text import table

_VERDICTS = (CAUGHT, NOTED, SURVIVED, REDUNDANT, EQUIVALENT, NOT_REACHED)
_WAITS = ("mbarrier-wait", "group-wait", "tcgen05-wait")


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one kernel's mutants."""

    kernel: str
    baseline: Baseline
    results: Sequence[Result]

    def share(self, category: str | None = None) -> float | None:
        """Caught of those that could be: reached, neither redundant nor equivalent; None where
        there are none."""
        return self._share(category, (CAUGHT, NOTED, SURVIVED))

    def share_of_reached(self, category: str | None = None) -> float | None:
        """Caught of all that the launch reaches."""
        return self._share(category, (CAUGHT, NOTED, SURVIVED, REDUNDANT, EQUIVALENT))

    def _share(self, category: str | None, counted: Sequence[str]) -> float | None:
        verdicts = Counter(r.verdict for r in self._of(category))
        possible = sum(verdicts[verdict] for verdict in counted)
        return verdicts[CAUGHT] / possible if possible else None

    @property
    def survivors(self) -> list[Result]:
        """The mutants that nothing of level warning or error noticed."""
        return [r for r in self.results if r.verdict in (SURVIVED, NOTED)]

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        head = ["category", "sites", "mutants", *_VERDICTS, "of reached", "share"]
        rows = [self._row(c, c) for c in CATEGORIES if self._of(c)]
        rows.append(self._row("all", None))
        errors = sum(fault.level == "error" for fault in self.baseline.faults)
        warnings = sum(fault.level == "warning" for fault in self.baseline.faults)
        lines = [
            f"kernel {self.kernel}",
            f"the original: {errors} errors, {warnings} warnings",
            "",
            table(head, rows),
        ]
        caught = Counter(r.how for r in self.results if r.verdict == CAUGHT)
        if caught:
            lines.append("caught by: " + ", ".join(f"{how} {n}" for how, n in caught.most_common()))
        return lines + self._listed()

    def _listed(self) -> list[str]:
        lines: list[str] = []
        for title, verdict in (
            ("survivors", SURVIVED),
            ("only a note tells of", NOTED),
            ("redundant in this launch, as measured on the original", REDUNDANT),
            ("equivalent, as explained", EQUIVALENT),
            ("not reached by this launch", NOT_REACHED),
        ):
            found = [r for r in self.results if r.verdict == verdict]
            if found:
                lines += ["", f"{title}:"]
                lines += [f"  {_place(r)}{self._remark(r)}" for r in found]
        return lines

    def _remark(self, result: Result) -> str:
        if result.verdict in (REDUNDANT, EQUIVALENT):
            return f" -- {result.how}"
        site = result.mutation.site
        never = site.category in _WAITS and site.line not in self.baseline.waited
        if result.verdict == SURVIVED and never:
            return " -- no warp ever had to wait here in this launch"
        return ""

    def _of(self, category: str | None) -> list[Result]:
        return [r for r in self.results if category in (None, r.mutation.site.category)]

    def _row(self, name: str, category: str | None) -> list[str]:
        results = self._of(category)
        verdicts = Counter(r.verdict for r in results)
        sites = {(r.mutation.site.category, r.mutation.site.instruction.pc) for r in results}
        shares = self.share_of_reached(category), self.share(category)
        return [
            name,
            str(len(sites)),
            str(len(results)),
            *(str(verdicts[verdict] or ".") for verdict in _VERDICTS),
            *("-" if share is None else f"{share:.0%}" for share in shares),
        ]

    def to_json_dict(self) -> dict[str, Any]:
        """Return the report for `--json`."""
        return {
            "kernel": self.kernel,
            "share": self.share(),
            "share_of_reached": self.share_of_reached(),
            "seconds_per_run": round(self.baseline.seconds, 3),
            "original": [fault._asdict() for fault in sorted(self.baseline.faults, key=str)],
            "categories": {
                category: {
                    "mutants": len(self._of(category)),
                    **Counter(r.verdict for r in self._of(category)),
                    "share": self.share(category),
                }
                for category in CATEGORIES
                if self._of(category)
            },
            "mutants": [facts_of(result) for result in self.results],
        }


def _place(result: Result) -> str:
    site = result.mutation.site
    span = site.instruction.span
    guard = site.instruction.guard
    guarded = "" if guard is None else f"@{'!' if guard.negated else ''}{guard.register.name} "
    return f"{site.name} {result.mutation.name}: {span}: {guarded}{site.instruction.text}"


def facts_of(result: Result) -> dict[str, Any]:
    """One mutant of the JSON."""
    span = result.mutation.site.instruction.span
    policy = result.policy
    return {
        "category": result.mutation.site.category,
        "number": result.mutation.site.number,
        "mutation": result.mutation.name,
        "ptx_line": span.ptx_line,
        "source_file": span.source_file,
        "source_line": span.source_line,
        "instruction": result.mutation.site.instruction.text,
        "verdict": result.verdict,
        "how": result.how,
        "message": result.message,
        "policy": None if policy is None else f"{policy.asynchronous}/{policy.warps}/{policy.seed}",
        "launch": result.launch,
        "seconds": round(result.seconds, 3),
    }
