"""Runs mutants until something notices them, in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ptxemu.api import Module
from ptxemu.errors import (
    IllegalInstructionError,
    LaunchError,
    PtxEmuError,
    UnsupportedInstructionError,
)
from ptxemu.mutate.effects import Effects
from ptxemu.mutate.equivalents import Equivalents
from ptxemu.mutate.groups import ONE_MORE, family_of
from ptxemu.mutate.replay import Fault, Outcome, Replay
from ptxemu.mutate.sites import REMOVED, Mutation, mutations_of
from ptxemu.sched.policy import Policy

POLICIES = (
    Policy(asynchronous="random", warps="random", seed=0),
    Policy(asynchronous="late", warps="round_robin", seed=0),
    Policy(asynchronous="eager", warps="round_robin", seed=0),
    Policy(asynchronous="random", warps="random", seed=1, timeouts=0.1),
)
"""Tried until a mutant is caught; with timeouts, so that code after them is reached."""
_ENDLESS = 5
_ENDLESS_AT_LEAST = 100_000
_SHOWN_MESSAGE = 200

CAUGHT, NOTED, SURVIVED = "caught", "noted", "survived"
REDUNDANT, EQUIVALENT, NOT_REACHED = "redundant", "equivalent", "not reached"

_REASONS = {
    "mbarrier-wait": "all that it waits for had happened before it by other ways",
    "group-wait": "nothing was pending that was not known to be done",
    "tcgen05-wait": "nothing was pending",
    "barrier": "nobody learnt of anything by it",
    "cluster-barrier": "nobody learnt of anything by it",
    "proxy-fence": "no access was waiting for it to be ordered for the other proxy",
    "init-fence": "no initialisation was waiting for it",
    "wgmma-fence": "the fences before it order all that the products behind it use",
    "tcgen05-fence": "the fences around it order all that it orders",
    "order": "nobody learnt of an access by it",
}
"""Why an instruction without effect had none; the other categories always count as needed."""
_SAME_GROUPS = "nothing more would be pending when the warp does something that depends on it"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one mutant."""

    mutation: Mutation
    verdict: str
    """caught, noted (only a note says so), redundant (its instruction had no effect in the
    original), equivalent (as somebody explained), survived, not reached."""
    how: str = ""
    """deadlock, error, finding, warning, wrong result or note; why it is redundant or
    equivalent."""
    message: str = ""
    policy: Policy | None = None
    seconds: float = 0.0
    launch: int | None = None
    """Number of the launch (from 0) in which it was caught or noted."""


@dataclass(slots=True)
class Baseline:
    """Behaviour of the original under every policy."""

    faults: set[Fault]
    outputs: list[NDArray[np.uint8]]
    is_stable: list[NDArray[np.bool_]]
    """Bytes that come out the same under every policy, and that no order of additions decides."""
    reached: set[int]
    waited: set[int]
    """Lines where a warp had to wait under some policy."""
    effects: Effects
    limit: int
    """Warp instructions after which a mutant counts as endless."""
    seconds: float
    """Duration of one run (of every launch)."""


