"""Whether blocks become machine code: where llvmlite is, unless PTXEMU_CORE says numpy."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.program import Program, ThreadedBlocks, ThreadedMaker
from ptxemu.machine.state import Cta

CORES = ("numpy", "llvm")
COLD_INSTRUCTIONS, WARM_INSTRUCTIONS = 25_000, 2_000
"""Instructions of blocks that NumPy does before a kernel becomes threaded code: in a process, which
makes the routines once, and of the kernel."""


NUMPY_PRODUCTS, NUMPY_SCANS = 500, 5000
"""Products, and accesses that the check judges, that Python and NumPy do in a process before there
is machine code for them."""


class _Executed:
    """Work that NumPy has done and machine code could have done: instructions, products..."""

    in_process = 0
    products = 0
    scans = 0


def threaded_maker() -> ThreadedMaker | None:
    """Return the maker of threaded code; None: NumPy does all blocks.

    Raises:
        ValueError: PTXEMU_CORE is neither numpy nor llvm.
        ImportError: it is llvm, and llvmlite is not installed.
    """
    core = os.environ.get("PTXEMU_CORE", "")
    if core not in ("", *CORES):
        raise ValueError(f"PTXEMU_CORE: expected one of {', '.join(CORES)}; got {core!r}")
    if core == "llvm":
        import_module("ptxemu.compiled.chain")
    return make_threaded if core != "numpy" and _is_there() else None


def make_threaded(program: Program, more: int) -> ThreadedBlocks | None:
    """Threaded code of a kernel; None without llvmlite, or as long as it does not pay.

    Args:
        more: instructions that NumPy does if it gets None.
    """
    _Executed.in_process += more
    if program.executed < WARM_INSTRUCTIONS or _Executed.in_process < COLD_INSTRUCTIONS:
        return None
    chain = _compiled("chain")
    return None if chain is None else chain.ThreadedKernel(program)


def products(cta: Cta) -> ModuleType | None:
    """`ptxemu.compiled.products` for one product more; None where NumPy is to do it."""
    if not _may_be_code(cta):
        return None
    _Executed.products += 1
    return None if _Executed.products <= NUMPY_PRODUCTS else _compiled("products")


_may_be_code: EngineState[Cta, bool] = EngineState(
    lambda cta: os.environ.get("PTXEMU_CORE", "") != "numpy"
)
"""Whether a CTA's engines may use machine code; the environment takes long to ask."""


def judge(more: int) -> ModuleType | None:
    """`ptxemu.compiled.judge_code` after `more` accesses; None where Python is to go on."""
    if os.environ.get("PTXEMU_CORE", "") == "numpy":
        return None
    _Executed.scans += more
    return None if _Executed.scans <= NUMPY_SCANS else _compiled_judge()


@cache
def _compiled_judge() -> ModuleType | None:
    code = _compiled("judge_code")
    return None if code is None or code.judge() is None else code


@cache
def _is_there() -> bool:
    """Whether llvmlite seems to be installed."""
    try:
        return find_spec("llvmlite") is not None
    except ImportError:  # an import hook refuses it
        return False


@cache
def _compiled(name: str) -> ModuleType | None:
    # NOTE: llvmlite takes a tenth of a second to import: only when a kernel is warm.
    try:
        return import_module(f"ptxemu.compiled.{name}")
    except ImportError:
        return None
