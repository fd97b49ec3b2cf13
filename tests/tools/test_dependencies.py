"""tools/dependencies.py, and that all files promise the same versions of Python and torch."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import dependencies
from tools.dependencies import ATTEMPTS, NO_SOLUTION, TORCH_VERSIONS, Resolution, list_pythons

ROOT = Path(__file__).parents[2]
QUESTION = Resolution("all pins", "3.11", "x86_64", (), "torch==2.13.0")


def _project(path: str) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / path).read_text())["project"]
    return project


def test_both_distributions_agree_and_promise_the_same_pythons() -> None:
    project, ptxemu = _project("pyproject.toml"), _project("ptxemu/pyproject.toml")
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    assert extras["emulate"] == [f"ptxemu[cutedsl]=={ptxemu['version']}"]
    assert ptxemu["version"] == project["version"]
    assert ptxemu["requires-python"] == project["requires-python"]
    classifiers = project["classifiers"]
    assert isinstance(classifiers, list)
    prefix = "Programming Language :: Python :: "
    assert [one.removeprefix(prefix) for one in classifiers if prefix in one] == list_pythons()


@pytest.mark.parametrize("path", ["README.md", "docs/guides/serving.md"])
def test_documents_name_the_versions_that_are_checked(path: str) -> None:
    text = (ROOT / path).read_text()
    for name, versions in (("Python", list_pythons()), ("torch", TORCH_VERSIONS)):
        promise = f"{versions[0]} to {versions[-1]}"
        assert f"{name} {promise}" in text or f"| {name} | {promise} |" in text


def _answer(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[int]:
    """Have uv exit with each of `codes` in turn; returns those that are left."""
    left = list(codes)

    def run_uv(*_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], left.pop(0), stdout="", stderr="said")

    monkeypatch.setattr(dependencies, "run_uv", run_uv)
    return left


def test_pins_that_do_not_fit_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _answer(monkeypatch, NO_SOLUTION, 0)
    assert QUESTION.run() == "said"
    assert left == [0]


def test_a_registry_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _answer(monkeypatch, 2, 0)
    assert QUESTION.run() is None
    assert left == []
    _answer(monkeypatch, *[2] * ATTEMPTS)
    assert QUESTION.run() == "said"


def test_one_failure_makes_the_check_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(list(dependencies.list_resolutions()))
    _answer(monkeypatch, *[0] * (count - 1), NO_SOLUTION)
    assert dependencies.check() == 1
    assert f"{count - 1} of {count} combinations resolve" in capsys.readouterr().out
    _answer(monkeypatch, *[0] * count)
    assert dependencies.check() == 0
