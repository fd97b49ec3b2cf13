"""Repeats one launch on the same inputs: with another kernel instead, under any schedule."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxemu.api import Module, array_bytes
from ptxemu.check import Finding
from ptxemu.check.checker import Checker
from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.events import Access, AccessKind, Agent, FanOut, Observer, Space
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.mutate.effects import EffectRecorder, Effects
from ptxemu.sched.policy import Policy
from ptxemu.syntax.ast import Function

_DIGITS = 16
_NUMBER_IN_MODULE = re.compile(r"(?<=L__BB)\d+(?=_)")
"""Number of the function, in the compiler's labels."""


def fingerprint(function: Function) -> str:
    """A short name of a kernel's code, by which results are known to be of it: hexadecimal digits
    that differ where instructions, guards or targets of branches do.

    Names of the kernel and of its parameters, its position in the module, comments, positions in
    the source and lines count for nothing.
    """
    labels: dict[int, list[str]] = {}
    for name, pc in function.labels.items():
        labels.setdefault(pc, []).append(name)
    own_name = re.compile(rf"\b{re.escape(function.name)}(?=\b|_param_)")
    digest = hashlib.sha256()
    for one in function.instructions:
        guard = "" if one.guard is None else f"{'!' * one.guard.negated}{one.guard.register.name}"
        line = f"{sorted(labels.get(one.pc, []))} @{guard} {one.text}\n"
        digest.update(_NUMBER_IN_MODULE.sub("", own_name.sub("", line)).encode())
    return digest.hexdigest()[:_DIGITS]


class Fault(NamedTuple):
    """Properties of a finding that tell whether another run has the same one."""

    level: str
    code: str
    first_line: int | None
    second_line: int | None

    @classmethod
    def of(cls, finding: Finding) -> Fault:
        """Return the Fault of a finding of the check."""
        first, second = finding.first, finding.second
        return cls(
            finding.level,
            finding.code,
            None if first is None else first.ptx_line,
            None if second is None else second.ptx_line,
        )


@dataclass(slots=True)
class Outcome:
    """Results of one run."""

    faults: dict[Fault, str]
    """The findings with their messages."""
    outputs: list[NDArray[np.uint8]]
    """The results after the run: everything that the kernel could write, but for scratch memory."""
    is_exact: list[NDArray[np.bool_]] = field(default_factory=list)
    """True for bytes of `outputs` that no order of additions decides; for a run of the original."""
    error_kind: str = ""
    """deadlock or error, where the run failed."""
    error: str | None = None
    reached: set[int] = field(default_factory=set)
    """PTX lines of the visible instructions that were executed."""
    waited: set[int] = field(default_factory=set)
    """Lines of `reached` where a warp had to wait."""
    warp_instructions: int = 0
    seconds: float = 0.0
    effects: Effects = field(default_factory=Effects)
    """Effects of a run of the original."""


# Bytes whose values depend on the order of floating-point additions.

_MAYBE_FLOAT = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "tensor"))


class FloatSums(Observer):
    """Notes where a run adds floating-point numbers to global memory, by atomics or reductions."""

    def __init__(self) -> None:
        self._added: list[tuple[NDArray[np.int64], int]] = []
        """First bytes of the pieces of an access, and the bytes of each."""

    def accessed(self, access: Access) -> None:
        if access.kind is AccessKind.ATOMIC and access.space is Space.GLOBAL:
            modifiers = access.instruction.modifiers
            # The type of a tensor's elements stands in its map, not in the instruction.
            if "add" in modifiers and not _MAYBE_FLOAT.isdisjoint(modifiers):
                self._added.append((access.starts.copy(), access.size))

    def is_exact(self, base: int, size: int) -> NDArray[np.bool_]:
        """Return for each byte of an array whether at most one number was added to it.

        After several additions the last bits depend on their order, which the schedule decides.
        """
        count = np.zeros(size, dtype=np.int64)
        for starts, piece in self._added:
            places = (starts[:, None] - base + np.arange(piece)).ravel()
            np.add.at(count, places[(places >= 0) & (places < size)], 1)
        return count <= 1


class _NoticedError(Exception):
    """Stops a run that has shown what it was to show."""


