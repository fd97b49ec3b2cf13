"""Advice that errors and help give can be followed: what `pip install` is to install is there."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import flashdsa
from flashdsa import hw, settings
from flashdsa.backends.emulated import packages
from flashdsa.backends.emulated.packages import PACKAGES, install_command
from flashdsa.cli import extras
from flashdsa.cli.extras import EXTRAS, say_missing
from flashdsa.hw import ARCHITECTURES, SM90, SM100
from flashdsa.kernels.catalog import KERNELS
from flashdsa.settings import BACKENDS, Settings, raw_settings
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
        if path not in (Path(packages.__file__), Path(extras.__file__))
        for text in texts(path)
        for words in COMMAND.findall(text)
    }
    found = {one for words in said for one in re.findall(r"'([^']+)'", words) or [words]}
    found |= {*PACKAGES.values(), *(tool.package for tool in TOOLS)}
    found |= {requirement for _, requirement in EXTRAS.values()}
    return found - {"ptxemu", "{cls.package}"}


def test_every_requirement_that_is_advised_is_one_that_a_project_declares() -> None:
    kinds = {kind for kind in Tool.__subclasses__() if kind.__module__.startswith("flashdsa.")}
    assert kinds == {*TOOLS}
    assert "zstandard>=0.22" in advised() <= declared()


def test_a_package_of_a_tool_is_of_the_extra_that_errors_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, (extra, requirement) in EXTRAS.items():
        assert requirement in project["optional-dependencies"][extra]
        assert requirement not in project["dependencies"]
        assert f"extra {extra}: pip install '{requirement}'" in say_missing(name)


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


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    assert Settings.from_environment() == Settings(backend="auto", check=False)


def test_a_variable_that_nobody_reads_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("FLASHDSA_")]:
        monkeypatch.delenv(name)
    settings._warn_of_unknown.cache_clear()
    for value in ("0", "1"):
        monkeypatch.setenv("FLASHDSA_CHECK", value)
        monkeypatch.setenv("FLASHDSA_CHEK", "1")
        monkeypatch.setenv(settings.VLLM_V4, "1")
        settings._of_raw.cache_clear()
        Settings.from_environment()
    (said,) = caplog.messages
    assert said.startswith("FLASHDSA_CHEK: not read; expected one of FLASHDSA_BACKEND, ")


def test_every_variable_that_the_sources_read_is_known() -> None:
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = set(re.findall(r"\"(FLASHDSA_[A-Z0-9_]+)\"", "".join(texts)))
    backends = {name for name in named if name.startswith("FLASHDSA_MLA_")}  # vLLM's names
    assert named - backends == {*(row[0] for row in Settings().rows()), settings.VLLM_V4}


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_check_is_a_flag(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", text)
    assert Settings.from_environment().check is value


@pytest.mark.parametrize(
    ("variable", "text"),
    [("FLASHDSA_BACKEND", "gpu"), ("FLASHDSA_CHECK", "perhaps"), ("FLASHDSA_MAX_CLUSTER", "17")],
)
def test_unknown_value_names_variable_and_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"{variable}: expected .*; got '{text}'"):
        Settings.from_environment()


def test_rows_name_every_variable_with_its_value() -> None:
    rows = Settings(backend="cpu", check=True).rows()
    assert [row[:2] for row in rows] == [
        ("FLASHDSA_BACKEND", "cpu"),
        ("FLASHDSA_CHECK", "1"),
        ("FLASHDSA_MAX_CLUSTER", ""),
    ]
    assert Settings(max_cluster=8).rows()[-1][:2] == ("FLASHDSA_MAX_CLUSTER", "8")


def test_raw_settings_change_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps what follows from them sees each change, through `os.environ` in any way."""
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    assert raw_settings() == (None, None)
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    with_backend = raw_settings()
    monkeypatch.setitem(os.environ, "FLASHDSA_CHECK", "1")
    with_both = raw_settings()
    assert with_backend[0] is not None and with_backend[1] is None
    assert with_both[0] == with_backend[0] and with_both[1] is not None
    os.environ.update(FLASHDSA_BACKEND="sm90")
    assert raw_settings()[0] not in (None, with_backend[0])
    os.environ.pop("FLASHDSA_CHECK")
    assert raw_settings()[1] is None


PACKAGE = Path(flashdsa.__file__).parent
NUMBERS = {name for name in vars(hw) if name.isupper() and not name.startswith("_")}


def test_the_size_of_shared_memory_stands_once() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert len(re.findall("232_?448", text)) == 1
    assert SM90.smem_bytes == SM100.smem_bytes == 227 * 1024


def test_nobody_else_gives_a_name_of_hw_a_number() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name.id}"
        for path in sorted(set(PACKAGE.rglob("*.py")) - {Path(hw.__file__)})
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for name in node.targets
        if isinstance(name, ast.Name) and name.id in NUMBERS
    ]
    assert found == []


def test_no_gpu_is_of_two_families_and_every_family_is_a_backend() -> None:
    families = ARCHITECTURES.values()
    capabilities = [one for family in families for one in family.capabilities]
    assert len(capabilities) == len(set(capabilities))
    assert [family.backend for family in families] == [n for n in BACKENDS if n.startswith("sm")]
    assert {spec.arch for spec in KERNELS} == set(ARCHITECTURES)


def test_a_family_s_target_runs_on_all_its_gpus() -> None:
    """A target in "a" is of one GPU, one in "f" of those of its major capability."""
    for family in ARCHITECTURES.values():
        first = family.capabilities[0]
        assert family.target.startswith(f"sm_{first[0]}{first[1]}")
        assert {major for major, _ in family.capabilities} == {first[0]}
        assert min(family.capabilities) == first
        assert family.target.endswith("f") == (len(family.capabilities) > 1)
