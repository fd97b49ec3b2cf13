"""Backends that can run on this machine, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashdsa.backends.emulated.packages import missing_packages
from flashdsa.backends.features import dotted
from flashdsa.errors import UnsupportedError
from flashdsa.hw import ARCHITECTURES
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from flashdsa.backends.registry import Implementation
    from flashdsa.bench.machine import HostMachine

CAPABILITIES = {arch.backend: arch.capabilities for arch in ARCHITECTURES.values()}
"""CUDA compute capabilities of the GPUs that run a backend's kernels."""
NOT_IMPLEMENTED = "has no implementation in this version"


def reason_against(backend: str, machine: HostMachine) -> str | None:
    """Why no implementation of `backend` could run here; None where one could."""
    if backend.startswith("emulate"):
        lacking = missing_packages()
        if lacking:
            which = f"package{'s' * (len(lacking) > 1)} {', '.join(lacking)}"
            return f"needs the Python {which}; pip install 'flashdsa[emulate]'"
        return None
    wanted = CAPABILITIES.get(backend)
    if wanted is None:
        return None
    if any(gpu.capability in wanted for gpu in machine.gpus):
        return None
    found = ", ".join(f"{gpu.name} ({dotted([gpu.capability])})" for gpu in machine.gpus)
    return f"needs a GPU of compute capability {dotted(wanted)}; found {found or 'no GPU'}"


def require_runnable(backend: str) -> None:
    """Nothing where `backend` can run here.

    Raises:
        UnsupportedError: it has no implementation, or the machine lacks its device.
    """
    from flashdsa.backends.catalog import registry
    from flashdsa.bench.machine import describe_machine

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
    from flashdsa.backends.catalog import registry

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
        has = implementation.features
        features = {
            "dtypes": list(has.dtypes),
            "num_heads": str(has.num_heads),
            "d_qk": str(has.d_qk),
            "d_v": str(has.d_v),
            "topk": str(has.topk),
            "attn_sink": has.attn_sink,
            "topk_length": has.topk_length,
            "extra_kv": has.extra_kv,
            "ranges": has.ranges,
            "batch_invariant": has.batch_invariant,
            "index_block": str(has.index_block),
            "table_page_size": str(has.table_page_size),
            "block": str(has.block),
            "candidates": has.candidates,
            "token_bytes": str(has.token_bytes),
            "deterministic": has.deterministic,
            "sorted": has.sorted,
            "positions": has.positions,
            "row_formats": list(has.row_formats),
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
