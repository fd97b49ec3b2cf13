"""The adapters' parameters are the peers': names, order, kinds and defaults, as recorded."""

from __future__ import annotations

import ast
import inspect
import json
from importlib import import_module
from pathlib import Path

import torch

from tests.support.subtests import CaseLoop

RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text())
FUNCTIONS = [
    (module, name, text)
    for module, record in RECORDED.items()
    for name, text in record["functions"].items()
]


def parameters(text: str) -> list[tuple[str, str, str]]:
    """(name, kind, default) of each parameter in a parameter list as text."""
    namespace: dict[str, object] = {"torch": torch}
    exec(f"def f({text}): pass", namespace)
    return described(inspect.signature(namespace["f"]))  # type: ignore[arg-type]


def described(signature: inspect.Signature) -> list[tuple[str, str, str]]:
    return [
        (
            p.name,
            p.kind.name,
            "" if p.default is p.empty else ast.unparse(ast.parse(repr(p.default))),
        )
        for p in signature.parameters.values()
    ]


def test_parameters_are_the_peers(subtests: CaseLoop) -> None:
    for module, name, text in FUNCTIONS:
        with subtests.test(f"{module}.{name}"):
            function = getattr(import_module(f"flashdsa.adapters.{module}"), name)
            assert described(inspect.signature(function)) == parameters(text)
