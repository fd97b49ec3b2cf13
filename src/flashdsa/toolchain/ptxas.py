"""NVIDIA's assembler: its path, its version, and the cubin that it makes of a text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.toolchain.find import TIMEOUT_SECONDS, find_tool

PACKAGE = "nvidia-cuda-nvcc"
MISSING = (
    f"ptxas was not found: pip install {PACKAGE} (or flashdsa[assemble]), or put a CUDA toolkit's "
    "bin folder on PATH"
)
_BOILERPLATE = re.compile(r"^ptxas (?:\S+, line \d+; )?(?:fatal|error) *: *")


@dataclass(frozen=True)
class Assembler:
    """A ptxas.

    Attributes:
        version: "13.5.37".
    """

    path: Path
    version: str

    def assemble(self, ptx: str, arch: str) -> Assembled:
        """Assemble a module with line information; a NUL at the end of the text does not count.

        Raises:
            ArgumentValueError: ptxas refuses it; says why.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
            source.write_text(ptx.rstrip("\0"))
            command = [str(self.path), f"-arch={arch}", "-lineinfo", "-v"]
            run = subprocess.run(
                [*command, str(source), "-o", str(target)],
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_SECONDS,
            )
            if run.returncode == 0 and target.is_file():
                return Assembled(target.read_bytes(), run.stderr)
        lines = [_BOILERPLATE.sub("", line).strip() for line in run.stderr.splitlines()]
        said = next((line for line in lines if line and "info" not in line), "no message")
        raise ArgumentValueError(f"ptxas {self.version} refuses it for {arch}: {said}")


@dataclass(frozen=True)
class Assembled:
    """A cubin, and the messages of ptxas -v."""

    image: bytes
    log: str


@lru_cache(maxsize=1)
def find_assembler() -> Assembler | None:
    """The ptxas of the package, else the one on PATH, else None."""
    found = find_tool("ptxas", ("nvidia.cu13", "nvidia.cuda_nvcc"))
    return Assembler(*found) if found else None


def assembler() -> Assembler:
    """The same, required.

    Raises:
        UnsupportedError: there is none; says what to install.
    """
    found = find_assembler()
    if found is None:
        raise UnsupportedError(MISSING)
    return found
