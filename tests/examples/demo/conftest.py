"""The smallest run."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.train import DemoOptions


@pytest.fixture
def tiny(tmp_path: Path) -> DemoOptions:
    """Two steps, one of each of the indexer's stages."""
    return DemoOptions(
        steps=2, window=192, num_queries=8, topk=64, num_heads=1, eval_windows=1,
        picture=tmp_path / "new" / "demo.png",
    )  # fmt: skip
