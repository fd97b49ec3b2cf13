"""`ptxemu exec`: run a CuTe DSL script written for a GPU, every launch emulated and checked."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptxemu.cli import report
from ptxemu.cli.launch_command import (
    add_failure_option,
    add_finding_options,
    add_schedule_options,
    limit_of,
    policy_of,
)
from ptxemu.cli.progress import Progress
from ptxemu.cli.target import short_name
from ptxemu.errors import LaunchError, PtxEmuError
from ptxemu.launch_setup import LaunchSetup
from ptxemu.saved_launch import SUFFIX, save_launch

if TYPE_CHECKING:
    from ptxemu.cutedsl.script import ScriptOutcome
    from ptxemu.cutedsl.session import Emulation

_HELP = """\
Run a Python script that compiles CuTe DSL kernels and launches them on torch tensors, unmodified,
on a machine without a GPU. Tensors on "cuda" are CPU tensors, torch.cuda and the CUDA driver
answer as the emulated device, every launch runs on the emulator and is checked, and a report
closes the run. Benchmarks in the script run their kernel once.

Options of ptxemu come before the script, everything behind it is the script's.

Keep problems small: the emulator runs some 100,000 to 1,000,000 warp instructions a second.

--save DIR writes every launch to a file of its own: PTX, launch shape, parameters and all memory
that it may use, as they were before it. ptxemu run, check, trace, mutate and info take such a file
in the place of a PTX file, later or on another machine, with neither CuTe DSL nor torch.

Exit code: the script's, or 1 if the check found an error or a launch failed.

examples:
  ptxemu exec --arch sm_100a dense_gemm.py --mnkl 256,256,128,1
  ptxemu exec --arch sm_90a -m mypackage.selftest
  ptxemu exec --save launches dense_gemm.py --mnkl 256,256,128,1
  ptxemu check launches/Gemm.0.launch"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "exec",
        help="run a CuTe DSL script, every launch emulated and checked",
        description=_HELP,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--arch", default="sm_100a", choices=("sm_90a", "sm_100a"), help="the GPU to pretend"
    )
    add_schedule_options(parser)
    parser.add_argument("--no-check", action="store_true", help="run only")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="write each launch N (from 0) to DIR/KERNEL.N.launch before it runs",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there too; - for stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_finding_options(parser)
    add_failure_option(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m"
    )
    parser.add_argument("script", help="the script (or the module)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Run the script and report."""
    try:
        from ptxemu import cutedsl
        from ptxemu.cutedsl.script import run_script
    except ImportError as error:
        raise PtxEmuError(f"exec needs torch, nvidia-cutlass-dsl and llvmlite: {error}") from error
    progress = Progress(quiet=options.quiet)
    saved = None if options.save is None else _Saved(options.save)
    emulation = cutedsl.emulate(
        arch=options.arch,
        check=not options.no_check,
        on_finding="collect",
        policy=policy_of(options),
        on_progress=progress,
        on_launch=None if saved is None else saved.save,
    )
    started = time.monotonic()
    outcome = run_script(
        emulation,
        options.script,
        options.arguments,
        arch=options.arch,
        is_module=options.is_module,
    )
    progress.finish()
    if saved is not None:
        emulation.notes.extend(saved.notes)
    seconds = time.monotonic() - started
    sys.stdout.flush()
    if outcome.error is not None:
        sys.stderr.write(outcome.error.rstrip("\n") + "\n")
    if options.json is not None:
        _write_json(options, emulation, outcome, seconds)
    if options.json != "-":
        sys.stdout.write(_text(options, emulation, outcome, seconds))
    return outcome.exit_code or int(_is_failure(options, emulation))


def _is_failure(options: argparse.Namespace, emulation: Emulation) -> bool:
    """Whether the exit code is to be 1 though the script ended well."""
    return bool(emulation.failures) or report.is_failure(emulation.findings, options.fail_on)


class _Saved:
    """Writes launches into a folder."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        """What was written and what could not be, for people."""
        self._folder = folder
        self._count = 0

    def save(self, setup: LaunchSetup) -> None:
        """As `OnLaunch`."""
        number, self._count = self._count, self._count + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{short_name(setup.kernel)}.{number}{SUFFIX}"
        try:
            save_launch(setup, path)
        except LaunchError as error:
            self.notes.append(f"not saved: {error}")
        else:
            self.notes.append(f"saved {path} ({path.stat().st_size:,} bytes)")


def _write_json(
    options: argparse.Namespace, emulation: Emulation, outcome: ScriptOutcome, seconds: float
) -> None:
    text = report.as_json(
        emulation.launches,
        emulation.findings,
        failures=emulation.failures,
        notes=emulation.notes,
        script=options.script,
        arch=options.arch,
        exit_code=outcome.exit_code,
        error=outcome.error,
        seconds=round(seconds, 3),
    )
    if options.json == "-":
        sys.stdout.write(text)
    else:
        with open(options.json, "w") as file:
            file.write(text)


def _text(
    options: argparse.Namespace, emulation: Emulation, outcome: ScriptOutcome, seconds: float
) -> str:
    launches = emulation.launches
    lines = ["", f"ptxemu: {options.script} on {options.arch}, {seconds:.1f} s"]
    lines += report.launch_lines(launches)
    lines += [f"note: {note}" for note in emulation.notes]
    lines += report.finding_lines(
        emulation.findings, with_notes=options.notes, limit=limit_of(options)
    )
    lines += [f"failed: {failure}" for failure in emulation.failures]
    if outcome.exit_code:
        lines.append(f"the script ended with exit code {outcome.exit_code}")
    lines.append(
        report.summary_line(
            launches,
            emulation.findings,
            checked=not options.no_check,
            failures=emulation.failures,
        )
    )
    return "\n".join(lines) + "\n"
