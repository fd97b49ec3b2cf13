"""The text is there on every Python, never changes between calls, and is split honestly."""

from __future__ import annotations

import pytest
import torch

from flashdsa.demo import text


def paragraphs(corpus_bytes: torch.Tensor) -> set[str]:
    decoded = bytes(corpus_bytes.tolist()).decode("utf-8", errors="replace")
    return {" ".join(paragraph.split()) for paragraph in decoded.split("\n\n")} - {""}


def test_corpus_is_large_and_the_same_every_time() -> None:
    first, second = text.load_corpus(), text.load_corpus()
    assert len(first.train) > 50_000
    assert len(first.held_out) > 2_000
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert first.sources


def test_no_paragraph_is_in_both_halves() -> None:
    corpus = text.load_corpus()
    assert not paragraphs(corpus.train) & paragraphs(corpus.held_out)


def test_missing_sources_fall_back_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(text.importlib, "import_module", missing)
    monkeypatch.setattr(text.os, "__file__", "/nonexistent/lib/os.py")
    corpus = text.load_corpus()
    assert corpus.sources == ("built-in docstrings",)
    assert len(corpus.train) > 20_000
    assert len(corpus.held_out) > 2_000
