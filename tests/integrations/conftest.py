"""What tests of the integrations share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import vllm_stand_ins


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's backends over stand-ins, see `vllm_stand_ins.stand_in`."""
    yield from vllm_stand_ins.stand_in(monkeypatch)
