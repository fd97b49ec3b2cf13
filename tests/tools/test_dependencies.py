"""tools/dependencies.py, and that all files promise the same versions of Python and torch."""

from __future__ import annotations

import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import pytest

from flashdsa.integrations.transformers.releases import TRIED
from tools import dependencies
from tools.dependencies import ATTEMPTS, NO_SOLUTION, TORCH_VERSIONS, Resolution, list_pythons
from tools.ptxemu_suite import PINS, digest, judged_files, passed

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


def test_the_page_has_what_replaces_an_engines_requirement() -> None:
    """And the resolver is asked about each engine with it."""
    text = (ROOT / "docs/guides/serving.md").read_text()
    asked = {one.requirement: one.override for one in dependencies.list_resolutions()}
    for engine in dependencies.ENGINES:
        assert asked[engine] == dependencies.OVERRIDES.get(engine, "")
    for override in dependencies.OVERRIDES.values():
        assert f'override-dependencies = ["{override}"]' in text


def _answer(monkeypatch: pytest.MonkeyPatch, *codes: int, pins: str = "") -> list[int]:
    """Have uv exit with each of `codes` in turn; returns those that are left."""
    left = list(codes)

    def run_uv(*_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], left.pop(0), stdout=pins, stderr="said")

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


def test_the_record_of_newest_releases_is_current() -> None:
    """It names what pyproject.toml allows, and the releases that refusals name."""
    when, releases = dependencies.read_record()
    assert date.fromisoformat(when) <= date.today()
    project = tomllib.loads(dependencies.PYPROJECT.read_text())["project"]
    (transformers,), (triton,) = (project["optional-dependencies"][x] for x in dependencies.EXTRAS)
    wanted = *project["dependencies"], transformers, triton
    allowed = [re.split("[<>=]", one)[0] for one in wanted]
    names, versions = zip(*(one.split() for one in releases.split(", ")), strict=True)
    assert {*names, "torch"} == set(allowed)
    newest = versions[names.index("transformers")]
    assert (transformers.split(">=")[1].split(",")[0], newest.rpartition(".")[0]) == TRIED


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A record of transformers 5.23.0; exit codes of commands to come: an installation and the
    tests, twice."""
    record = tmp_path / "serving.md"
    record.write_text("tried: <!-- newest -->2026-01-01 (transformers 5.23.0)<!-- /newest -->.")
    monkeypatch.setattr(dependencies, "RECORD", record)
    codes: list[int] = []

    def run(command: list[str], check: bool, **_: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.CompletedProcess(command, codes.pop(0), stdout="", stderr="said")
        if check:
            done.check_returncode()
        return done

    monkeypatch.setattr(subprocess, "run", run)
    return codes


NEW, OLD = "transformers==5.99.0\ntqdm==4.0", "transformers==5.23.0\ntqdm==5.0"


def test_releases_that_were_tried_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    _answer(monkeypatch, 0, pins=OLD)
    assert dependencies.newest(record=False) == 0 and runs == []


@pytest.mark.parametrize(("codes", "status"), [((0, 0, 0, 0), 0), ((0, 0, 0, 1), 1), ((0, 1), 1)])
def test_newer_releases_are_tried_and_a_failure_fails(
    codes: tuple[int, ...], status: int, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    runs += codes
    _answer(monkeypatch, 0, 0, 0, pins=NEW)
    assert dependencies.newest(record=False) == status and runs == []
    assert dependencies.read_record() == ("2026-01-01", "transformers 5.23.0")


@pytest.mark.parametrize("where", ["resolving", "installing"])
def test_a_registry_that_does_not_answer_fails_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch, runs: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch, *([2] if where == "resolving" else [0, 0]), pins=NEW)
    runs += [] if where == "resolving" else [1]
    assert dependencies.newest(record=False) == 0
    assert "does not answer" in capsys.readouterr().out


def test_newest_releases_that_do_not_fit_fail(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    _answer(monkeypatch, NO_SOLUTION, pins=NEW)
    with pytest.raises(SystemExit, match="said"):
        dependencies.newest(record=False)
    assert runs == []


def test_what_passed_is_recorded(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    for pins in (NEW, OLD):  # in any case, also what was recorded before
        _answer(monkeypatch, 0, 0, 0, pins=pins)
        runs += [0, 0, 0, 0]
        assert dependencies.newest(record=True) == 0
        expected = pins.split("\n")[0].replace("==", " ")
        assert dependencies.read_record() == (str(date.today()), expected)


def test_every_file_of_ptxemu_is_in_the_hash() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "ptxemu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("needs git and a checkout")
    committed = {Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    assert committed | {PINS} <= set(judged_files(ROOT)) and len(committed) > 300


def test_a_new_a_changed_and_a_renamed_file_make_another_hash(tmp_path: Path) -> None:
    record, file = tmp_path / "passed.txt", tmp_path / "ptxemu" / "a" / "b.bin"
    file.parent.mkdir(parents=True)
    (tmp_path / PINS).write_text("numpy==2.0\n")
    assert not passed(record, tmp_path)
    record.write_text(digest(tmp_path))
    assert passed(record, tmp_path)
    seen = {digest(tmp_path)}
    changes = (
        lambda: file.write_bytes(b"\0"),
        lambda: file.write_bytes(b"\1"),
        lambda: file.rename(file.with_name("c.bin")),
        lambda: (tmp_path / PINS).write_text("numpy==2.1\n"),
    )
    for number, change in enumerate(changes, 2):
        change()
        seen.add(digest(tmp_path))
        assert len(seen) == number and not passed(record, tmp_path)
