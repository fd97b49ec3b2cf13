"""Whether blocks become machine code: where llvmlite is, unless PTXEMU_CORE says numpy."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType

from ptxemu.machine.blocks import Accelerator, Block, FastFunction
from ptxemu.machine.program import Program
from ptxemu.machine.stretches import Stretch, StretchMaker

CORES = ("numpy", "llvm")


def accelerator() -> Accelerator | None:
    """What makes machine code of hot blocks; None to leave all of them to NumPy.

    Raises:
        ValueError: PTXEMU_CORE is neither numpy nor llvm.
        ImportError: it is llvm, and llvmlite is not installed.
    """
    core = os.environ.get("PTXEMU_CORE", "")
    if core not in ("", *CORES):
        raise ValueError(f"PTXEMU_CORE: expected one of {', '.join(CORES)}; got {core!r}")
    if core == "llvm":
        import_module("ptxemu.compiled")
    return None if core == "numpy" else compile_block


def compile_block(block: Block, *, masked: bool) -> FastFunction | None:
    """A hot block as machine code; None without llvmlite, or if an instruction is not known."""
    compiled = _compiled()
    if compiled is None:
        return None
    function: FastFunction | None = compiled.compile_block(block, masked=masked)
    return function


def stretch_maker() -> StretchMaker | None:
    """What makes machine code of whole loops; None to leave all of them to the interpreter."""
    return None if os.environ.get("PTXEMU_CORE", "") == "numpy" else make_stretch


def make_stretch(program: Program, first: int, end: int) -> Stretch | None:
    """Instructions as machine code; None without llvmlite, or if too few of them are known."""
    compiled = _compiled()
    if compiled is None:
        return None
    stretch: Stretch | None = compiled.make_stretch(program, first, end)
    return stretch


@cache
def _compiled() -> ModuleType | None:
    # NOTE: llvmlite takes a tenth of a second to import: only when a block is hot.
    try:
        return import_module("ptxemu.compiled")
    except ImportError:
        return None