class _Watch(Observer):
    """Notes which lines are reached, and stops a mutant that does not end or has a new error."""

    def __init__(self, checker: Checker, limit: int | None, known: Collection[Fault]) -> None:
        """`known` are the original's faults; without a limit nothing stops the run."""
        self.lines: set[int] = set()
        self.waited: set[int] = set()
        self.count = 0
        self._checker = checker
        self._changes = 0
        self._known = known
        self._limit = limit

    def instruction_executed(self, agent: Agent, instruction: Any, lanes: int) -> None:
        self.lines.add(instruction.span.ptx_line)
        self._add(1)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        self._add(count)

    def blocked(self, agent: Agent, instruction: Any, reason: Callable[[], str]) -> None:
        self.waited.add(instruction.span.ptx_line)

    def _add(self, count: int) -> None:
        self.count += count
        if self._limit is None:
            return
        if self.count > self._limit:
            raise ExecutionError(f"it does not end: {self._limit} warp instructions")
        if self._checker.changes != self._changes:
            self._changes = self._checker.changes
            faults = (Fault.of(finding) for finding in self._checker.findings)
            if any(fault.level == "error" and fault not in self._known for fault in faults):
                raise _NoticedError


class Replay:
    """A launch with a copy of its inputs, taken when this is made.

    The launch's arrays are used in place, as their addresses are among the kernel's arguments;
    every run restores them first. Memory that is not registered cannot be restored.
    """

    def __init__(
        self, setup: LaunchSetup, scratch: Collection[str] = (), ignored: Collection[str] = ()
    ) -> None:
        """Copy the inputs.

        Args:
            scratch: names of arrays that are no results: what is left there may depend on the
                schedule.
            ignored: codes of findings that are no faults of this kernel.
        """
        for number, arg in enumerate(setup.args):
            if isinstance(arg, np.ndarray) or hasattr(arg, "data_ptr"):
                setup.memory.register(array_bytes(arg), f"argument {number}")
        self.setup = setup
        self._ignored = ignored
        self._allocations = [
            (allocation, allocation.data.copy()) for allocation in setup.memory.allocations
        ]
        self._results = [
            allocation
            for allocation in setup.memory.allocations
            if allocation.writable and allocation.name not in scratch
        ]

    @property
    def kernel(self) -> str:
        """Name of the entry point."""
        return self.setup.kernel

    @property
    def module(self) -> Module:
        """The original."""
        return self.setup.module

    def run(
        self,
        module: Module,
        policy: Policy,
        *,
        limit: int | None = None,
        known: Collection[Fault] = (),
    ) -> Outcome:
        """Run `module` instead of the original; its errors are outcomes.

        Args:
            limit: warp instructions after which the run counts as endless; None for a run of the
                original, whose `effects` are measured.
            known: the original's faults; a mutant's run ends at the first other error.
        """
        checker = Checker(self.kernel) if limit is not None else EffectRecorder(self.kernel)
        watch = _Watch(checker, limit, known)
        sums = FloatSums() if limit is None else Observer()
        error, kind = None, ""
        started = time.monotonic()
        try:
            self.setup.launch(
                module=module,
                memory=self._restored(),
                policy=policy,
                observer=FanOut(watch, checker, sums),
            )
            checker.finish()
        except _NoticedError:
            checker.finish()
        except ExecutionError as failure:
            kind = "deadlock" if isinstance(failure, DeadlockError) else "error"
            error = str(failure)
        return Outcome(
            faults={
                Fault.of(finding): finding.message
                for finding in checker.findings
                if finding.code not in self._ignored
            },
            outputs=[allocation.data.copy() for allocation in self._results],
            is_exact=[sums.is_exact(a.base, len(a.data)) for a in self._results]
            if isinstance(sums, FloatSums)
            else [],
            error_kind=kind,
            error=error,
            reached=watch.lines,
            waited=watch.waited,
            warp_instructions=watch.count,
            seconds=time.monotonic() - started,
            effects=checker.effects if isinstance(checker, EffectRecorder) else Effects(),
        )

    def _restored(self) -> GlobalMemory:
        memory = GlobalMemory(allow_unregistered=self.setup.memory.allow_unregistered)
        for allocation, before in self._allocations:
            if allocation.writable:
                allocation.data[:] = before
            memory.register(
                allocation.data, allocation.name, base=allocation.base, writable=allocation.writable
            )
        return memory
