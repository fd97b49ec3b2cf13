"""Workflows, hooks and issue forms name commands that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from flashdsa.cli.main import cli

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(
    path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)


def load(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def recipe(target: str) -> list[str]:
    """The commands of a target, of the tools in .venv."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return re.findall(r"\$\(BIN\)/(.+)", found[1])


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


def test_a_commit_is_held_to_what_make_lint_is_held_to() -> None:
    (hooks,) = (repo["hooks"] for repo in load(ROOT / ".pre-commit-config.yaml")["repos"])
    run = {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --fix") for hook in hooks}
    linted = {re.sub(r" --check| \.$", "", line.removesuffix(" .")) for line in recipe("lint")}
    assert len(linted) == 6 and linted <= run


def test_every_test_runs_in_ci_or_by_night() -> None:
    assert ".ci/run" in [step.get("run") for step in steps(ROOT / ".github/workflows/ci.yml")]
    (night,) = (load(path)["jobs"]["night"] for path in WORKFLOWS if path.stem == "ci")
    every = re.search(r"^test-all: (.*?)  ##", MAKEFILE, re.MULTILINE)
    assert every is not None
    run = (ROOT / ".ci" / "run").read_text()
    left_out = [name for name in every[1].split() if not re.search(rf"\b{name}\b(?!-)", run)]
    assert {"fingerprints", *left_out} <= set(night["strategy"]["matrix"]["target"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_makes_targets_that_there_are(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    targets = {word for line in lines if line.startswith("make ") for word in line.split()[1:]}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        targets |= set(job.get("strategy", {}).get("matrix", {}).get("target", ()))
    targets.discard('"$TARGET"')
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    assert [step["uses"] for step in steps(path) if "@" not in step.get("uses", "@")] == []


def test_a_release_is_refused_for_another_tag() -> None:
    """By the line of pyproject.toml that has the version."""
    release = steps(ROOT / ".github/workflows/release.yml")
    (line,) = (one["run"] for one in release if one.get("name") == "The tag is the version")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wanted = line.split('"', 1)[1].rsplit('"', 1)[0].replace('\\"', '"')
    wanted = wanted.replace("${GITHUB_REF_NAME#v}", version)
    assert wanted in (ROOT / "pyproject.toml").read_text().splitlines()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_repeats_the_case(path: Path) -> None:
    form = load(path)
    assert form["name"] and form["description"] and form["labels"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    attributes = [field["attributes"] for field in fields]
    text = "\n".join(f"{one['label']}\n{one.get('description', '')}" for one in attributes)
    must = [field.get("validations", {}).get("required", False) for field in fields]
    required = [
        one["label"] for one, is_required in zip(attributes, must, strict=True) if is_required
    ]
    assert "Seed" in required and "flashdsa info" in text
    assert any(one.startswith(("The call", "flashdsa check")) for one in required)
    for command, options in re.findall(r"(?:^|`)flashdsa (\w+)([^`\n]*)", text, re.MULTILINE):
        found = cli.get_command(click.Context(cli), command)
        assert found is not None, command
        known = {option for one in found.params for option in one.opts}
        assert set(re.findall(r"--[\w-]+", options)) <= known


def test_there_is_a_form_for_each_kind_of_report() -> None:
    expected = {"wrong_result", "crash", "gpu_report", "ptxemu_finding"}
    assert {path.stem for path in FORMS} == expected
