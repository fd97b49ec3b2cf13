"""Compiles .cu files: nvcc of this machine, or of the packages of the registry."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ptxemu.cuda.build import standin
from ptxemu.errors import PtxEmuError, UnreadableFileError

_PACKAGES = "nvidia.cu13"
_OPTIONS = ("-lineinfo", "-O3")
_PROGRAM_OPTIONS = ("-cudart", "none", "-no-compress")
_RELOCATABLE = re.compile(r"-+(rdc|relocatable-device-code)(=true)?|-+(dc|device-c)")
_SHELL = re.compile(r"[$`\"\\\n]")
"""What a shell sees between the double quotes into which nvcc puts names."""
_NO_MAIN = re.compile(r"undefined (reference to|symbol:) [`']?main\b")


class NvccError(PtxEmuError):
    """nvcc is not there, or refuses the file."""


def compile_program(source: Path, output: Path, *, arch: str, options: Sequence[str] = ()) -> None:
    """Compile a .cu file with its host code into a program that is linked with the stand-in.

    Args:
        arch: the device, as "sm_90a".
        options: of nvcc, behind those that are always given.

    Raises:
        NvccError: what nvcc says.
        NoCompilerError: there is no C compiler.
        UnreadableFileError: no such file.
    """
    virtual = arch.replace("sm_", "compute_")
    made = standin()
    command = [
        *_PROGRAM_OPTIONS,
        f"-gencode=arch={virtual},code={virtual}",
        *options,
        str(made.library),
        f"-L{made.folder}",
        "-Xlinker",
        f"-rpath={made.folder}",
    ]
    _compile(source, output, command)


def compile_ptx(source: Path, output: Path, *, arch: str, options: Sequence[str] = ()) -> None:
    """Compile the kernels of a .cu file to PTX.

    Raises:
        NvccError: what nvcc says.
        UnreadableFileError: no such file.
    """
    _compile(source, output, ["-ptx", f"-arch={arch}", *options])


def _compile(source: Path, output: Path, options: Sequence[str]) -> None:
    if not source.is_file():
        raise UnreadableFileError(f"{source}: no such file")
    if _SHELL.search(str(source)):
        raise NvccError(f'{source}: nvcc hands names to a shell, to which $ ` " \\ are commands')
    if relocatable := next(filter(_RELOCATABLE.fullmatch, options), None):
        raise NvccError(f"{source}: relocatable device code ({relocatable}) is not emulated")
    nvcc, more = find_nvcc()
    said = run_nvcc([nvcc, *_OPTIONS, *more, str(source), *options, "-o", str(output)])
    if _NO_MAIN.search(said):
        how = "--grid, --block and --arg (ptxemu check --help) launch a kernel of it"
        raise NvccError(f"{source} has no main: {how}")
    if said:
        raise NvccError(f"nvcc refuses {source}:\n{said}")


def run_nvcc(command: Sequence[str]) -> str:
    """Run nvcc; what it says if it fails, else nothing. Its files go with it, if it is stopped."""
    with tempfile.TemporaryDirectory(prefix="ptxemu-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return (done.stderr + done.stdout).strip() if done.returncode else ""


def find_nvcc() -> tuple[str, list[str]]:
    """nvcc, and the options with which it finds its own parts.

    Raises:
        NvccError: it is not there; says how to get it.
    """
    found = shutil.which("nvcc")
    if found is not None:
        return found, []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    installed = Path(home) / "bin" / "nvcc"
    if installed.is_file():
        return str(installed), []
    packaged = _packaged()
    if packaged is not None and (packaged / "bin" / "nvcc").is_file():
        return str(packaged / "bin" / "nvcc"), [f"-I{packaged / 'include'}"]
    raise NvccError(
        "nvcc is not there: install the CUDA toolkit, or "
        "pip install 'nvidia-cuda-nvcc>=13.0' 'nvidia-cuda-cccl>=13.0'"
    )


def _packaged() -> Path | None:
    """The folder that NVIDIA's packages of CUDA 13 share."""
    try:
        spec = importlib.util.find_spec(_PACKAGES)
    except ImportError:
        return None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else None
