"""The table of implementations and the choice among them: explicit, or automatic and said once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from flashdsa.backends.emulated.packages import missing_packages, say_missing
from flashdsa.backends.features import ELSEWHERE, MACHINE, PACKAGE, Features, Reason, explain
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.problem import Problem
from flashdsa.settings import BACKENDS, Settings

logger = logging.getLogger("flashdsa.dispatch")


@dataclass(frozen=True)
class Implementation:
    """One operation on one backend: where its code is and what it can do.

    `bind` is "module:function"; the module is imported at the first call, so that listing the table
    never imports a compiler. The function is `bind(runner, operands, **parameters)`: for operands
    that are checked it chooses kernels and makes them ready, and returns a function that serves
    them and such operands as differ from them only in their values and free sizes. It need not take
    a parameter that its features leave one value.

    `runner` is "module:function": for a device it gives the `Runner`. Without one `bind` names a
    function `f(operands, **parameters)` that serves a call by itself.

    `auto` takes the implementation with the highest `priority` of those that can serve, never one
    that is not `automatic`.

    `binds_each_call`: the runner may be another one at the next call.

    `package` must be installed, besides those that flashdsa needs.
    """

    operation: str
    backend: str
    bind: str
    features: Features
    priority: int = 0
    automatic: bool = True
    runner: str = ""
    binds_each_call: bool = False
    package: str = ""

    def reasons_against(self, problem: Problem) -> list[Reason]:
        """Why it cannot serve `problem`; empty when it can."""
        reasons = list(self.features.missing(problem))
        if self.package and not is_installed(self.package):
            missing = dict.fromkeys([*missing_packages(self.backend), self.package])
            reasons.append(Reason(PACKAGE, (), self.package, say_missing([*missing])))
        return reasons

    def load(self) -> Bind:
        """The function that binds calls, of an operation's tuple of operands (`flashdsa.ops`),
        which are checked, and its parameters by keyword."""
        if not self.runner:
            return partial(_bind_nothing, _load(self.bind))
        on_runner = partial(_bind_on_runner, self.binder(), _load(self.runner))
        return partial(_bind_each_call, on_runner) if self.binds_each_call else on_runner

    def binder(self) -> Bind:
        """The function that `bind` names, of a runner, operands and all parameters."""
        function = _load(self.bind)
        taken = signature(function).parameters

        def bind(runner: Any, operands: Any, **parameters: Any) -> Serve:
            needed = {
                name: value
                for name, value in parameters.items()
                if name in taken or self.features.leaves_open(name)
            }
            return function(runner, operands, **needed)  # type: ignore[no-any-return]

        return bind


@cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported; asked for every new problem, so it is remembered."""
    return find_spec(package) is not None


Serve = Callable[[Sequence[Any]], Any]
"""Function of an operation's operands, in its tuple or in a plain one."""
Bind = Callable[..., Serve]


def _bind_nothing(function: Callable[..., Any], operands: Any, **parameters: Any) -> Serve:
    kind = type(operands)
    return lambda given: function(kind(*given), **parameters)


def _bind_on_runner(
    function: Bind, runner_of: Callable[..., Any], operands: Any, **parameters: Any
) -> Serve:
    return function(runner_of(operands[0].device), operands, **parameters)


def _bind_each_call(bind: Bind, operands: Any, **parameters: Any) -> Serve:
    kind = type(operands)
    return lambda given: bind(kind(*given), **parameters)(given)


AUTO = "backend 'auto'"
MOST_SELECTED = 4096
"""Problems whose implementation is remembered."""


@cache
def _load(entry: str) -> Callable[..., Any]:
    module, _, function = entry.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded


