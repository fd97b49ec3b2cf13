"""Kernels that the processes of one test run compile once, for all of them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from flashdsa.backends.emulated import runner
from flashdsa.jit.loader import compile_plan
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from ptxemu.cutedsl import retention
from ptxemu.cutedsl.exported import ExportedFunction


@contextmanager
def shared_in(folder: Path) -> Iterator[None]:
    """Whatever is compiled for ptxemu inside the block comes from `folder`, or goes there.

    It has no line information. That takes a quarter to a third of a compilation, and the
    instructions are the same. Run a test that failed alone, and findings name Python lines.
    """
    folder.mkdir(exist_ok=True)
    retention.install(line_info=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compile_plan", partial(_compile_once, folder))
        yield
    retention.install()
    runner.compiled.cache_clear()  # objects by the million, which the collector looks through


@contextmanager
def with_lines() -> Iterator[None]:
    """What is compiled inside the block has line information all the same."""
    before = retention.keeps_lines()
    runner.compiled.cache_clear()
    retention.install()
    yield
    retention.install(line_info=before)


def _compile_once(folder: Path, spec: KernelSpec, plan: KernelPlan) -> ExportedFunction:
    """The plan's function, as the process that was first to want it has left it."""
    key = hashlib.sha256(f"{spec.build} {plan!r}".encode()).hexdigest()
    kept = folder / f"{key}.lines"
    with FileLock(folder / f"{key}.lock"):
        if not kept.exists() and not retention.keeps_lines():
            kept = folder / key
        if not kept.exists():
            kept.write_bytes(pickle.dumps(ExportedFunction.of(compile_plan(spec, plan))))
    made: ExportedFunction = pickle.loads(kept.read_bytes())
    return made
