"""A wheel has what the sources have now, though pip leaves what it built before in the checkout."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

from tests.support.houses import HOUSES, build, copy_build_files


def built(tree: Path, hook: str = "build_wheel") -> list[str]:
    """The files of the package in the wheel that a hook makes of a tree."""
    wheel = build(tree, hook, tree / "dist")
    names = zipfile.ZipFile(wheel).namelist()
    wheel.unlink()
    return sorted(name for name in names if ".dist-info/" not in name)


@pytest.mark.parametrize("name", HOUSES)
def test_a_removed_module_is_in_no_later_wheel(name: str, tmp_path: Path) -> None:
    copy_build_files(name, tmp_path)
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
