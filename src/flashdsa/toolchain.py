"""NVIDIA's assembler and disassembler, programs in packages from PyPI, else on PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self

from flashdsa.errors import ArgumentValueError, UnsupportedError

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
