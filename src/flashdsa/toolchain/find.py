"""Path of a tool of the CUDA toolkit: in its package from PyPI, else on PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_SECONDS = 120


def find_tool(name: str, packages: tuple[str, ...]) -> tuple[Path, str] | None:
    """(path, version such as "13.5.37") of the first that runs.

    Args:
        packages: Python packages whose bin folder may hold it.
    """
    for path in _candidates(name, packages):
        run = subprocess.run(
            [str(path), "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        found = re.search(r"V(\d+(?:\.\d+)+)", run.stdout)
        if run.returncode == 0 and found:
            return path, found.group(1)
    return None


def _candidates(name: str, packages: tuple[str, ...]) -> list[Path]:
    found = []
    for package in packages:
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:
            continue
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found += [Path(folder) / "bin" / name for folder in folders]
    on_path = shutil.which(name)
    if on_path:
        found.append(Path(on_path))
    return [path for path in found if path.is_file()]
