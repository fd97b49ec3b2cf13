"""NVIDIA's assembler as a judge of PTX: where it is, which version, and what it says of a text."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from flashdsa.errors import UnsupportedError

PACKAGE = "nvidia-cuda-nvcc"
MISSING = (
    f"ptxas was not found: pip install {PACKAGE} (or flashdsa[assemble]), or put a CUDA toolkit's "
    "bin folder on PATH"
)
_TIMEOUT_SECONDS = 120
_BOILERPLATE = re.compile(r"^ptxas (?:\S+, line \d+; )?(?:fatal|error) *: *")


@dataclass(frozen=True)
class Assembler:
    """A ptxas.

    Attributes:
        version: "13.5.37".
    """

    path: Path
    version: str

    def judge(self, ptx: str, arch: str = "sm_100a") -> Verdict:
        """Whether it assembles a module; a NUL at the end of the text does not count."""
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
            source.write_text(ptx.rstrip("\0"))
            command = [str(self.path), f"-arch={arch}", str(source), "-o", str(target)]
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
        lines = [_BOILERPLATE.sub("", line).strip() for line in run.stderr.splitlines()]
        return Verdict(run.returncode == 0, next((line for line in lines if line), ""))


@dataclass(frozen=True)
class Verdict:
    """What ptxas said: `message` is its first line."""

    accepted: bool
    message: str


@lru_cache(maxsize=1)
def find_assembler() -> Assembler | None:
    """The ptxas of the package, else the one on PATH, else None."""
    for path in _candidates():
        run = subprocess.run(
            [str(path), "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
        found = re.search(r"V(\d+(?:\.\d+)+)", run.stdout)
        if run.returncode == 0 and found:
            return Assembler(path, found.group(1))
    return None


def assembler() -> Assembler:
    """The same, required.

    Raises:
        UnsupportedError: there is none; says what to install.
    """
    found = find_assembler()
    if found is None:
        raise UnsupportedError(MISSING)
    return found


def _candidates() -> list[Path]:
    found = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:
            continue
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found += [Path(folder) / "bin" / "ptxas" for folder in folders]
    on_path = shutil.which("ptxas")
    if on_path:
        found.append(Path(on_path))
    return [path for path in found if path.is_file()]
