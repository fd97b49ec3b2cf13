"""Both projects' folders, and what their builds read besides the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSES = {"flashdsa": ROOT, "ptxemu": ROOT / "ptxemu"}
_STEPS = {"flashdsa": "ptxemu/build_steps.py", "ptxemu": "build_steps.py"}
_HOOK = "import sys; from setuptools.build_meta import {0} as build; print(build(sys.argv[1]))"


def copy_build_files(name: str, tree: Path) -> None:
    """Copy what a build of this project needs to the folder `tree`, without the package."""
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE", _STEPS[name]):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HOUSES[name] / file, tree / file)


def build(tree: Path, hook: str, out: Path) -> Path:
    """Call a hook of setuptools, as pip and uv do; return the path of what it made in `out`."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _HOOK.format(hook), str(out)]
    done = subprocess.run(command, check=False, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]