def mutate(
    subject: Replay,
    *,
    also: Sequence[Replay] = (),
    only: Sequence[str] = (),
    limit: int | None = None,
    jobs: int = 1,
    policies: Sequence[Policy] = POLICIES,
    equivalents: Equivalents | None = None,
    notes: bool = False,
    known: Mapping[tuple[str, str], Result] | None = None,
    on_result: Callable[[int, int, Result], None] | None = None,
) -> tuple[Baseline, list[Result]]:
    """Try every mutant of a kernel.

    Args:
        also: other launches of the same kernel, for what one launch does not need: a mutant is
            caught if it is in one of them.
        only: categories (`sites.CATEGORIES`); all by default.
        limit: at most so many mutants, spread evenly over the kernel.
        jobs: processes.
        policies: if lanes of a warp go apart in one of them, bar.warp.sync is tried, too.
        notes: a new note is enough to catch a mutant: for a kernel that is to have none.
        known: results that stand, by names of site and mutation: these are not tried.
        on_result: called with (done, all, result).

    Raises:
        PtxEmuError: the original fails.
        LaunchError: `also` has another kernel.
    """
    subjects = [subject, *also]
    for other in also:
        if (other.kernel, other.module.text) != (subject.kernel, subject.module.text):
            raise LaunchError("the launches are not of one kernel: their PTX differs")
    function = subject.module.syntax.functions[subject.kernel]
    are_apart = any(policy.lanes_apart for policy in policies)
    every = mutations_of(function, warp_syncs=are_apart)
    chosen = [mutation for mutation in every if not only or mutation.site.category in only]
    if limit is not None and limit < len(chosen):
        chosen = [chosen[k * len(chosen) // limit] for k in range(limit)]
    runs = [(one, policy) for one in subjects for policy in policies]
    outcomes = dict(in_processes(lambda index: _original(*runs[index]), len(runs), jobs))
    baselines = [
        _baseline([outcomes[first + k] for k in range(len(policies))])
        for first in range(0, len(runs), len(policies))
    ]
    trial = Trial(subjects, baselines, policies, chosen, equivalents or Equivalents(), notes)
    names = [(mutation.site.name, mutation.name) for mutation in chosen]
    results = {i: known[name] for i, name in enumerate(names) if known and name in known}
    # Those that are argued come last: they run longest, and a run that is stopped lacks only these.
    left = (index for index in range(len(chosen)) if index not in results)
    open_ = sorted(left, key=lambda index: trial.is_argued(chosen[index]))
    for number, result in in_processes(lambda n: trial.judge(open_[n]), len(open_), jobs):
        results[open_[number]] = result
        if on_result is not None:
            on_result(len(results), len(chosen), result)
    return trial.merged, [results[index] for index in range(len(chosen))]


def measure(subject: Replay, policies: Sequence[Policy]) -> Baseline:
    """Run the original under every policy.

    Raises:
        PtxEmuError: it fails.
    """
    return _baseline([_original(subject, policy) for policy in policies])


def _original(subject: Replay, policy: Policy) -> Outcome:
    outcome = subject.run(subject.module, policy)
    if outcome.error is not None:
        raise PtxEmuError(f"the original fails under {policy}: {outcome.error}")
    return outcome


def _baseline(outcomes: Sequence[Outcome]) -> Baseline:
    first = outcomes[0]
    return Baseline(
        faults={fault for outcome in outcomes for fault in outcome.faults},
        outputs=first.outputs,
        is_stable=[
            np.all([(o.outputs[k] == output) & o.is_exact[k] for o in outcomes], axis=0)
            for k, output in enumerate(first.outputs)
        ],
        reached=set().union(*(outcome.reached for outcome in outcomes)),
        waited=set().union(*(outcome.waited for outcome in outcomes)),
        effects=functools.reduce(Effects.united, (outcome.effects for outcome in outcomes)),
        limit=max(_ENDLESS * max(o.warp_instructions for o in outcomes), _ENDLESS_AT_LEAST),
        seconds=sum(outcome.seconds for outcome in outcomes) / len(outcomes),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One launch under one policy."""

    launch: int
    subject: Replay
    baseline: Baseline
    policy: Policy


class Trial:
    """The mutants of one kernel on trial; `mutate` runs one, tests run some of one's mutants."""

    def __init__(
        self,
        subjects: Sequence[Replay],
        baselines: Sequence[Baseline],
        policies: Sequence[Policy],
        mutations: Sequence[Mutation],
        equivalents: Equivalents,
        notes: bool = False,
    ) -> None:
        """Take each subject's `measure`d original in `baselines`; the others as in `mutate`."""
        self.merged = functools.reduce(_merged, baselines)
        """Behaviour of the originals, all launches taken together."""
        launches = sorted(
            enumerate(zip(subjects, baselines, strict=True)), key=lambda launch: launch[1][1].limit
        )
        self._runs = [
            _Run(launch, subject, baseline, policy)
            for policy in policies
            for launch, (subject, baseline) in launches
        ]
        self._equivalents = equivalents
        self._mutations = mutations
        self._notes = notes

    def is_argued(self, mutation: Mutation) -> bool:
        """Whether somebody has explained why it is harmless."""
        return self._equivalents.reason(mutation) is not None

    def judge(self, index: int) -> Result:
        """Try one mutant: under each policy the shortest launch first."""
        mutation = self._mutations[index]
        started = time.monotonic()
        if mutation.site.line not in self.merged.reached:
            return Result(mutation, NOT_REACHED)
        idle = self._why_redundant(mutation)
        note, noted_in = "", None
        for run in self._runs_of(mutation, once=idle is not None):
            outcome = _run_mutant(run, mutation)
            noticed = _noticed(outcome, run.baseline)
            # Lines that only a note is of come and go with the schedule: what the original of
            # another launch has is no news. But a weaker order leaves the schedule as it is.
            same_way = mutation.site.category == "order"
            notes = _new(outcome, run.baseline if same_way else self.merged, "note")
            if noticed is None and notes and self._notes:
                noticed = "note", outcome.faults[notes[0]]
            if noticed is not None:
                how, message = noticed
                seconds = time.monotonic() - started
                return Result(
                    mutation, CAUGHT, how, _short(message), run.policy, seconds, run.launch
                )
            if notes and noted_in is None:
                note, noted_in = outcome.faults[notes[0]], run.launch
        verdict, how = NOTED if note else SURVIVED, ""
        reason = self._equivalents.reason(mutation)
        if idle is not None and not note:
            verdict, how = REDUNDANT, idle
        elif reason is not None:
            verdict, how = EQUIVALENT, reason
        seconds = time.monotonic() - started
        return Result(mutation, verdict, how, _short(note), None, seconds, noted_in)

    def _runs_of(self, mutation: Mutation, *, once: bool) -> list[_Run]:
        """Those that reach it; with `once` only the first of each launch.

        That is for an instruction that is measured to have no effect in any of them: what its
        mutant does is known.
        """
        runs = [run for run in self._runs if mutation.site.line in run.baseline.reached]
        if not once:
            return runs
        return list({run.launch: run for run in reversed(runs)}.values())

    def _why_redundant(self, mutation: Mutation) -> str | None:
        site = mutation.site
        waits = site.category in ("mbarrier-wait", "barrier", "cluster-barrier")
        effects = self.merged.effects
        is_idle = effects.is_idle(site.instruction.pc, waits=waits)
        if is_idle and site.category in _REASONS:
            return _REASONS[site.category]
        is_about_groups = family_of(site.instruction) and mutation.name in (REMOVED, ONE_MORE)
        if is_about_groups and effects.is_idle_change(site.instruction.pc, mutation.name):
            return _SAME_GROUPS
        return None


def _run_mutant(run: _Run, mutation: Mutation) -> Outcome:
    subject, original = run.subject, run.baseline
    syntax = mutation.apply(subject.module.syntax, subject.kernel)
    module = Module(syntax, device=subject.module.device)
    try:
        return subject.run(module, run.policy, limit=original.limit, known=original.faults)
    except (IllegalInstructionError, UnsupportedInstructionError) as error:
        raise PtxEmuError(f"mutant {mutation.site.line} {mutation.name}: {error}") from error


def _merged(one: Baseline, other: Baseline) -> Baseline:
    return replace(
        one,
        faults=one.faults | other.faults,
        reached=one.reached | other.reached,
        waited=one.waited | other.waited,
        effects=one.effects.united(other.effects),
        seconds=one.seconds + other.seconds,
    )


def _new(outcome: Outcome, baseline: Baseline, level: str) -> list[Fault]:
    return [f for f in outcome.faults if f.level == level and f not in baseline.faults]


def _noticed(outcome: Outcome, baseline: Baseline) -> tuple[str, str] | None:
    """Return the kind of a run's difference from the original, and a message; None without one."""
    for level, how in (("error", "finding"), ("warning", "warning")):
        for fault in _new(outcome, baseline, level):
            return how, outcome.faults[fault]
    if outcome.error is not None:
        return outcome.error_kind, outcome.error
    for number, output in enumerate(outcome.outputs):
        wrong = (output != baseline.outputs[number]) & baseline.is_stable[number]
        if wrong.any():
            return "wrong result", f"{int(wrong.sum())} bytes of array {number} differ"
    return None


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _SHOWN_MESSAGE else f"{line[:_SHOWN_MESSAGE]}..."


# Work for several processes.

_T = TypeVar("_T")


def in_processes(task: Callable[[int], _T], count: int, jobs: int) -> Iterator[tuple[int, _T]]:
    """Each number below `count` with what `task` makes of it, as they come."""
    if jobs <= 1 or count <= 1:
        for index in range(count):
            yield index, task(index)
        return
    global _current
    _current = task  # arrays stay at their addresses in a forked process
    context = multiprocessing.get_context("fork")
    try:
        with context.Pool(min(jobs, count), _leave_signals_to_parent) as pool:
            yield from pool.imap_unordered(_run_current, range(count))
    finally:
        _current = None


_current: Callable[[int], Any] | None = None


def _leave_signals_to_parent() -> None:
    """A process of the pool: the terminal's Ctrl-C is the parent's, which ends it by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_current(index: int) -> tuple[int, Any]:
    assert _current is not None
    return index, _current(index)
