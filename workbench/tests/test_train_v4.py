"""A V4 model that learns text with flashdsa's attention and with eager attention."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers.models.deepseek_v4", reason="needs a newer transformers")

from flashdsa.integrations.transformers import two_sources
from flashdsa.ops.attention import sparse_mla
from workbench.bench import train_v4


def test_both_copies_learn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 roundings are too small for other picks; 160 bytes have an entry of 128."""
    monkeypatch.setattr(train_v4, "RISING_STEPS", 1)
    calls: list[tuple[int, ...]] = []

    def counted(q: Tensor, *rows: Any, **how: Any) -> Any:
        calls.append(q.shape)
        return sparse_mla(q, *rows, **how)

    monkeypatch.setattr(two_sources, "sparse_mla", counted)
    result = tmp_path / "result.json"
    options = ["--small", "--steps", "6", "--length", "160", "--out", str(result)]
    monkeypatch.setattr(sys, "argv", ["train_v4", *options])
    train_v4.main()
    document = json.loads(result.read_text())
    eager, ours = document["losses"]["eager"], document["losses"]["flashdsa"]
    assert len(eager) == 6
    assert ours == pytest.approx(eager, abs=1e-3)
    assert len(calls) == 6 * len(train_v4.LAYERS)
    assert ours[-1] < ours[0] - 0.3
    assert set(document["median_ms_a_step"]) == {"eager", "flashdsa"}
