"""Runs a Python script that was written for a GPU machine, every launch on the emulator."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from ptxemu.errors import PtxEmuError
from ptxemu.text_files import read_text

_EXTRAS = {"cupy": "cupy", "cutlass": "cutedsl", "torch": "triton", "triton": "triton"}
"""ptxemu's extra that brings what a script imports."""
_NOT_THE_SCRIPT = ("/ptxemu/", "/cutlass/", "/torch/", "/tvm_ffi/", "/triton/", "<frozen")


@dataclass(frozen=True)
class ScriptOutcome:
    """Outcome of a script."""

    exit_code: int
    error: str | None = None
    """The traceback of what it died of."""
    interrupted: KeyboardInterrupt | None = None


def run_script(
    contexts: Sequence[AbstractContextManager[object]],
    target: str,
    arguments: Sequence[str],
    *,
    is_module: bool = False,
) -> ScriptOutcome:
    """Run `target` as __main__ with `arguments`, inside `contexts`.

    Args:
        contexts: what makes this machine look as if it had a GPU; entered in their order.
        target: path of a script, or the name of a module with `is_module`.

    Raises:
        UnreadableFileError: there is no such script, or it is no text.
    """
    if not is_module:
        read_text(Path(target), "Python")
    before = sys.argv, sys.path
    sys.argv = [target, *arguments]
    sys.path = [os.getcwd() if is_module else str(Path(target).resolve().parent), *sys.path]
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return _run(target, is_module=is_module)
    finally:
        sys.argv, sys.path = before


def _run(target: str, *, is_module: bool) -> ScriptOutcome:
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            return ScriptOutcome(1, stop.code)
        return ScriptOutcome(stop.code or 0)
    except KeyboardInterrupt as stop:
        return ScriptOutcome(0, interrupted=stop)
    except PtxEmuError as error:
        return ScriptOutcome(1, f"{_last_line_outside(error)}{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        advice = f"ptxemu's extra {extra!r} brings it: ptxemu[{extra}]\n" if extra else ""
        return ScriptOutcome(1, traceback.format_exc() + advice)
    except BaseException:
        return ScriptOutcome(1, traceback.format_exc())
    return ScriptOutcome(0)


def _last_line_outside(error: BaseException) -> str:
    """Return the script's line that led to an error of the emulation: the line of the launch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not any(part in frame.filename for part in _NOT_THE_SCRIPT) and frame.line
    ]
    return f'File "{own[-1].filename}", line {own[-1].lineno}: {own[-1].line}\n' if own else ""
