"""NVIDIA's disassembler: where it is, and its text of a cubin."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.toolchain.find import TIMEOUT_SECONDS, find_tool

PACKAGE = "nvidia-cuda-nvdisasm"
MISSING = (
    f"nvdisasm was not found: pip install {PACKAGE} (or flashdsa[assemble]), or put a CUDA "
    "toolkit's bin folder on PATH"
)


class OldCubinError(ArgumentValueError):
    """A cubin of a ptxas before CUDA 13, of which nvdisasm prints no live ranges."""


@dataclass(frozen=True)
class Disassembler:
    """An nvdisasm.

    Attributes:
        version: "13.5.37".
    """

    path: Path
    version: str

    def text(self, image: bytes, *options: str) -> str:
        """Return what it prints of a cubin.

        Raises:
            OldCubinError: the cubin has an older layout than this needs.
            ArgumentValueError: it cannot read the cubin; says why.
        """
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "module.cubin"
            source.write_bytes(image)
            run = subprocess.run(
                [str(self.path), *options, str(source)],
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_SECONDS,
            )
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if "warning" not in line]
            said = next((line.split(":", 1)[-1].strip() for line in lines if line), "no message")
            message = f"nvdisasm {self.version} cannot read the cubin: {said}"
            if "life ranges" in said:
                raise OldCubinError(
                    f"{message}; made by an older ptxas, so inspect its .ptx, which is assembled "
                    "anew"
                )
            raise ArgumentValueError(message)
        return run.stdout


@lru_cache(maxsize=1)
def find_disassembler() -> Disassembler | None:
    """The nvdisasm of the package, else the one on PATH, else None."""
    found = find_tool("nvdisasm", ("nvidia.cu13", "nvidia.cuda_nvdisasm"))
    return Disassembler(*found) if found else None


def disassembler() -> Disassembler:
    """The same, required.

    Raises:
        UnsupportedError: there is none; says what to install.
    """
    found = find_disassembler()
    if found is None:
        raise UnsupportedError(MISSING)
    return found
