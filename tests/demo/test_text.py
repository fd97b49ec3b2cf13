"""The text is there on every Python, never changes between calls, and is split honestly."""

from __future__ import annotations

import builtins
from types import ModuleType

import pytest
import torch

from flashdsa.demo import text


def paragraphs(corpus_bytes: torch.Tensor) -> set[str]:
    decoded = bytes(corpus_bytes.tolist()).decode("utf-8", errors="replace")
    return {" ".join(paragraph.split()) for paragraph in decoded.split("\n\n")} - {""}


def test_text_is_large_and_the_same_every_time() -> None:
    first, second = text.load_text(), text.load_text()
    for one, again, least in zip(first, second, (50_000, 5_000), strict=True):
        assert len(one) > least
        assert torch.equal(one, again)


def test_no_paragraph_is_in_both_halves() -> None:
    train, held_out = text.load_text()
    assert not paragraphs(train) & paragraphs(held_out)


def test_missing_sources_fall_back_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_builtins(name: str) -> ModuleType:
        if name != "builtins":
            raise ModuleNotFoundError(name)
        return builtins

    monkeypatch.setattr(text.importlib, "import_module", only_builtins)
    train, held_out = text.load_text()
    assert len(train) > 20_000
    assert len(held_out) > 2_000
