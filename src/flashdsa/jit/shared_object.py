"""Compiled kernels in one shared object, called with torch and apache-tvm-ffi alone."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashdsa.errors import UnsupportedError

SHIM = Path(__file__).with_name("runtime_shim.c")
"""Linked into every object."""
_MARK = "flashdsa kernels of sources "


def build_shared_object(target: Path, compiled: Mapping[str, Any], sources: str) -> None:
    """Link functions compiled with `--enable-tvm-ffi` into `target`.

    Args:
        target: replaced at once when everything has succeeded.
        compiled: what `cute.compile` returned, by exported name.
        sources: hash of what they were compiled from, which `is_from` finds in the file.

    Raises:
        UnsupportedError: there is no C compiler.
        RuntimeError: it failed; its messages are in the error.
        OSError: the target's folder cannot be written.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnsupportedError("building the kernels' shared object needs gcc; none is on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        objects = []
        for name, function in compiled.items():
            path = f"{folder}/{name}.o"
            function.export_to_c(path, function_name=name)
            objects.append(path)
        made = Path(folder) / "made.so"
        mark = f'-DFLASHDSA_SOURCES="{_MARK}{sources};"'
        command = [compiler, "-shared", "-fPIC", "-O1", mark, "-o", str(made), *objects, str(SHIM)]
        done = subprocess.run(
            [*command, str(_runtime_library())], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{compiler} could not link the kernels: {done.stderr.strip()}")
        os.replace(made, target)


def is_from(path: Path, sources: str) -> bool:
    """Whether `path` exists and was built from `sources`; looks without loading it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(f"{_MARK}{sources};".encode()) >= 0
    except (OSError, ValueError):  # no such file, or an empty one
        return False


def _runtime_library() -> Path:
    """CuTe DSL's static library of the CUDA dialect's runtime calls."""
    import nvidia_cutlass_dsl

    for base in nvidia_cutlass_dsl.__path__:
        for found in sorted(Path(base).glob("cu1*/lib/libcuda_dialect_runtime_static.a")):
            return found
    raise UnsupportedError("nvidia-cutlass-dsl: libcuda_dialect_runtime_static.a is not in it")


def load_shared_object(path: Path) -> Callable[[str], Any]:
    """A lookup of the functions in `path` by name; loads the CUDA runtime first.

    Raises:
        UnsupportedError: apache-tvm-ffi, by which they are called, is not installed.
    """
    import ctypes

    try:
        import tvm_ffi
    except ImportError as error:
        raise UnsupportedError(
            "calling compiled kernels needs apache-tvm-ffi: pip install apache-tvm-ffi"
        ) from error
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    module = tvm_ffi.load_module(str(path))
    return lambda name: module[name]
