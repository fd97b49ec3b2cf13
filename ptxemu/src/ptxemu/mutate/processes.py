"""Work for several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
        with context.Pool(min(jobs, count)) as pool:
            yield from pool.imap_unordered(_run_current, range(count))
    finally:
        _current = None


_current: Callable[[int], Any] | None = None


def _run_current(index: int) -> tuple[int, Any]:
    assert _current is not None
    return index, _current(index)
