"""Targets of `ptxemu trace` and `ptxemu mutate`: a PTX file's kernel or a script's launches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ptxemu.cli.hosts import How, run_host
from ptxemu.cli.kinds import SOURCE, is_host_code, launch_options, ptx_of
from ptxemu.cli.launch_command import PTX_HELP, add_launch_options, prepare
from ptxemu.cli.options import add_schedule_options, policy_of
from ptxemu.cli.progress import Progress
from ptxemu.cli.terminal import write_err
from ptxemu.errors import ExecutionError, PtxEmuError
from ptxemu.events import Observer
from ptxemu.launch_setup import LaunchSetup, OnLaunch


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """The PTX file with its launch, or the script; and the schedule."""
    parser.add_argument("ptx", nargs="?", type=Path, help=PTX_HELP)
    add_launch_options(parser)
    parser.add_argument(
        "--arch",
        help="device: sm_90a, sm_100a or sm_103a (default: the PTX's .target; of a script sm_100a)",
    )
    add_schedule_options(parser)
    parser.add_argument(
        "--exec",
        dest="script",
        nargs=argparse.REMAINDER,
        metavar=("SCRIPT", "ARGUMENT"),
        help="instead of a PTX file: a script, program or source, run as by `ptxemu exec`, and\n"
        "its arguments; comes last",
    )
    parser.add_argument(
        "--launch",
        type=int,
        metavar="N",
        help="of a script: only its launch N, from 0 (default: the first launch of each kernel)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


class Chooser:
    """Passes on the launches that the options choose."""

    def __init__(self, options: argparse.Namespace, on_launch: OnLaunch) -> None:
        self._options = options
        self._on_launch = on_launch
        self._seen: set[str] = set()
        self._count = 0

    def __call__(self, setup: LaunchSetup) -> Observer | None:
        """Act as an `OnLaunch`; return None for a launch that is not chosen."""
        number, self._count = self._count, self._count + 1
        is_first = setup.kernel not in self._seen
        self._seen.add(setup.kernel)
        wanted = self._options.launch
        name = self._options.kernel or ""
        is_chosen = (number == wanted if wanted is not None else is_first) and name in setup.kernel
        return self._on_launch(setup) if is_chosen else None


@contextmanager
def resolved(options: argparse.Namespace) -> Iterator[None]:
    """Whatever kind of file is given, `options` name PTX or a script."""
    path = options.ptx
    if path is None or options.script or not is_host_code(path):
        yield
    elif path.suffix == SOURCE and launch_options(options):
        with ptx_of(options):
            yield
    else:
        options.ptx, options.script = None, [str(path)]
        yield


def run_target(options: argparse.Namespace, on_launch: OnLaunch, *, check: bool) -> list[str]:
    """Run it, telling `on_launch` of the chosen launches; returns what failed.

    Raises:
        PtxEmuError: there is no target, or it cannot be launched.
    """
    if (options.ptx is None) == (not options.script):
        raise PtxEmuError("expected either a PTX file or --exec SCRIPT (or a program)")
    if options.script:
        return _run_host(options, on_launch, check=check)
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


def _run_host(options: argparse.Namespace, on_launch: OnLaunch, *, check: bool) -> list[str]:
    how = How(
        options.arch,
        check,
        policy_of(options),
        Progress(quiet=options.quiet),
        Chooser(options, on_launch),
    )
    run = run_host(options.script, how)
    sys.stdout.flush()
    if run.interruption is not None:
        raise run.interruption
    if run.error is not None:
        write_err(run.error.rstrip("\n") + "\n")
    failures = list(run.ran.failures)
    if run.exit_code and not failures:
        failures.append(f"{run.name} ended with exit code {run.exit_code}")
    return failures
