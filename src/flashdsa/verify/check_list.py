"""The checks of `flashdsa check`: each operation on each of its cases, its call, its judge.

A module of this package whose name ends with `_checks` has a function `checks(seed, backend,
device)`, which gives those of some operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from flashdsa import verify
from flashdsa.verify.compare import Comparison
from flashdsa.verify.operations import COMPOSED, OPERATIONS

NEEDS = {
    "sparse_mla": {"sparse_mla_fwd", "mla_bwd"},
    "indexer_kl_loss": {"attention_target", "indexer_scores", "indexer_bwd", "indexer_kl"},
    **{name: set[str]() for name in COMPOSED},
}
"""Operations that a backend must have for an operation that it does not have itself."""


@dataclass(frozen=True)
class Check:
    """An operation on a case.

    Attributes:
        call: the operation alone, of inputs like the judged ones; nothing is judged.
        judge: the operation and the verdicts on its outputs.
        work: grows with the time that it takes; smaller ones run first.
    """

    operation: str
    case: str
    call: Callable[[], object]
    judge: Callable[[], list[Comparison]]
    work: int = 1


def each(
    runs: Iterable[tuple[str, Any, Any]],
    cases: Iterable[Any],
    make: Callable[[Any], Any],
    backend: str,
    work: Callable[[Any], int],
) -> list[Check]:
    """Operations on cases.

    Args:
        runs: the operation, its call and its judge, both of inputs and the backend.
        make: gives a case's inputs. work: a case's.
    """

    def build(operation: str, call: Any, judge: Any, case: Any) -> Check:
        return Check(
            operation,
            case.name,
            lambda: call(make(case), backend),
            lambda: judge(make(case), backend),
            work(case),
        )

    return [build(*run, case) for run in runs for case in cases]


def checks_of(seed: int, backend: str, device: str) -> list[Check]:
    """All of them, of inputs on the device, smallest first within an operation."""
    modules = [name for _, name, _ in iter_modules(verify.__path__) if name.endswith("_checks")]
    checks: list[Check] = []
    for name in modules:
        checks += import_module(f"flashdsa.verify.{name}").checks(seed, backend, device)
    return sorted(checks, key=lambda check: (OPERATIONS.index(check.operation), check.work))
