"""Fixtures of the checker's tests."""

from __future__ import annotations

import pytest

from tests.ptxemu.check.fake_run import FakeRun


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()
