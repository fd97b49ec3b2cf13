"""The demo's text: what every Python installation carries, in an order that never changes.

Sources, each optional: the language reference behind `help()` (`pydoc_data.topics`), the licence
next to the standard library, the docstrings of a few standard modules. The docstrings of the
built-in types live inside the interpreter itself, so there is always some text.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Well-documented standard modules; one that is missing is skipped.
DOCSTRING_MODULES = (
    "argparse",
    "collections/__init__",
    "datetime",
    "heapq",
    "inspect",
    "pathlib",
    "random",
    "statistics",
    "textwrap",
    "threading",
)
LICENCE_NAMES = ("LICENSE.txt", "LICENSE")
# Every HELD_OUT_EVERY-th document is never trained on.
HELD_OUT_EVERY = 8
# Below this many bytes the installed sources are too thin and the built-in docstrings join them.
MIN_BYTES = 150_000


@dataclass(frozen=True)
class Document:
    """One named piece of text; `source` says which of the three collections it is from."""

    source: str
    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged on; no paragraph occurs twice."""

    train: Tensor  # [n_train] uint8
    held_out: Tensor  # [n_held_out] uint8
    sources: tuple[str, ...]


def load_corpus() -> Corpus:
    """Collect the installed text, drop repeated paragraphs, and split it by document."""
    documents = [*_help_topics(), *_licence(), *_module_docstrings()]
    if sum(len(document.text) for document in documents) < MIN_BYTES:
        documents += _builtin_docstrings()
    documents = _without_repeats(documents)
    train = [d.text for i, d in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held_out = [d.text for i, d in enumerate(documents) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    sources = tuple(dict.fromkeys(document.source for document in documents))
    return Corpus(_as_bytes(train), _as_bytes(held_out), sources)


def _help_topics() -> list[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return []
    return [Document("pydoc_data.topics", name, topics[name]) for name in sorted(topics)]


def _licence() -> list[Document]:
    library = Path(os.__file__).parent
    for folder in (library, library.parent):
        for name in LICENCE_NAMES:
            path = folder / name
            if path.is_file():
                return [Document("licence", name, path.read_text("utf-8", errors="replace"))]
    return []


def _module_docstrings() -> list[Document]:
    library = Path(os.__file__).parent
    found = []
    for name in DOCSTRING_MODULES:
        path = library / f"{name}.py"
        if path.is_file():
            tree = ast.parse(path.read_text("utf-8", errors="replace"))
            text = "\n\n".join(_docstrings(tree))
            found.append(Document("module docstrings", name, text))
    return found


def _docstrings(tree: ast.Module) -> Iterable[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _builtin_docstrings() -> list[Document]:
    found = []
    types = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
    for name, kind in sorted(types.items()):
        members = [kind, *(getattr(kind, member, None) for member in sorted(dir(kind)))]
        texts = [str(member.__doc__) for member in members if getattr(member, "__doc__", None)]
        found.append(Document("built-in docstrings", name, "\n\n".join(texts)))
    return found


def _without_repeats(documents: list[Document]) -> list[Document]:
    """Keep each paragraph's first occurrence, so held-out text was never seen in training."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        fresh = []
        for paragraph in document.text.split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n"))
        if fresh:
            kept.append(Document(document.source, document.name, "\n\n".join(fresh)))
    return kept


def _as_bytes(texts: list[str]) -> Tensor:
    joined = "\n\n".join(texts).encode("utf-8", errors="replace")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)