class Registry:
    """Implementations in the order of the backends, and of their registration.

    Attributes:
        on_change: called after each registration.
    """

    def __init__(self) -> None:
        self._implementations: list[Implementation] = []
        self._announced: set[tuple[str, str]] = set()
        self._selected: dict[tuple[Problem, str], Implementation] = {}
        self.on_change: Callable[[], None] = lambda: None

    def register(self, implementation: Implementation) -> None:
        """Add one; of two of a backend that can serve a call, the first of equal priority does."""
        if implementation.backend not in BACKENDS[1:]:
            raise ArgumentValueError(
                f"backend: expected one of {', '.join(BACKENDS[1:])}; "
                f"got {implementation.backend!r}"
            )
        self._implementations.append(implementation)
        self._implementations.sort(key=lambda one: BACKENDS.index(one.backend))
        self._selected.clear()
        self.on_change()

    @property
    def operations(self) -> list[str]:
        """Names of the operations that have an implementation."""
        return list(dict.fromkeys(one.operation for one in self._implementations))

    def implementations(self, operation: str | None = None) -> list[Implementation]:
        """All implementations, or those of one operation."""
        return [i for i in self._implementations if operation in (None, i.operation)]

    def select(self, problem: Problem, backend: str = "auto") -> Implementation:
        """The implementation that serves `problem`.

        Args:
            problem: what the call needs.
            backend: a backend's name, or "auto" (then FLASHDSA_BACKEND decides, if set).

        Raises:
            ArgumentValueError: no such backend.
            UnsupportedError: the named backend, or with "auto" every backend, lacks a feature.
        """
        backend = resolve_backend(backend)
        chosen = self._selected.get((problem, backend))
        if chosen is None:
            chosen = self.find(problem, backend)
            if backend == "auto":
                self._announce(chosen, problem)
            if len(self._selected) >= MOST_SELECTED:
                self._selected.clear()
            self._selected[problem, backend] = chosen
        return chosen

    def find(self, problem: Problem, backend: str = "auto") -> Implementation:
        """Return what `select` gives, without log and without a memory of it; raises likewise."""
        backend = resolve_backend(backend)
        candidates = self.implementations(problem.operation)
        if backend != "auto":
            named = [i for i in candidates if i.backend == backend]
            return self._best(named, problem, f"backend {backend!r}")
        return self._best([i for i in candidates if i.automatic], problem, AUTO)

    def refusals(self, problem: Problem) -> dict[str, str]:
        """Say why each backend cannot serve `problem`; "": it can."""
        rows: dict[str, list[list[Reason]]] = {}
        for one in self.implementations(problem.operation):
            rows.setdefault(one.backend, []).append(one.reasons_against(problem))
        return {backend: explain(of) if all(of) else "" for backend, of in rows.items()}

    def chosen(self, device: str, backend: str = "auto") -> dict[str, str]:
        """The backend that `select` last gave to each operation that was called.

        Args:
            device: type of the calls' tensors.
            backend: as the calls named it.
        """
        backend = resolve_backend(backend)
        return {
            problem.operation: one.backend
            for (problem, named), one in self._selected.items()
            if (problem.device, named) == (device, backend)
        }

    def _best(self, candidates: list[Implementation], problem: Problem, who: str) -> Implementation:
        able = [i for i in candidates if not i.reasons_against(problem)]
        if able:
            return max(able, key=lambda i: i.priority)
        operation = problem.operation
        if not candidates:
            have = sorted({i.backend for i in self.implementations(problem.operation)})
            raise UnsupportedError(
                f"{operation}: {who} has no implementation of it in this version; "
                f"available: {', '.join(have) or 'none'}"
            )
        backends: dict[str, list[str]] = {}
        for backend in dict.fromkeys(i.backend for i in candidates):
            rows = [i.reasons_against(problem) for i in candidates if i.backend == backend]
            backends.setdefault(explain(rows), []).append(backend)
        # What is of another machine comes last.
        reasons = sorted(backends, key=lambda said: said.startswith(MACHINE))
        listed = "; ".join(f"{', '.join(backends[reason])}: {reason}" for reason in reasons)
        if who != AUTO and all(reason.startswith(ELSEWHERE) for reason in backends):
            is_free = Settings.from_environment().backend == "auto"
            other = "backend='auto'" if is_free else "unset FLASHDSA_BACKEND"
            listed += f": move the tensors, or {other}"
        raise UnsupportedError(f"{operation}: {who} cannot serve this call. {listed}")

    def _announce(self, chosen: Implementation, problem: Problem) -> None:
        key = (problem.operation, chosen.backend)
        if key in self._announced:
            return
        self._announced.add(key)
        others = [
            i for i in self.implementations(problem.operation) if i.automatic and i is not chosen
        ]
        told = {
            f"{i.backend} passed over ({reasons[0] if reasons else 'lower priority'})": None
            for i in others
            for reasons in [i.reasons_against(problem)]
        }
        passed_over = "; ".join(told)
        # On a GPU plain torch is right and slow.
        slow = chosen.backend == "torch" and problem.device != "cpu"
        logger.log(
            logging.WARNING if slow else logging.INFO,
            "%s: auto chose backend %r for %s tensors of dtype %s%s",
            problem.operation,
            chosen.backend,
            problem.device,
            problem.dtype,
            f"; {passed_over}" if passed_over else "",
        )


def resolve_backend(backend: str) -> str:
    """`backend`, or FLASHDSA_BACKEND if it is "auto".

    Raises:
        ArgumentValueError: no such backend.
    """
    if backend not in BACKENDS:
        raise ArgumentValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
    return Settings.from_environment().backend if backend == "auto" else backend
