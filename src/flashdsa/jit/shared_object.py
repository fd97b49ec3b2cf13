"""Compiled kernels in one shared object, called with torch and apache-tvm-ffi alone."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.cuda_library import bind_functions, cuda_functions
from flashdsa.jit.elf import undefined_symbols

_EXPORTS = "{ global: __tvm_ffi_*; flashdsa_*; local: *; };"
"""Exports of an object, for the linker: two objects, or another library's, never share a
function."""
SHIM = Path(__file__).with_name("runtime_shim.c")
"""Linked into every object."""
_MARK = "flashdsa kernels of sources "
_DIGEST_BYTES = hashlib.sha256().digest_size
"""Length of an object's end, which is the SHA-256 of all before it."""


def build_shared_object(target: Path, compiled: Mapping[str, Any], sources: str) -> None:
    """Link functions compiled with `--enable-tvm-ffi` into `target`.

    Args:
        target: replaced at once when everything has succeeded.
        compiled: what `cute.compile` returned, by exported name.
        sources: hash of what they were compiled from, which `is_from` finds in the file.

    Raises:
        UnsupportedError: no C compiler is found.
        RuntimeError: it failed, and its messages are in the error; or the kernels call a function
            that the shim does not have.
        OSError: the target's folder cannot be written.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnsupportedError("building the kernels' shared object needs gcc; none is on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        objects = [f"{name}.o" for name in compiled]
        for name, function in compiled.items():
            function.export_to_c(f"{folder}/{name}.o", function_name=name)
        made, exports = Path(folder) / "made.so", Path(folder) / "exports.map"
        exports.write_text(_EXPORTS)
        mark = f'-DFLASHDSA_SOURCES="{_MARK}{sources};"'
        command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,--version-script={exports.name}"]
        command += [mark, "-o", made.name, *objects, str(SHIM)]
        # Names in the folder: gcc would split its path at a comma.
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not link the kernels: {done.stderr.strip()}")
        unknown = [name for name in undefined_symbols(made) if not name.startswith("TVMFFI")]
        if unknown:
            raise RuntimeError(
                f"the kernels call functions that {SHIM.name} does not have: {', '.join(unknown)}"
            )
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as file:
            file.write(digest)
        made.chmod(made.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # whatever the umask
        os.replace(made, target)


def is_from(path: Path, sources: str) -> bool:
    """Whether `path` exists and was built from `sources`; does not load it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(f"{_MARK}{sources};".encode()) >= 0
    except (OSError, ValueError):  # no such file, or an empty one
        return False


def is_intact(path: Path) -> bool:
    """Return whether an object is, byte by byte, what `build_shared_object` wrote."""
    content = memoryview(path.read_bytes())
    digest = hashlib.sha256(content[:-_DIGEST_BYTES]).digest()
    return content[-_DIGEST_BYTES:] == digest


def sources_of(path: Path) -> str:
    """The hash of what `path` was built from; "" for another file."""
    found = re.search(re.escape(_MARK).encode() + rb"([0-9a-z ]*);", path.read_bytes())
    return found[1].decode() if found else ""


def load_shared_object(path: Path) -> Callable[[str], Any]:
    """A lookup of the functions in `path` by name; hands the object the process's CUDA.

    The functions exist without CUDA, too: they check their arguments, and raise when they would
    launch.

    Raises:
        UnsupportedError: apache-tvm-ffi, by which they are called, is not installed; or the CUDA
            runtime is too old.
    """
    try:
        import tvm_ffi
    except ImportError as error:
        raise UnsupportedError(
            "calling compiled kernels needs apache-tvm-ffi: "
            "pip install 'apache-tvm-ffi>=0.1.11,<0.2'"
        ) from error
    module = tvm_ffi.load_module(str(path))
    bind_functions(path, cuda_functions())
    return lambda name: module[name]
