"""The wheel carries the compiled kernels and the source that is linked with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder / "out"), str(folder / "tree")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    "built", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["with kernels", "without"]
)
def test_the_wheel_holds_the_kernels_that_were_built(tmp_path: Path, built: bool) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_kernels", "ptxemu")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    if built:
        (tree / "src/flashdsa/_kernels").mkdir()
        (tree / "src/flashdsa/_kernels/sm90.so").write_bytes(b"kernels")
    wheel = _wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "flashdsa/jit/runtime_shim.c" in names
    assert ("flashdsa/_kernels/sm90.so" in names) == built
    assert ("-py3-none-any.whl" in wheel.name) != built
    assert "-py3-none-" in wheel.name
