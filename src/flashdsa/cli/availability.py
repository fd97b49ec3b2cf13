"""Backends that can run on this machine, and why the others cannot."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from flashdsa.backends.emulated.packages import missing_packages, say_missing
from flashdsa.backends.features import Formats, dotted
from flashdsa.errors import UnsupportedError
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from flashdsa.backends.registry import Implementation
    from flashdsa.bench.machine import HostMachine

NOT_IMPLEMENTED = "has no implementation in this version"


def reason_against(backend: str, machine: HostMachine) -> str | None:
    """Why no implementation of `backend` could run here; None where one could."""
    from flashdsa.ops import registry

    if missing := missing_packages(backend):
        return say_missing(missing)
    if backend.startswith("emulate"):
        return None
    features = next(one.features for one in registry.implementations() if one.backend == backend)
    if not features.gpus or any(features.runs_on(gpu.capability) for gpu in machine.gpus):
        return None
    found = ", ".join(f"{gpu.name} ({dotted([gpu.capability])})" for gpu in machine.gpus)
    return f"needs a GPU of compute capability {features.gpus}; found {found or 'no GPU'}"


def require_runnable(backend: str) -> None:
    """Nothing where `backend` can run here.

    Raises:
        UnsupportedError: it has no implementation, or the machine lacks its device.
    """
    from flashdsa.bench.machine import describe_machine
    from flashdsa.ops import registry

    if all(known.backend != backend for known in registry.implementations()):
        available = sorted({known.backend for known in registry.implementations()})
        raise UnsupportedError(
            f"backend {backend!r} {NOT_IMPLEMENTED}; available: {', '.join(available)}"
        )
    reason = reason_against(backend, describe_machine())
    if reason:
        raise UnsupportedError(f"backend {backend!r} cannot run on this machine: {reason}")


def implementation_rows(machine: HostMachine) -> list[dict[str, object]]:
    """One row per operation and backend: its features, or that there is none; whether it runs."""
    from flashdsa.ops import registry

    rows: list[dict[str, object]] = []
    for operation in registry.operations:
        known = registry.implementations(operation)
        for backend in BACKENDS[1:]:
            named = [i for i in known if i.backend == backend]
            rows += [_row(operation, backend, i, machine) for i in named or (None,)]
    return rows


def _row(
    operation: str, backend: str, implementation: Implementation | None, machine: HostMachine
) -> dict[str, object]:
    reasons = [reason_against(backend, machine)]
    features: dict[str, object] | None = None
    if implementation is None:
        reasons.insert(0, NOT_IMPLEMENTED)
    else:
        features = {
            one.name: _written(getattr(implementation.features, one.name))
            for one in fields(implementation.features)
            if one.name not in ("devices", "capabilities", "least_capability")
        }
    why_not = [reason for reason in reasons if reason]
    return {
        "operation": operation,
        "backend": backend,
        "implemented": implementation is not None,
        "runs_here": not why_not,
        "why_not": why_not,
        "features": features,
    }


def _written(feature: object) -> object:
    """A flag, a list of names, or a set of integers in words."""
    if isinstance(feature, Formats):
        return list(feature.names)
    if isinstance(feature, tuple):
        return list(feature)
    return feature if isinstance(feature, bool) else str(feature)
