"""The library's own requirements: few, and enough for its commands."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.distributions import with_needs

ROOT = Path(__file__).parents[2]
MOST_PACKAGES = 4
"""That an image with torch gains, flashdsa among them."""
RUN = """
import json, sys
from importlib.machinery import PathFinder
blocked = set(json.loads(sys.argv[1]))

class Allowed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in blocked else PathFinder.find_spec(name, path, target)

sys.meta_path = [Allowed if finder is PathFinder else finder for finder in sys.meta_path]
from flashdsa.cli.main import cli
cli(sys.argv[2:], prog_name="flashdsa")
"""


def required() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`flashdsa` where only its own requirements can be imported."""
    allowed = with_needs(required()) | {"flashdsa"}
    blocked = [
        module
        for module, owners in packages_distributions().items()
        if not allowed & {canonicalize_name(owner) for owner in owners}
    ]
    assert {"rich", "matplotlib", "numpy", "elftools"} <= {*blocked}
    command = [sys.executable, "-c", RUN, json.dumps(blocked), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_server_gains_few_packages() -> None:
    gained = with_needs(required()) - with_needs(["torch"]) | {"flashdsa"}
    assert len(gained) <= MOST_PACKAGES, gained


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check --quick --operation mla_bwd --operation dsa_topk_indexer", "within their limits"),
        ("info", "cpu"),
    ],
)
def test_commands_run_with_these_alone(command: str, words: str) -> None:
    done = run(*command.split())
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr
    assert "Warning" not in done.stderr


def test_a_chart_without_its_extra_is_one_line_before_anything_is_measured() -> None:
    done = run("bench", "topk", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "extra bench: pip install 'matplotlib" in line
