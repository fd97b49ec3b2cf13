"""The text: documentation that every Python carries, some to learn from, some to be judged on."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

# Sources of text. One that is missing is skipped; `builtins` never is.
MODULES = ("pydoc_data.topics", "builtins", "argparse", "collections", "datetime", "inspect")
HELD_OUT_EVERY = 8  # documents; the model never trains on these


def load_text() -> tuple[Tensor, Tensor]:
    """Text to train on and held-out text, uint8 [n]; no paragraph occurs twice."""
    seen: set[str] = set()
    documents = []
    for document in _documents():
        fresh = []
        for paragraph in document.split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n"))
        if fresh:
            documents.append("\n\n".join(fresh))
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train, judged = (bytearray("\n\n".join(one).encode()) for one in (documents, held_out))
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(judged, dtype=torch.uint8)


def _documents() -> Iterator[str]:
    """The topics of `help()`, then the docstrings of classes, functions and modules."""
    for name in MODULES:
        try:
            module: ModuleType = importlib.import_module(name)
        except ImportError:
            continue
        yield from getattr(module, "topics", {}).values()
        public = sorted(member for member in vars(module) if not member.startswith("_"))
        for member in (module, *(getattr(module, one) for one in public)):
            parts = (member, *vars(member).values()) if isinstance(member, type) else (member,)
            texts = (getattr(part, "__doc__", None) for part in parts)
            yield "\n\n".join(inspect.cleandoc(text) for text in texts if isinstance(text, str))
