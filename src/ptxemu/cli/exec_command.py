"""`ptxemu exec`: run a CuTe DSL script written for a GPU, every launch emulated and checked."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from ptxemu.cli import report
from ptxemu.cli.launch_command import (
    add_finding_options,
    add_schedule_options,
    limit_of,
    policy_of,
)
from ptxemu.cli.progress import Progress
from ptxemu.errors import PtxEmuError

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

Exit code: the script's, or 1 if the check found an error.

examples:
  ptxemu exec --arch sm_100a dense_gemm.py --mnkl 256,256,128,1
  ptxemu exec --arch sm_90a -m mypackage.selftest"""


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
    parser.add_argument("--json", metavar="FILE", help="write the report there too; - for stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_finding_options(parser)
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
    emulation = cutedsl.emulate(
        arch=options.arch,
        check=not options.no_check,
        on_finding="collect",
        policy=policy_of(options),
        on_progress=progress,
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
    seconds = time.monotonic() - started
    sys.stdout.flush()
    if outcome.error is not None:
        sys.stderr.write(outcome.error.rstrip("\n") + "\n")
    if options.json is not None:
        _write_json(options, emulation, outcome, seconds)
    if options.json != "-":
        sys.stdout.write(_text(options, emulation, outcome, seconds))
    return outcome.exit_code or (1 if report.has_errors(emulation.findings) else 0)


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
    lines.append(report.summary_line(launches, emulation.findings, checked=not options.no_check))
    return "\n".join(lines) + "\n"
