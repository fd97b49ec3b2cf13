"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def small_device() -> Iterator[None]:
    """Backends named "emulate-..." stand in for a device that is quick to wait for."""
    pytest.importorskip("llvmlite", reason="ptxemu catches launches with it")
    from flashdsa.backends.emulated.devices import SMALL
    from flashdsa.backends.emulated.runner import emulation

    with emulation(SMALL):
        yield


@pytest.fixture(scope="module")
def lines() -> Iterator[None]:
    """Kernels have line information, by which the tests tell findings apart."""
    from tests.support.compilations import with_lines

    with with_lines():
        yield


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled in the test, and not kept."""
    from flashdsa.backends.emulated import runner
    from flashdsa.jit.loader import compile_plan

    monkeypatch.setattr(runner, "compile_plan", compile_plan)
    runner.compiled.cache_clear()
    yield
    runner.compiled.cache_clear()
