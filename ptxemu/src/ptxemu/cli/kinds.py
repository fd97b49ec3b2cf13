"""Kinds of files that commands take: PTX, sources, programs, scripts."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ptxemu.cuda.nvcc import compile_ptx

SOURCE = ".cu"
SCRIPT_ARCH, PROGRAM_ARCH = "sm_100a", "sm_90a"
"""The devices where nothing says which."""
LAUNCH_OPTIONS = ("kernel", "grid", "block", "cluster", "smem", "arg")


def is_host_code(path: Path) -> bool:
    """Whether a file is a source, a script or a program, which launches kernels itself."""
    if path.suffix in (SOURCE, ".py"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((b"\x7fELF", b"#!"))
    except OSError:
        return False


def launch_options(options: argparse.Namespace) -> list[str]:
    """The options that say how a kernel is launched, of those given."""
    return [f"--{name}" for name in LAUNCH_OPTIONS if getattr(options, name, None)]


@contextmanager
def ptx_of(options: argparse.Namespace) -> Iterator[None]:
    """`options.ptx` is the PTX of the source that it was."""
    with tempfile.TemporaryDirectory(prefix="ptxemu-") as folder:
        ptx = Path(folder) / f"{options.ptx.stem}.ptx"
        arch, words = getattr(options, "arch", None), getattr(options, "nvcc", "")
        compile_ptx(options.ptx, ptx, arch=arch or PROGRAM_ARCH, options=shlex.split(words))
        options.ptx = ptx
        yield
