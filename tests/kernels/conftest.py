"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="module", autouse=True)
def kernels_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels that are compiled for ptxemu stay in pytest's cache: processes share them."""
    cache = getattr(request.config, "cache", None)
    if cache is None or find_spec("cutlass") is None or find_spec("llvmlite") is None:
        yield
        return
    from flashdsa.backends.emulated import runner
    from tests.kernels.kept_kernels import keeping

    with pytest.MonkeyPatch.context() as patch:
        folder = cache.mkdir("kernels")
        patch.setattr(runner, "compile_plan", keeping(folder, runner.compile_plan))
        yield


@pytest.fixture
def small_device() -> Iterator[None]:
    """Backends named "emulate-..." stand in for a device that is quick to wait for."""
    pytest.importorskip("llvmlite", reason="ptxemu catches launches with it")
    from flashdsa.backends.emulated.devices import SMALL
    from flashdsa.backends.emulated.runner import emulation

    with emulation(SMALL):
        yield
