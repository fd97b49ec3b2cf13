"""NVIDIA's assembler: its path, its version, and the cubin that it makes of a text."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashdsa.errors import ArgumentValueError
from flashdsa.toolchain.find import Tool

_BOILERPLATE = re.compile(r"^ptxas (?:\S+, line \d+; )?(?:fatal|error) *: *")


class Assembler(Tool):
    """A ptxas."""

    name = "ptxas"
    package = "nvidia-cuda-nvcc>=13.0"
    modules = ("nvidia.cu13", "nvidia.cuda_nvcc")

    def assemble(self, ptx: str, arch: str) -> Assembled:
        """Assemble a module with line information; a NUL at the end of the text does not count.

        Raises:
            ArgumentValueError: ptxas refuses it; says why.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "module.ptx", Path(folder) / "module.cubin"
            source.write_text(ptx.rstrip("\0"))
            run = self.run(f"-arch={arch}", "-lineinfo", "-v", source, "-o", target)
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
