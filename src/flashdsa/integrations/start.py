"""An engine's start: kernels are loaded for its sizes, and a line of the log says what serves.

A call whose kernels are missing would end the engine at its first request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import resolve_backend
from flashdsa.errors import UnsupportedError
from flashdsa.hw import SM90, SM100
from flashdsa.jit.loader import loaded_origins, require_kernels
from flashdsa.ops.bound import backends_for, warm_up

ORIGINS: Mapping[str, str] = {
    "installed": "installed with the package",
    "cached": "from this user's cache",
    "compiled": "compiled now",
}
"""Origins of kernels, as the line has them."""

_said: set[tuple[str, str]] = set()
"""Loggers and lines of this process."""


def counts_up_to(most: int) -> tuple[int, ...]:
    """Return numbers of queries for which kernels are chosen alike as for those between them: two
    in each octave, and `most`."""
    powers = [2**n for n in range(most.bit_length())]
    return tuple(sorted({n for one in powers for n in (one, 3 * one // 2) if n < most} | {most}))


def load(operation: str, **choices: Any) -> tuple[str, ...]:
    """Load the kernels of an engine's calls, once for each of its sizes.

    Args:
        operation, choices: as for `flashdsa.warm_up`; choices are numbers, dtypes or tuples.

    Returns:
        The names of the backends that serve these calls.

    Raises:
        UnsupportedError: nothing serves such a call, or kernels are missing and cannot be compiled.
    """
    return _load(operation, resolve_backend("auto"), tuple(sorted(choices.items())))


def load_own(calls: Mapping[str, Mapping[str, Any]], who: str) -> dict[str, str]:
    """Load kernels of several operations; refuse sizes that this GPU's own kernels lack.

    `auto` would serve them by Triton without a word. They stay allowed on a GPU that Triton alone
    serves, and where FLASHDSA_BACKEND asks for it.

    Args:
        calls: choices by operation, as for `load`. who: begins the message.

    Returns:
        Backends' names by operation.

    Raises:
        UnsupportedError: there are no kernels of this GPU's own for such a call, or as for `load`.
    """
    if resolve_backend("auto") == "auto" and torch.cuda.is_available():
        here = torch.cuda.get_device_capability()
        for operation, choices in calls.items():
            own = {
                one.backend
                for one in registry.implementations(operation)
                if one.automatic and here in one.features.capabilities
            }
            served = _served(operation, "auto", tuple(sorted(choices.items())))
            if own and not own.issuperset(served):
                asked = ", ".join(f"{name} {value}" for name, value in choices.items())
                raise UnsupportedError(
                    f"{who}: {operation} of this GPU's own kernels does not take {asked}; "
                    "FLASHDSA_BACKEND=triton serves it, and all else, by Triton"
                )
    return {name: " and ".join(load(name, **choices)) for name, choices in calls.items()}


@cache
def _load(operation: str, backend: str, choices: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    served = _served(operation, backend, choices)
    _apart(warm_up, operation, backend, dict(choices))
    return served


@cache
def _served(operation: str, backend: str, choices: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    """The backends that serve the calls of these choices."""
    found: tuple[str, ...] = _apart(backends_for, operation, backend, dict(choices))
    return found


def _apart(function: Any, operation: str, backend: str, choices: Mapping[str, Any]) -> Any:
    """Call `function` in a thread of its own.

    Kernels keep workspaces, with counters that are 0 between launches. Engines build models in a
    memory pool whose contents they discard while they sleep; a pool has the allocations of one
    thread alone.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Any:
        if device is None:
            return function(operation, backend=backend, **choices)
        with torch.cuda.device(device):
            try:
                return function(operation, backend=backend, **choices)
            finally:
                torch.cuda.empty_cache()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def require_kernels_of(capability: tuple[int, int]) -> None:
    """Raise UnsupportedError if a GPU of this compute capability has kernels of its own that are
    neither installed nor can be compiled, unless FLASHDSA_BACKEND names another backend."""
    named = resolve_backend("auto")
    for arch in (SM90, SM100):
        if capability in arch.capabilities and named in ("auto", arch.backend):
            require_kernels(arch.backend)


@cache
def described(served: tuple[tuple[str, str], ...], *facts: str) -> str:
    """Return the line that says what serves.

    Args:
        served: operations, each with the backend, or the other library, that serves it.
        facts: what else the line says.
    """
    by = ", ".join(f"{operation} by {name}" for operation, name in served)
    origins = ", ".join(f"{n} {ORIGINS[origin]}" for origin, n in loaded_origins().items())
    return "; ".join(
        (
            f"flashdsa {flashdsa.__version__}: {by}",
            f"kernels: {origins or 'none loaded yet'}",
            *facts,
        )
    )


def say(logger: str, line: str, level: int = logging.INFO) -> None:
    """Log a line once, in the first of an engine's ranks."""
    found, ranks = logging.getLogger(logger), torch.distributed
    is_first = not (ranks.is_available() and ranks.is_initialized()) or ranks.get_rank() == 0
    # An engine may not have configured its log yet, and load plugins again.
    if is_first and (logger, line) not in _said and found.isEnabledFor(level):
        _said.add((logger, line))
        found.log(level, line)
