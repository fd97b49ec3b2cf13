"""NVIDIA's assembler: where it is, which version, what it says of a text and makes of it."""

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

    def judge(self, ptx: str, arch: str = "sm_100a") -> Verdict:
        """Whether it assembles a module; a NUL at the end of the text does not count."""
        run, _ = self._run(ptx, arch, ())
        lines = [_BOILERPLATE.sub("", line).strip() for line in run.stderr.splitlines()]
        return Verdict(run.returncode == 0, next((line for line in lines if line), ""))

    def assemble(self, ptx: str, arch: str) -> Assembled:
        """The module with line information; the text is what `judge` takes.

        Raises:
            ArgumentValueError: ptxas refuses it; says why.
        """
        run, image = self._run(ptx, arch, ("-lineinfo", "-v"))
        if run.returncode or image is None:
            lines = [_BOILERPLATE.sub("", line).strip() for line in run.stderr.splitlines()]
            said = next((line for line in lines if line and "info" not in line), "no message")
            raise ArgumentValueError(f"ptxas {self.version} refuses it for {arch}: {said}")
        return Assembled(image, run.stderr)

    def _run(
        self, ptx: str, arch: str, options: tuple[str, ...]
    ) -> tuple[subprocess.CompletedProcess[str], bytes | None]:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
            source.write_text(ptx.rstrip("\0"))
            command = [str(self.path), f"-arch={arch}", *options, str(source), "-o", str(target)]
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
            )
            return run, target.read_bytes() if target.is_file() else None


@dataclass(frozen=True)
class Verdict:
    """What ptxas said: `message` is its first line."""

    accepted: bool
    message: str


@dataclass(frozen=True)
class Assembled:
    """A cubin, and what ptxas said of it with -v."""

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
