"""Kernels of these tests are compiled without line information in `make test`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashdsa.backends.emulated.runner import compiled
from tests.kernels.compiling import without_lines

without_lines_here = pytest.fixture(scope="module", autouse=True)(without_lines)


@pytest.fixture
def afresh() -> Iterator[None]:
    """Kernels are compiled in the test, and not kept."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()
