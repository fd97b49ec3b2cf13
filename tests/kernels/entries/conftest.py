"""Kernels of these tests are compiled without line information in `make test`."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import without_lines

without_lines_here = pytest.fixture(scope="module", autouse=True)(without_lines)
