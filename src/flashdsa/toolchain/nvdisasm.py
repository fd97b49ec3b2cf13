"""NVIDIA's disassembler: where it is, and its text of a cubin."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flashdsa.errors import ArgumentValueError
from flashdsa.toolchain.find import Tool


class OldCubinError(ArgumentValueError):
    """A cubin of a ptxas before CUDA 13, of which nvdisasm prints no live ranges."""


class Disassembler(Tool):
    """An nvdisasm."""

    name = "nvdisasm"
    package = "nvidia-cuda-nvdisasm>=13.0"
    modules = ("nvidia.cu13", "nvidia.cuda_nvdisasm")

    def text(self, image: bytes, *options: str) -> str:
        """Return what it prints of a cubin.

        Raises:
            OldCubinError: the cubin has an older layout than this needs.
            ArgumentValueError: it cannot read the cubin; says why.
        """
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "module.cubin"
            source.write_bytes(image)
            run = self.run(*options, source)
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
