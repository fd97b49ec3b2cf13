"""What `ptxemu trace` and `ptxemu mutate` work on: a PTX file's kernel or a script's launches."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ptxemu.cli.launch_command import (
    PTX_HELP,
    add_launch_options,
    add_schedule_options,
    policy_of,
    prepare,
)
from ptxemu.cli.progress import Progress
from ptxemu.errors import ExecutionError, PtxEmuError
from ptxemu.events import Observer
from ptxemu.launch_setup import LaunchSetup, OnLaunch

_NAME_WIDTH = 60


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """The PTX file with its launch, or the script; and the schedule."""
    parser.add_argument("ptx", nargs="?", type=Path, help=PTX_HELP)
    add_launch_options(parser)
    parser.add_argument(
        "--arch", help="device: sm_90a or sm_100a (default: the PTX's .target; of a script sm_100a)"
    )
    add_schedule_options(parser)
    parser.add_argument(
        "--exec",
        dest="script",
        nargs=argparse.REMAINDER,
        metavar=("SCRIPT", "ARGUMENT"),
        help="instead of a PTX file: a CuTe DSL script, run as by `ptxemu exec`, and its\n"
        "arguments; comes last",
    )
    parser.add_argument(
        "--launch",
        type=int,
        metavar="N",
        help="of a script: only its launch N, from 0 (default: the first launch of each kernel)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def short_name(kernel: str) -> str:
    """What a person recognises of a kernel's name, fit for a file name.

    CuTe DSL's names hold all types of all arguments: the class is enough.
    """
    name = re.sub(r"^kernel_cutlass_(kernel_+(main__)?)?", "", kernel).split("_object_at_")[0]
    return re.sub(r"\W+", "_", name)[:_NAME_WIDTH]


class Chooser:
    """Passes on the launches that the options choose."""

    def __init__(self, options: argparse.Namespace, on_launch: OnLaunch) -> None:
        self._options = options
        self._on_launch = on_launch
        self._seen: set[str] = set()
        self._count = 0

    def __call__(self, setup: LaunchSetup) -> Observer | None:
        """As `OnLaunch`; None for a launch that is not chosen."""
        number, self._count = self._count, self._count + 1
        is_first = setup.kernel not in self._seen
        self._seen.add(setup.kernel)
        wanted = self._options.launch
        name = self._options.kernel or ""
        is_chosen = (number == wanted if wanted is not None else is_first) and name in setup.kernel
        return self._on_launch(setup) if is_chosen else None


def run_target(options: argparse.Namespace, on_launch: OnLaunch, *, check: bool) -> list[str]:
    """Run it, telling `on_launch` of the chosen launches; returns what failed.

    Raises:
        PtxEmuError: there is no target, or it cannot be launched.
    """
    if (options.ptx is None) == (not options.script):
        raise PtxEmuError("expected either a PTX file or --exec SCRIPT")
    if options.script:
        return _run_script(options, on_launch, check=check)
    progress = Progress(quiet=options.quiet)
    setup, _ = prepare(options)
    try:
        setup.launch(
            policy=policy_of(options),
            observer=on_launch(setup),
            check=check,
            on_progress=lambda now: progress(setup.kernel, now),
        )
    except ExecutionError as error:
        return [f"kernel {setup.kernel}: {error}"]
    finally:
        progress.finish()
    return []


def _run_script(options: argparse.Namespace, on_launch: OnLaunch, *, check: bool) -> list[str]:
    try:
        from ptxemu import cutedsl
        from ptxemu.cutedsl.script import run_script
    except ImportError as error:
        raise PtxEmuError(f"--exec needs torch, nvidia-cutlass-dsl, llvmlite: {error}") from error
    progress = Progress(quiet=options.quiet)
    arch = options.arch or "sm_100a"
    emulation = cutedsl.emulate(
        arch=arch,
        check=check,
        on_finding="collect",
        policy=policy_of(options),
        on_progress=progress,
        on_launch=Chooser(options, on_launch),
    )
    script, *arguments = options.script
    outcome = run_script(emulation, script, arguments, arch=arch)
    progress.finish()
    sys.stdout.flush()
    if outcome.error is not None:
        sys.stderr.write(outcome.error.rstrip("\n") + "\n")
    failures = list(emulation.failures)
    if outcome.exit_code and not failures:
        failures.append(f"the script ended with exit code {outcome.exit_code}")
    return failures
