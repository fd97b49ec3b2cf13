"""Programs of the CUDA toolkit: in their packages from PyPI, else on PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self

from flashdsa.errors import UnsupportedError

TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Tool:
    """A program.

    Attributes:
        version: "13.5.37".
        name: the program's. package: pip's requirement that brings it.
        modules: Python packages whose bin folder may hold it.
    """

    path: Path
    version: str
    name: ClassVar[str]
    package: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    @classmethod
    @cache
    def find(cls) -> Self | None:
        """The first that runs; None: there is none."""
        for path in _candidates(cls.name, cls.modules):
            run = cls(path, "").run("--version")
            found = re.search(r"V(\d+(?:\.\d+)+)", run.stdout)
            if run.returncode == 0 and found:
                return cls(path, found.group(1))
        return None

    @classmethod
    def required(cls) -> Self:
        """The same.

        Raises:
            UnsupportedError: there is none; says what to install.
        """
        found = cls.find()
        if found is None:
            raise UnsupportedError(
                f"{cls.name} was not found: pip install '{cls.package}', or put a "
                "CUDA toolkit's bin folder on PATH"
            )
        return found

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end, whatever its exit status."""
        return subprocess.run(
            [str(self.path), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )


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
