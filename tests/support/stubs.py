"""Modules of packages that are not installed, as far as an integration imports them."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

from flashdsa.integrations import start


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module of this name in sys.modules, and packages above it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        if count > 1:
            parent = sys.modules[".".join(parts[: count - 1])]
            monkeypatch.setattr(parent, parts[count - 1], sys.modules[path], raising=False)
    module = sys.modules[name]
    for key, value in members.items():
        setattr(module, key, value)
    return module


def taking(parameters: str) -> Any:
    """A function with these parameters, "name" or "name=default"."""

    def function(*_: Any, **__: Any) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = []
    for name, _, default in (one.partition("=") for one in parameters.split()):
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        given.append(inspect.Parameter(name, kind, default=value))
    function.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return function


def forget_starts() -> None:
    """Forget what engines have loaded and said, as a new process does."""
    start._said.clear()
    for one in (start._load, start._served, start.described):
        one.cache_clear()
