"""A wheel has what the sources have now, though pip leaves what it built before in the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]
HOUSES = {"flashdsa": ROOT, "ptxemu": ROOT / "ptxemu"}
HOOK = "import sys; from setuptools.build_meta import {0} as build; build(sys.argv[1])"
"""What `pip wheel` and `pip install` call in the checkout."""


def built(tree: Path, hook: str = "build_wheel") -> list[str]:
    """The files of the package in the wheel that a hook makes of a tree."""
    out = tree / "dist"
    command = [sys.executable, "-c", HOOK.format(hook), str(out)]
    subprocess.run(command, check=True, cwd=tree, capture_output=True)
    (wheel,) = out.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wheel.unlink()
    return sorted(name for name in names if ".dist-info/" not in name)


@pytest.mark.parametrize("name", HOUSES)
def test_a_removed_module_is_in_no_later_wheel(name: str, tmp_path: Path) -> None:
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(HOUSES[name] / file, tmp_path)
    package = tmp_path / "src" / name
    data = {"flashdsa": "_kernels/sm90.so", "ptxemu": "cuda/standin/standin.c"}[name]
    for file in ("__init__.py", "kept.py", "gone.py", "part/__init__.py", "part/gone.py", data):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("")
    beside = tmp_path / "build" / "mine.txt"
    beside.parent.mkdir()
    beside.write_text("of somebody else")
    assert f"{name}/gone.py" in built(tmp_path) and f"{name}/part/gone.py" in built(tmp_path)
    (package / "gone.py").unlink()
    shutil.rmtree(package / "part")
    assert built(tmp_path) == sorted(f"{name}/{f}" for f in ("__init__.py", "kept.py", data))
    assert beside.exists()
    built(tmp_path, "build_editable")
    assert sorted(p.name for p in package.glob("*.py")) == ["__init__.py", "kept.py"]
