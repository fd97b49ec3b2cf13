"""Kernels that the processes of one test run compile once, for all of them and for later runs."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

from flashdsa.backends.emulated import runner
from flashdsa.jit.loader import compile_plan
from flashdsa.jit.sources import package_hash, source_hash
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant
from ptxemu.cutedsl import retention
from ptxemu.cutedsl.interception import ExportedFunction

COMPILER = f"{version('nvidia-cutlass-dsl')}, Python {sys.version}"
KEPT_SECONDS = 7 * 24 * 3600
"""Of a function that no run has used meanwhile."""


@contextmanager
def shared_in(folder: Path, locks: Path) -> Iterator[None]:
    """Whatever is compiled for ptxemu inside the block comes from `folder`, or goes there.

    It has no line information, which takes a quarter to a third of a compilation; the instructions
    are the same. Run a test that failed alone, and findings name Python lines.

    Args:
        folder: outlasts the run; functions of other sources are not taken.
        locks: of the run.
    """
    locks.mkdir(exist_ok=True)
    retention.install(line_info=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compile_plan", partial(_compile_once, folder, locks))
        yield
    retention.install()
    runner.compiled.cache_clear()  # objects by the million, which the collector looks through


def ptx_of(spec: KernelSpec, plan: KernelPlan) -> str:
    """PTX of a plan's function and of those launched with it."""
    return str(runner.compiled(spec, plan).__ptx__).rstrip("\0")


@contextmanager
def with_lines() -> Iterator[None]:
    """What is compiled inside the block has line information all the same."""
    before = retention.keeps_lines()
    runner.compiled.cache_clear()
    retention.install()
    yield
    retention.install(line_info=before)


def remove_old(folder: Path) -> None:
    """Remove the functions that have not been used for long, most of them of other sources."""
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)


def _compile_once(
    folder: Path, locks: Path, spec: KernelSpec, plan: KernelPlan
) -> ExportedFunction:
    """The plan's function, as the process that was first to want it has left it."""
    of_sources = f"{source_hash([Variant(spec, plan)])}, {COMPILER}"
    key = hashlib.sha256(of_sources.encode()).hexdigest()
    kept = folder / f"{key}.lines"
    with FileLock(locks / key):
        if not kept.exists() and not retention.keeps_lines():
            kept = folder / key
        if not kept.exists():
            made = ExportedFunction.of(compile_plan(spec, plan))
            if package_hash.__wrapped__() != package_hash():
                return made  # a source was edited since it was imported
            new = kept.with_name(f"{kept.name}.{os.getpid()}")
            new.write_bytes(zlib.compress(pickle.dumps(made), 1))
            new.replace(kept)
    os.utime(kept)
    function: ExportedFunction = pickle.loads(zlib.decompress(kept.read_bytes()))
    return function
