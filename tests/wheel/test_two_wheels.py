"""The wheels of flashdsa and ptxemu side by side: no common file, each works without the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

from tests.support.houses import HOUSES, copy_build_files

BUILT = pytest.mark.slow
"""Wheels are built and installed: `make test-wheel`."""

IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "_kernels")
ENVIRONMENT = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry nothing() { ret; }
"""
RUN_PTXEMU = f"import ptxemu; ptxemu.load({PTX!r}).launch('nothing', 1, 32, check=True)"
RUN_FLASHDSA = """
import torch, flashdsa
from flashdsa.errors import UnsupportedError
q, kv = torch.randn(2, 8, 576), torch.randn(9, 576)
indices = torch.tensor([[0, 3], [5, -1]], dtype=torch.int32)
assert flashdsa.sparse_mla(q, kv, indices).shape == (2, 8, 512)
"""
ASK_FOR_EMULATION = f"""{RUN_FLASHDSA}
try:
    flashdsa.sparse_mla(q.bfloat16(), kv.bfloat16(), indices, backend="emulate-sm90")
except UnsupportedError as error:
    print(error)
else:
    raise AssertionError("no error")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, each made from a copy of its tree."""
    made, folder = {}, tmp_path_factory.mktemp("dist")
    for name, house in HOUSES.items():
        tree = tmp_path_factory.mktemp(name)
        shutil.copytree(house / "src" / name, tree / "src" / name, ignore=IGNORED)
        copy_build_files(name, tree)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
        subprocess.run(
            [*command, "--wheel-dir", str(folder), str(tree)], check=True, env=ENVIRONMENT
        )
        (made[name],) = folder.glob(f"{name}-*.whl")
    return made


@pytest.fixture
def python(wheels: dict[str, Path], tmp_path: Path) -> Path:
    """The interpreter of an environment with both wheels, and this one's other packages."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path that a .pth file adds has no .pth files of its own: editable installs stay outside.
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = venv / "bin" / "python"
    pip(python, "install", "--no-deps", "--ignore-installed", *map(str, wheels.values()))
    return python


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", *arguments, "-q"], check=True, env=ENVIRONMENT)


def run(python: Path, program: str) -> str:
    """What the program prints, away from the checkout."""
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, check=False, cwd=python.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(python: Path, name: str) -> list[Path]:
    return list(python.parents[1].glob(f"lib/python*/site-packages/{name}*"))


@BUILT
def test_the_wheels_have_no_file_in_common(wheels: dict[str, Path]) -> None:
    files = {name: set(zipfile.ZipFile(path).namelist()) for name, path in wheels.items()}
    assert not files["flashdsa"] & files["ptxemu"]
    for name, inside in files.items():
        folders = {file.partition("/")[0] for file in inside}
        assert {folder.partition("-")[0] for folder in folders} == {name}


@BUILT
def test_flashdsa_works_without_ptxemu(python: Path) -> None:
    run(python, RUN_PTXEMU)
    pip(python, "uninstall", "-y", "ptxemu")
    assert installed(python, "ptxemu") == []
    said = run(python, ASK_FOR_EMULATION)
    (ptxemu,) = re.findall("pip install '([^']+)'", said)
    pip(python, "install", "--no-deps", ptxemu)
    run(python, RUN_PTXEMU)


@BUILT
def test_ptxemu_works_without_flashdsa(python: Path) -> None:
    run(python, RUN_FLASHDSA)
    pip(python, "uninstall", "-y", "flashdsa")
    assert installed(python, "flashdsa") == []
    run(python, RUN_PTXEMU)
