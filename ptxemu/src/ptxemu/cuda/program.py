"""Runs a program as a process of its own, with the stand-in in the place of CUDA."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from ptxemu.cuda.build import Standin, standin
from ptxemu.cuda.server import Server
from ptxemu.errors import UnreadableFileError
from ptxemu.launch_log import Log

_PATIENCE_SECONDS = 0.5
"""Time that a program has to end after it is told to."""


def run_program(
    log: Log, command: Sequence[str], *, arch: str, output: IO[str] | None = None
) -> int:
    """Run `command` and whatever it starts; the launches of all go to `log`.

    Args:
        output: where the program's stdout goes; None: to this process's.

    Returns:
        its exit code; of one that a signal ended 128 + the signal's number, as a shell says.

    Raises:
        UnreadableFileError: there is no such program.
        NoCompilerError: the stand-in cannot be compiled.
    """
    program = _path_of(command[0])
    made = standin()
    with Server(log, arch) as server:
        environment = environment_for(made, str(server.path), os.environ)
        process = subprocess.Popen([program, *command[1:]], env=environment, stdout=output)
        try:
            code = process.wait()
        except KeyboardInterrupt as stop:
            log.interrupted(stop)
            _end(process)
            code = 0
        if code < 0:
            log.stop("stopped, for its program has ended")  # a launch that it waited for
    if log.interruption is not None:
        return log.interruption.exit_code
    if code < 0:
        log.note(f"the program was ended by {signal.Signals(-code).name}{_reason(-code)}")
        return 128 - code
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program, whatever it does about it."""
    process.terminate()
    try:
        process.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment_for(
    made: Standin, socket_path: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment in which programs find the stand-in."""
    found = dict(environment)
    found["PTXEMU_SOCKET"] = socket_path
    for name, first in (("LD_PRELOAD", made.library), ("LD_LIBRARY_PATH", made.folder)):
        rest = environment.get(name)
        found[name] = f"{first}:{rest}" if rest else str(first)
    return found


def _path_of(name: str) -> str:
    if os.sep not in name and os.path.isfile(name):  # a program of this folder, as in an IDE
        return os.path.abspath(name)
    found = shutil.which(name)
    if found is not None:
        return found
    if os.path.isdir(name):
        raise UnreadableFileError(f"{name}: a folder; expected a file of a program or Python")
    if os.path.isfile(name):
        raise UnreadableFileError(f"{name}: not a program that may be executed, nor a .py or .cu")
    raise UnreadableFileError(f"{name}: no such file")


def _reason(number: int) -> str:
    if number == signal.SIGSEGV:
        return " (does the host read or write device memory?)"
    return ""
