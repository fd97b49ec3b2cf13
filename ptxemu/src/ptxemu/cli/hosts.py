"""Host code that launches kernels, run with every launch emulated: a script, a program, a .cu."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ptxemu.cli.kinds import PROGRAM_ARCH, SCRIPT_ARCH, SOURCE
from ptxemu.cli.outcome import Outcome
from ptxemu.cli.progress import Progress
from ptxemu.cuda.fatbin import arch_of_program, has_kernels
from ptxemu.cuda.nvcc import compile_program
from ptxemu.launch_log import Log
from ptxemu.launch_setup import OnLaunch
from ptxemu.sched.policy import Policy

ARCHS = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True, slots=True)
class How:
    """Settings of the launches."""

    arch: str | None
    """None: what the program has PTX for."""
    check: bool
    policy: Policy
    progress: Progress
    on_launch: OnLaunch | None = None
    nvcc_options: str = ""
    is_module: bool = False
    """The script is the name of a module, as for python -m."""
    leaves_stdout: bool = False
    """A program's output goes to stderr, because stdout is the report's."""
    unchecked: re.Pattern[str] | None = None
    """Kernels with it in their names run without the check."""
    program: Path | None = None
    """The source's program, where it has been compiled already."""


def run_host(command: Sequence[str], how: How) -> Outcome:
    """Run a script (.py), a source (.cu) or a program with its arguments.

    Raises:
        PtxEmuError: it cannot be started; says what is missing.
    """
    try:
        if how.is_module or command[0].endswith(".py"):
            return _run_script(command, how)
        if command[0].endswith(SOURCE):
            return _run_source(command, how)
        return _run_program(command[0], command, how)
    finally:
        how.progress.finish()


def _run_source(command: Sequence[str], how: How) -> Outcome:
    source, *arguments = command
    with compiled(source, how) as program:
        words = [str(program), *arguments]
        return _run_program(source, words, how, arch=how.arch or PROGRAM_ARCH)


@contextmanager
def compiled(source: str, how: How) -> Iterator[Path]:
    """The program that nvcc makes of a source, in a folder that goes at the end."""
    if how.program is not None:
        yield how.program
        return
    with tempfile.TemporaryDirectory(prefix="ptxemu-") as folder:
        program = Path(folder) / Path(source).stem
        options = shlex.split(how.nvcc_options)
        compile_program(Path(source), program, arch=how.arch or PROGRAM_ARCH, options=options)
        yield program


def _run_program(
    name: str, command: Sequence[str], how: How, *, arch: str | None = None
) -> Outcome:
    from ptxemu.cuda.program import run_program

    arch = arch or how.arch or arch_of_program(command[0], ARCHS) or PROGRAM_ARCH
    log = Log(how.check, how.policy, how.progress, how.on_launch, how.unchecked)
    output = sys.stderr if how.leaves_stdout else None
    code = run_program(log, command, arch=arch, output=output)
    launches = has_kernels(command[0])
    return Outcome(name, arch, code, log, interruption=log.interruption, has_kernels=launches)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def _run_script(command: Sequence[str], how: How) -> Outcome:
    """A Python script: its CuTe DSL kernels are caught in Python, others by the stand-in."""
    from ptxemu.cuda.in_process import InProcess
    from ptxemu.cuda.script import run_script

    arch = how.arch or SCRIPT_ARCH
    log = Log(how.check, how.policy, how.progress, how.on_launch, how.unchecked)
    contexts: list[AbstractContextManager[object]] = []
    host_memory = None
    if is_installed("torch"):
        from ptxemu import cutedsl
        from ptxemu.cutedsl.arguments import Arguments

        if is_installed("cutlass"):
            emulation = cutedsl.emulate(
                arch=arch,
                check=how.check,
                on_finding="collect",
                policy=how.policy,
                on_progress=how.progress,
                on_launch=how.on_launch,
                unchecked=how.unchecked,
            )
            log = emulation  # launches of both ways in make one report, in their order
            contexts.append(emulation)
        contexts.append(cutedsl.pretend_gpu(arch))
        tensors = Arguments([], [], has_bare_pointers=True)
        host_memory = partial(tensors.memory, note=log.note, allow_unregistered=None)
    contexts.append(InProcess(log, arch, host_memory))
    script, *arguments = command
    outcome = run_script(contexts, script, arguments, is_module=how.is_module)
    if outcome.interrupted is not None:
        log.interrupted(outcome.interrupted)
    # In a launch C may stand between the interrupt and the script.
    code = outcome.exit_code if log.interruption is None else log.interruption.exit_code
    return Outcome(script, arch, code, log, outcome.error, log.interruption)
