"""Runs mutants until something notices them, in several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ptxemu.api import Module
from ptxemu.check import Finding
from ptxemu.errors import IllegalInstructionError, PtxEmuError, UnsupportedInstructionError
from ptxemu.mutate.mutations import Mutation, mutations_of
from ptxemu.sched.policy import Policy

POLICIES = (
    Policy(asynchronous="random", warps="random", seed=0),
    Policy(asynchronous="late", warps="round_robin", seed=0),
    Policy(asynchronous="eager", warps="round_robin", seed=0),
    Policy(asynchronous="random", warps="random", seed=1, timeouts=0.1),
)
"""Tried in turn until a mutant is caught; with timeouts, so that code behind them is reached."""
_ENDLESS = 10
_ENDLESS_AT_LEAST = 200_000
_SHOWN_MESSAGE = 200

_EQUIVALENT = re.compile(r"(?P<place>\S+)\s+(?P<name>[^:]+?)\s*:\s*(?P<reason>.+)")

CAUGHT, NOTED, SURVIVED = "caught", "noted", "survived"
EQUIVALENT, NOT_REACHED = "equivalent", "not reached"


class Fault(NamedTuple):
    """What tells findings apart from those of another run."""

    level: str
    code: str
    first_line: int | None
    second_line: int | None

    @classmethod
    def of(cls, finding: Finding) -> Fault:
        """Of a finding of the check."""
        first, second = finding.first, finding.second
        return cls(
            finding.level,
            finding.code,
            None if first is None else first.ptx_line,
            None if second is None else second.ptx_line,
        )


@dataclass(slots=True)
class Outcome:
    """What came of one run."""

    faults: dict[Fault, str]
    """The findings with their messages."""
    outputs: list[NDArray[np.uint8]]
    """Everything that the kernel could write, after the run."""
    error_kind: str = ""
    """deadlock or error, where the run failed."""
    error: str | None = None
    reached: set[int] = field(default_factory=set)
    """PTX lines of the visible instructions that were executed."""
    waited: set[int] = field(default_factory=set)
    """Of those the lines where a warp had to wait."""
    warp_instructions: int = 0


class Subject(Protocol):
    """A kernel that can be run again and again (`replay.Replay`)."""

    @property
    def kernel(self) -> str:
        """Name of the entry point."""

    @property
    def module(self) -> Module:
        """The original."""

    def run(self, module: Module, policy: Policy, *, limit: int | None = None) -> Outcome:
        """Run a module in the place of the original, on the original's inputs."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one mutant."""

    mutation: Mutation
    verdict: str
    """caught, noted (only a note says so), survived, equivalent (as somebody explained), not
    reached."""
    how: str = ""
    """deadlock, error, finding, warning or wrong result; the reason why it is equivalent."""
    message: str = ""
    policy: Policy | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Baseline:
    """What the original does under every policy."""

    faults: set[Fault]
    outputs: list[NDArray[np.uint8]]
    is_stable: list[NDArray[np.bool_]]
    """Bytes that come out the same under every policy (floating-point atomics need not)."""
    reached: set[int]
    waited: set[int]
    """Lines where a warp had to wait under some policy."""
    limit: int
    seconds: float
    """Of one run."""


class Equivalents:
    """Mutants that are known to be as good as the original, with the reasons."""

    def __init__(self, entries: Sequence[tuple[str, str, str]] = ()) -> None:
        """Entries of place, name of the mutation (or *) and reason.

        A place is a PTX line, or file:line of the source, the file without its folders.
        """
        self._reasons = {(place, name): reason for place, name, reason in entries}

    @classmethod
    def parse(cls, text: str) -> Equivalents:
        """Lines of "place mutation: reason" and # comments.

        Raises:
            ValueError: naming the line.
        """
        entries = []
        for line in text.splitlines():
            content = line.split("#", 1)[0].strip()
            match = _EQUIVALENT.fullmatch(content)
            if match is not None:
                entries.append((match["place"], match["name"], match["reason"]))
            elif content:
                raise ValueError(f"expected 'place mutation: reason'; got {line!r}")
        return cls(entries)

    def reason(self, mutation: Mutation) -> str | None:
        """Why a mutant is equivalent, or None."""
        span = mutation.site.instruction.span
        places = [str(span.ptx_line)]
        if span.source_file is not None:
            places.append(f"{os.path.basename(span.source_file)}:{span.source_line}")
        for key in itertools.product(places, (mutation.name, "*")):
            if key in self._reasons:
                return self._reasons[key]
        return None


