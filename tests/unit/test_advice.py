"""Advice that errors and help give can be followed: what `pip install` is to install is there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashdsa.backends.emulated import packages
from flashdsa.backends.emulated.packages import PACKAGES, install_command
from flashdsa.toolchain import Assembler, Disassembler, Tool

ROOT = Path(__file__).parents[2]
SOURCES = ("src/flashdsa", "ptxemu/src/ptxemu")
COMMAND = re.compile(r"pip install((?:\s+'[^']+')*)")
TOOLS = (Disassembler, Assembler)


def declared() -> set[str]:
    """Every requirement of both projects and of their extras."""
    found = set()
    for path in ("pyproject.toml", "ptxemu/pyproject.toml"):
        project = tomllib.loads((ROOT / path).read_text())["project"]
        found |= {*project["dependencies"]}.union(*project["optional-dependencies"].values())
    return found


def texts(path: Path) -> Iterator[str]:
    """A file's strings, docstrings among them; what an f-string puts in stays an expression."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def advised() -> set[str]:
    """The requirements that pip gets by advice, but for ptxemu."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in paths if "install" in path.read_text()]
    said = {
        words
        for path in paths
        if path != Path(packages.__file__)
        for text in texts(path)
        for words in COMMAND.findall(text)
    }
    found = {one for words in said for one in re.findall(r"'([^']+)'", words) or [words]}
    found |= {*PACKAGES.values(), *(tool.package for tool in TOOLS)}
    return found - {"ptxemu", "{cls.package}"}


def test_every_requirement_that_is_advised_is_one_that_a_project_declares() -> None:
    kinds = {kind for kind in Tool.__subclasses__() if kind.__module__.startswith("flashdsa.")}
    assert kinds == {*TOOLS}
    assert "zstandard>=0.22" in advised() <= declared()


@pytest.mark.slow
def test_pip_finds_all_that_is_advised() -> None:
    """By the commands themselves, without what they depend on."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    command += ["--ignore-installed", "--no-build-isolation", *advised()]
    subprocess.run([*command, *re.findall(r"'([^']+)'", install_command(["ptxemu"]))], check=True)


@pytest.mark.parametrize(
    ("origin", "says"),
    [
        (
            {"url": "file://{root}/a%20tree", "dir_info": {"editable": True}},
            "'{root}/a tree/ptxemu'",
        ),
        (
            {"url": "file://{root}/dist/flashdsa-1.whl", "archive_info": {}},
            "'{root}/dist/ptxemu-1.whl'",
        ),
        (
            {"url": "https://host/flashdsa.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'ptxemu @ git+https://host/flashdsa.git@abc#subdirectory=ptxemu'",
        ),
        ({"url": "https://host/flashdsa-1.whl", "archive_info": {}}, None),
        (None, None),
    ],
)
def test_ptxemu_comes_from_where_flashdsa_came_from(
    origin: dict[str, object] | None,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a tree/ptxemu").mkdir(parents=True)
    (tmp_path / "a tree/ptxemu/pyproject.toml").touch()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/ptxemu-1.whl").touch()
    text = json.dumps(origin).replace("{root}", str(tmp_path)) if origin else None
    monkeypatch.setattr(packages, "ROOT", tmp_path)  # no checkout
    distribution = SimpleNamespace(read_text=lambda _: text)
    monkeypatch.setattr(packages, "distribution", lambda _: distribution)
    command = install_command(["ptxemu", "llvmlite"])
    if says is None:
        assert command == "pip install 'llvmlite>=0.43', and ptxemu from where flashdsa came from"
    else:
        assert command == f"pip install {says.replace('{root}', str(tmp_path))} 'llvmlite>=0.43'"


def test_in_a_checkout_ptxemu_is_its_folder() -> None:
    assert install_command(["ptxemu"]) == f"pip install '{ROOT / 'ptxemu'}'"
    assert install_command(["tvm_ffi"]) == "pip install 'apache-tvm-ffi>=0.1.11,<0.2'"
