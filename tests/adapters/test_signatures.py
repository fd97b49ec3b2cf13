"""The adapters' parameters are the peers': names, order, kinds and defaults, as recorded."""

from __future__ import annotations

import ast
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.support.subtests import CaseLoop

RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text())
"""By adapter: the package to look into for news, and releases, the newest last. A release has its
functions' parameters and what the adapter takes otherwise: parameters "renamed", parameters whose
place is "elsewhere" (tests of the adapter give them there) and "other defaults"."""
CALLS = [
    (module, release, name)
    for module, record in RECORDED.items()
    for release in record["releases"]
    for name in release["functions"]
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


def function_of(module: str, name: str) -> Any:
    return getattr(import_module(f"flashdsa.adapters.{module}"), name)


def test_every_releases_call_is_taken(subtests: CaseLoop) -> None:
    """Each parameter by its name, in its place and with its default, but for the exceptions."""
    for module, release, name in CALLS:
        with subtests.test(f"{module}.{name} of {release['release']}"):
            ours = described(inspect.signature(function_of(module, name)))
            places = {parameter: place for place, (parameter, _, _) in enumerate(ours)}
            renamed = release.get("renamed", {}).get(name, {})
            elsewhere = release.get("elsewhere", {}).get(name, [])
            others = release.get("other defaults", {}).get(name, [])
            for place, (theirs, kind, default) in enumerate(parameters(release["functions"][name])):
                parameter = renamed.get(theirs, theirs)
                our_place = places[parameter]
                _, our_kind, our_default = ours[our_place]
                assert our_kind == kind
                assert our_place == place or theirs in elsewhere
                assert our_default == default or theirs in others


def test_no_parameter_is_of_no_release() -> None:
    for module, record in RECORDED.items():
        for name in {name for release in record["releases"] for name in release["functions"]}:
            known: set[str] = set()
            for release in record["releases"]:
                renamed = release.get("renamed", {}).get(name, {})
                for theirs, _, _ in parameters(release["functions"].get(name, "")):
                    known.add(renamed.get(theirs, theirs))
            ours = {one for one, _, _ in described(inspect.signature(function_of(module, name)))}
            # 2.8 has the places of both, so that the elder names take the newer values.
            assert ours - known <= {"schedule_meta"}