def mutate(
    subject: Subject,
    *,
    only: Sequence[str] = (),
    limit: int | None = None,
    jobs: int = 1,
    policies: Sequence[Policy] = POLICIES,
    equivalents: Equivalents | None = None,
    on_result: Callable[[int, int, Result], None] | None = None,
) -> tuple[Baseline, list[Result]]:
    """Try every mutant of a kernel.

    Args:
        only: categories (`sites.CATEGORIES`); all by default.
        limit: at most so many mutants, spread evenly over the kernel.
        jobs: processes.
        on_result: called with (done, all, result).

    Raises:
        PtxEmuError: the original fails.
    """
    baseline = measure(subject, policies)
    function = subject.module.syntax.functions[subject.kernel]
    chosen = [m for m in mutations_of(function) if not only or m.site.category in only]
    if limit is not None and limit < len(chosen):
        chosen = [chosen[k * len(chosen) // limit] for k in range(limit)]
    trial = _Trial(subject, baseline, policies, equivalents or Equivalents(), chosen)
    results: dict[int, Result] = {}
    for index, result in trial.results(jobs):
        results[index] = result
        if on_result is not None:
            on_result(len(results), len(chosen), result)
    return baseline, [results[index] for index in range(len(chosen))]


def measure(subject: Subject, policies: Sequence[Policy]) -> Baseline:
    """Run the original under every policy.

    Raises:
        PtxEmuError: it fails.
    """
    started = time.monotonic()
    outcomes = [subject.run(subject.module, policy) for policy in policies]
    for policy, outcome in zip(policies, outcomes, strict=True):
        if outcome.error is not None:
            raise PtxEmuError(f"the original fails under {policy}: {outcome.error}")
    first = outcomes[0]
    return Baseline(
        faults={fault for outcome in outcomes for fault in outcome.faults},
        outputs=first.outputs,
        is_stable=[
            np.all([o.outputs[k] == output for o in outcomes], axis=0)
            for k, output in enumerate(first.outputs)
        ],
        reached=set().union(*(outcome.reached for outcome in outcomes)),
        waited=set().union(*(outcome.waited for outcome in outcomes)),
        limit=max(_ENDLESS * max(o.warp_instructions for o in outcomes), _ENDLESS_AT_LEAST),
        seconds=(time.monotonic() - started) / len(policies),
    )


class _Trial:
    """The mutants of one kernel on trial."""

    def __init__(
        self,
        subject: Subject,
        baseline: Baseline,
        policies: Sequence[Policy],
        equivalents: Equivalents,
        mutations: Sequence[Mutation],
    ) -> None:
        self._subject = subject
        self._baseline = baseline
        self._policies = policies
        self._equivalents = equivalents
        self._mutations = mutations

    def results(self, jobs: int) -> Iterator[tuple[int, Result]]:
        """Each mutant's number and result, as they come."""
        if jobs <= 1 or len(self._mutations) <= 1:
            for index in range(len(self._mutations)):
                yield index, self.judge(index)
            return
        global _current
        _current = self  # arrays stay at their addresses in a forked process
        context = multiprocessing.get_context("fork")
        try:
            with context.Pool(min(jobs, len(self._mutations))) as pool:
                yield from pool.imap_unordered(_judge_current, range(len(self._mutations)))
        finally:
            _current = None

    def judge(self, index: int) -> Result:
        """Try one mutant."""
        mutation = self._mutations[index]
        reason = self._equivalents.reason(mutation)
        if mutation.site.line not in self._baseline.reached:
            return Result(mutation, NOT_REACHED)
        started = time.monotonic()
        subject = self._subject
        syntax = mutation.apply(subject.module.syntax, subject.kernel)
        module = Module(syntax, device=subject.module.device)
        note = ""
        for policy in self._policies:
            try:
                outcome = subject.run(module, policy, limit=self._baseline.limit)
            except (IllegalInstructionError, UnsupportedInstructionError) as error:
                raise PtxEmuError(
                    f"mutant {mutation.site.line} {mutation.name}: {error}"
                ) from error
            noticed = self._noticed(outcome)
            if noticed is not None:
                how, message = noticed
                seconds = time.monotonic() - started
                return Result(mutation, CAUGHT, how, _short(message), policy, seconds)
            note = note or next((outcome.faults[f] for f in self._new(outcome, "note")), "")
        seconds = time.monotonic() - started
        if reason is not None:
            return Result(mutation, EQUIVALENT, reason, "", None, seconds)
        return Result(mutation, NOTED if note else SURVIVED, "", _short(note), None, seconds)

    def _new(self, outcome: Outcome, level: str) -> list[Fault]:
        return [f for f in outcome.faults if f.level == level and f not in self._baseline.faults]

    def _noticed(self, outcome: Outcome) -> tuple[str, str] | None:
        """How a run differs from the original, and a message; None if it does not."""
        for level, how in (("error", "finding"), ("warning", "warning")):
            for fault in self._new(outcome, level):
                return how, outcome.faults[fault]
        if outcome.error is not None:
            return outcome.error_kind, outcome.error
        baseline = self._baseline
        for number, output in enumerate(outcome.outputs):
            wrong = (output != baseline.outputs[number]) & baseline.is_stable[number]
            if wrong.any():
                return "wrong result", f"{int(wrong.sum())} bytes of array {number} differ"
        return None


_current: _Trial | None = None


def _judge_current(index: int) -> tuple[int, Result]:
    assert _current is not None
    return index, _current.judge(index)


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _SHOWN_MESSAGE else f"{line[:_SHOWN_MESSAGE]}..."
