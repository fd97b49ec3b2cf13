"""Compiles the stand-in, once for each version of its sources, with the system's C compiler."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ptxemu.errors import PtxEmuError

SOURCES = Path(__file__).parent / "standin"
STANDIN = "libptxemu_cuda.so"
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_LIBRARIES = ("libcuda.so.1", "libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13")
"""The names by which programs look for CUDA."""
_LINKER_NAMES = ("libcuda.so", "libcudart.so", "libc10_cuda.so", "libtorch_cuda.so")
"""Those by which linkers do."""
_DEFINITION = re.compile(r"^API [\w \*]*?\**(\w+)\(", re.MULTILINE)
_PER_THREAD = re.compile(r"(\w+)_pt[sd][sz]?")


class NoCompilerError(PtxEmuError):
    """There is no C compiler, or it does not compile the stand-in."""


@dataclass(frozen=True, slots=True)
class Standin:
    """The compiled stand-in."""

    folder: Path
    """Holds the stand-in, and libraries with CUDA's names that depend on it."""

    @property
    def library(self) -> Path:
        """The library that a program loads before all others."""
        return self.folder / STANDIN


def standin() -> Standin:
    """The stand-in, compiled if it is not there yet.

    Raises:
        NoCompilerError: names what is missing.
    """
    compiler = _compiler()
    folder = _cache() / f"standin-{_digest(compiler)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _compile(compiler, made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return Standin(folder)


def _cache() -> Path:
    named = os.environ.get("PTXEMU_CACHE")
    if named:
        return Path(named)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if os.access(home if home.exists() else home.parent, os.W_OK):
        return home / "ptxemu"
    return Path(tempfile.gettempdir()) / f"ptxemu-{os.getuid()}"


def _compiler() -> str:
    for name in (os.environ.get("CC"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise NoCompilerError(
        "the stand-in for the CUDA runtime is compiled on this machine, which has no C compiler: "
        "install gcc or clang, or name one in CC"
    )


def _digest(compiler: str) -> str:
    digest = hashlib.sha256(compiler.encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> None:
    sources = sorted(SOURCES.glob("*.c"))
    defined = {name for source in sources for name in _DEFINITION.findall(source.read_text())}
    names = (SOURCES / "names.txt").read_text().split()
    rest = folder / "unsupported.c"
    rest.write_text(_unsupported(names, defined))
    aliases = folder / "aliases"
    aliases.write_text("\n".join(_aliases(names, defined)))
    _run(
        compiler,
        *_OPTIONS,
        *map(str, sources),
        str(rest),
        f"-I{SOURCES}",
        f"@{aliases}",
        f"-Wl,-soname,{STANDIN}",
        "-ldl",
        "-o",
        str(folder / STANDIN),
    )
    for name in _LIBRARIES:
        _compile_alias_library(compiler, folder, name)
    for name in _LINKER_NAMES:
        (folder / name).symlink_to(STANDIN)


def _unsupported(names: list[str], defined: set[str]) -> str:
    """C source of the functions that are not emulated: each tells its name."""
    lines = ['#include "standin.h"']
    for name in names:
        base = _PER_THREAD.fullmatch(name)
        if name not in defined and not (base and base[1] in defined):
            lines.append(f'API int {name}(void) {{ return unsupported("{name}"); }}')
    return "\n".join(lines) + "\n"


def _aliases(names: list[str], defined: set[str]) -> list[str]:
    """Linker options: the variants for per-thread default streams are the functions themselves."""
    bases = {name: _PER_THREAD.fullmatch(name) for name in names if name not in defined}
    return [
        f"-Wl,--defsym={name}={base[1]}"
        for name, base in bases.items()
        if base is not None and base[1] in defined
    ]


def _compile_alias_library(compiler: str, folder: Path, name: str) -> None:
    """A library with a name of CUDA's and nothing in it but that it needs the stand-in.

    Programs that are linked with libcudart ask it for a version node of its own name.
    """
    source, script = folder / "empty.c", folder / "versions"
    source.write_text("int ptxemu_is_here;\n")
    script.write_text(f"{name} {{ global: ptxemu_is_here; }};\n")
    _run(
        compiler,
        "-shared",
        "-fPIC",
        str(source),
        f"-Wl,--no-as-needed,-soname,{name},--version-script={script},-rpath,$ORIGIN",
        f"-L{folder}",
        f"-l:{STANDIN}",
        "-o",
        str(folder / name),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{command[0]} does not compile the stand-in: {done.stderr.strip()}")
