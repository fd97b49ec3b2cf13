"""What tests of attention's kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flashdsa.backends.emulated import runner
from flashdsa.jit.loader import compile_plan
from flashdsa.plan import Barrier


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled in the test, and not kept."""
    monkeypatch.setattr(runner, "compile_plan", compile_plan)
    runner.compiled.cache_clear()
    yield
    runner.compiled.cache_clear()


@pytest.fixture
def one_more_arrival(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that lets the barrier of a name expect an arrival more than there is."""
    right = Barrier.arrivals.fget
    assert right is not None

    def expect(name: str) -> None:
        arrivals = property(lambda self: right(self) + (self.name == name))
        monkeypatch.setattr(Barrier, "arrivals", arrivals)

    return expect
