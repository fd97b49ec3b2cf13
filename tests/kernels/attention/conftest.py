"""What tests of attention's kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashdsa.backends.emulated import runner
from flashdsa.jit.loader import compile_plan


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled in the test, and not kept."""
    monkeypatch.setattr(runner, "compile_plan", compile_plan)
    runner.compiled.cache_clear()
    yield
    runner.compiled.cache_clear()
