"""Compile the Triton kernels of checks on all cores, before the checks run one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.verify.check_list import COMPOSED, NEEDS, Check

logger = logging.getLogger("flashdsa.check")


def compile_ahead(checks: Collection[Check], runner: Runner, tell: Callable[[str], None]) -> None:
    """Compile what the checks will launch, in threads: Triton's compiler leaves Python's lock to
    others nine tenths of the time. What is in Triton's cache on disk is read from there.

    Args:
        runner: the one that the checks' backend has. While this runs it compiles and launches
            nothing.
        tell: called with what is going on.
    """
    from triton import AsyncCompileMode

    cores = len(os.sched_getaffinity(0))
    with (
        ThreadPoolExecutor(cores) as pool,
        AsyncCompileMode(pool, ignore_errors=True) as mode,
        _compiling(runner),
    ):
        for check in checks:
            # These launch what others do, and autograd's thread would compile by itself.
            if check.operation in COMPOSED or check.operation in NEEDS:
                continue
            tell(f"compiling on {cores} cores: looking at {check.operation}: {check.case}")
            try:
                check.call()
            except Exception as error:  # which comes again when the check itself runs
                logger.debug("not compiled ahead: %s, %s: %s", check.operation, check.case, error)
        for done, _ in enumerate(as_completed(mode.raw_futures), 1):
            tell(f"compiled {done} of {len(mode.raw_futures)} kernels on {cores} cores")


@contextmanager
def _compiling(runner: Runner) -> Iterator[None]:
    """Have launches compile only, and memory that they would write hold zeros, by which torch may
    index."""

    def compile_only(
        kernel: Any, grid: tuple[int, int, int], arguments: Any, **options: Any
    ) -> None:
        kernel.warmup(*arguments, grid=grid, **options)

    empty = runner.empty

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return empty(*shape, dtype=dtype).zero_()

    instead = {"launch_triton": compile_only, "empty": zeros}
    vars(runner).update(instead)  # before the class's own, also for functions bound already
    try:
        yield
    finally:
        for name in instead:
            del vars(runner)[name]
