"""Compiles the stand-in, once for each version of its sources, with the system's C compiler.

The libraries run in programs and in this process. Those in the cache are used if they are what was
written, and nobody else can have written them.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ptxemu.errors import PtxEmuError
from ptxemu.private_cache import DRAFT, cache_folder, delete_unused, require_own

logger = logging.getLogger("ptxemu.cuda")

SOURCES = Path(__file__).parent / "standin"
STANDIN = "libptxemu_cuda.so"
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_LIBRARIES = ("libcuda.so.1", "libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13")
"""The names by which programs look for CUDA."""
_LINKER_NAMES = ("libcuda.so", "libcudart.so", "libc10_cuda.so", "libtorch_cuda.so")
"""Those by which linkers do."""
_COMPLETE = "complete"
"""File of the libraries' digests, which is written last."""
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_for_this_process: list[Path] = []
"""The folder of the stand-in that is in no cache, if there is one."""
_links: dict[Path, Path] = {}
"""Links of this process to folders that have no plain path."""
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
    """Return the stand-in, compiled if it is not there yet; without a cache, for this process.

    Raises:
        NoCompilerError: names what is missing.
    """
    compiler = _compiler()
    try:
        root = cache_folder()
        folder = root / f"standin-{_digest(compiler)}"
        if not _is_whole(folder):
            _compile_into(folder, compiler)
        with suppress(OSError):  # it can be read only
            os.utime(folder)
    except OSError as error:
        if not _for_this_process:
            logger.warning("the stand-in for CUDA is compiled for this process only: %s", error)
            made = _temporary_folder() / "made"
            made.mkdir()
            _compile(compiler, made)
            _for_this_process.append(made)
        folder = _for_this_process[0]
    return Standin(_plain(folder))


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has what `_compile` wrote, and nobody else can have changed it."""
    try:
        require_own(folder, stat.S_ISDIR)
        for name in (_COMPLETE, STANDIN, *_LIBRARIES):
            require_own(folder / name)
        links = {os.readlink(folder / name) for name in _LINKER_NAMES}
        return links == {STANDIN} and (folder / _COMPLETE).read_text() == _digests(folder)
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("not used: %s", error)
        return False


def _digests(folder: Path) -> str:
    """Return SHA-256 and name of each library, as sha256sum writes them."""
    digests = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in (STANDIN, *_LIBRARIES)
    }
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def _compile_into(folder: Path, compiler: str) -> None:
    """Put a whole stand-in at `folder`, in place of a damaged one."""
    delete_unused(folder.parent, DRAFT)
    delete_unused(folder.parent, "standin-")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=DRAFT) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _compile(compiler, made)
        if not _is_whole(folder):  # else another process was faster
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / "damaged")
        try:
            made.rename(folder)
        except OSError:
            if not _is_whole(folder):
                raise


def _plain(folder: Path) -> Path:
    """Return a path of `folder` that shells, linkers and LD_PRELOAD do not split.

    Raises:
        NoCompilerError: temporary folders have no such path, either.
    """
    if _PLAIN.fullmatch(str(folder)):
        return folder
    if folder not in _links:
        link = _temporary_folder() / "standin"
        if not _PLAIN.fullmatch(str(link)):
            raise NoCompilerError(
                f"neither {str(folder)!r} nor {str(link)!r} is a path that the linker takes: set "
                "PTXEMU_CACHE to a folder of letters, digits and / . _ + -"
            )
        link.symlink_to(folder)
        _links[folder] = link
    return _links[folder]


def _temporary_folder() -> Path:
    """Return a new folder, of this user alone, that is deleted when this process ends."""
    folder, owner = tempfile.mkdtemp(prefix="ptxemu-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # no child's
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


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
    digest = hashlib.sha256(f"{compiler} {platform.machine()}".encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> None:
    """Make the stand-in in `folder`, by relative names: the linker splits a path at a comma."""
    sources = sorted(SOURCES.glob("*.c"))
    defined = {name for source in sources for name in _DEFINITION.findall(source.read_text())}
    names = (SOURCES / "names.txt").read_text().split()
    rest = folder / "unsupported.c"
    rest.write_text(_unsupported(names, defined))
    aliases = folder / "aliases"
    aliases.write_text("\n".join(_aliases(names, defined)))
    _run(
        folder,
        compiler,
        *_OPTIONS,
        *map(str, sources),
        rest.name,
        f"-I{SOURCES}",
        f"@{aliases.name}",
        f"-Wl,-soname,{STANDIN}",
        "-ldl",
        "-o",
        STANDIN,
    )
    for name in _LIBRARIES:
        _compile_alias_library(compiler, folder, name)
    for name in _LINKER_NAMES:
        (folder / name).symlink_to(STANDIN)
    (folder / _COMPLETE).write_text(_digests(folder))
    for path in (folder, *(folder / name for name in (_COMPLETE, STANDIN, *_LIBRARIES))):
        path.chmod(0o700)  # whatever the umask


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
        folder,
        compiler,
        "-shared",
        "-fPIC",
        source.name,
        f"-Wl,--no-as-needed,-soname,{name},--version-script={script.name},-rpath,$ORIGIN",
        "-L.",
        f"-l:{STANDIN}",
        "-o",
        name,
    )


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise NoCompilerError(f"{command[0]} does not compile the stand-in: {done.stderr.strip()}")
