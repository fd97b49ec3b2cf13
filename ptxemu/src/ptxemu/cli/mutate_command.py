"""`ptxemu mutate`: break each synchronisation instruction in turn; is it noticed?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ptxemu.cli.help_text import HelpFormatter
from ptxemu.cli.launch_command import prepare
from ptxemu.cli.options import add_json_file_option
from ptxemu.cli.output_paths import write_file_or_stdout
from ptxemu.cli.target import add_target_options, resolved, run_target
from ptxemu.cli.terminal import write_err, write_out
from ptxemu.errors import PtxEmuError
from ptxemu.launch_setup import LaunchSetup
from ptxemu.mutate import CATEGORIES, Equivalents, Replay, Report, Result, mutate, mutations_of
from ptxemu.mutate.runner import CAUGHT
from ptxemu.saved_launch import load_launch

_HELP = """\
Mutation testing of a kernel's synchronisation. One instruction at a time is removed or weakened
(a fence dropped, a wait made true at once, wait_group N made N + 1, a byte count off by 16, an
acquire made relaxed...), the launch is repeated on the same inputs with the check on, under several
schedules, until something notices: a finding or warning that the original lacks, another result, a
deadlock. What nothing notices is a survivor: the instruction is not needed, or your inputs do not
need it, or the check is blind there.

A mutant whose line the launch does not execute counts as not reached. One that nothing notices is
redundant if, as measured on the original, its instruction never had an effect: whatever a wait,
barrier or fence made its warp know (accesses to memory and, of waits and barriers, arrivals) it
knew already, or learnt again before it did anything. A survivor that you have understood to be
harmless goes into a file for --equivalent, a line each:
  1234 removed: the barrier behind it orders the same accesses
  gemm.py:849 true at once: producer tail; nothing outlives a one-CTA cluster
  barrier#3 removed: the third barrier of the kernel; ...
(PTX line, source line or category#number as listed, name of the mutation as listed or *, the
reason). "of reached" is caught / reached, "share" is caught / (reached - redundant - equivalent).

categories for --only:
{categories}

examples:
  ptxemu mutate kernel.ptx --grid 2 --block 128 \\
      --arg f32[1024]=random --arg f32[1024]=zeros
  ptxemu mutate --only proxy-fence --jobs 2 \\
      --exec dense_gemm.py --mnkl 256,256,128,1
  ptxemu mutate gemm.0.launch --also gemm_short.0.launch --equivalent gemm.txt

Exit code: 0 everything possible was caught, 1 there are survivors."""


def add_parser(commands: Any, name: str) -> None:
    """Add the command to the parser."""
    width = max(len(name) for name in CATEGORIES)
    listed = "\n".join(f"  {name:{width}}  {about}" for name, about in CATEGORIES.items())
    parser = commands.add_parser(
        name,
        help="remove or weaken each synchronisation instruction; is it noticed?",
        description=_HELP.format(categories=listed),
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # a program may have options that begin like these
    )
    add_target_options(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=tuple(CATEGORIES),
        metavar="CATEGORY",
        help="mutants of this category (repeat for more)",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="another saved launch of the kernel (repeat for more): what one launch does not\n"
        "need, another may, as with a loop that is shorter than its pipeline",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="at most N mutants, evenly spread")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument(
        "--equivalent", type=Path, metavar="FILE", help="mutants known to be equivalent"
    )
    parser.add_argument(
        "--notes",
        action="store_true",
        help="a new finding of level note catches a mutant too: for a kernel that is to have none",
    )
    add_json_file_option(parser)
    parser.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Try all mutants and report; 1 if one survived."""
    equivalents = Equivalents.parse(options.equivalent.read_text() if options.equivalent else "")
    with resolved(options):
        replays = _replays(options)
    if not replays:
        raise PtxEmuError("no launch was chosen: see --kernel and --launch")
    reports = []
    for replay in replays:
        function = replay.module.syntax.functions[replay.kernel]
        for stranger in equivalents.strangers(mutations_of(function)):
            write_err(f"{options.equivalent}: {replay.kernel} has no mutant {stranger!r}\n")
        progress = _Progress(replay.kernel, quiet=options.quiet)
        baseline, results = mutate(
            replay,
            also=[Replay(load_launch(path)) for path in options.also],
            only=options.only,
            limit=options.limit,
            jobs=options.jobs,
            equivalents=equivalents,
            notes=options.notes,
            on_result=progress,
        )
        progress.finish()
        reports.append(Report(replay.kernel, baseline, results))
    if options.json is not None:
        document = json.dumps([report.to_json_dict() for report in reports], indent=2) + "\n"
        write_file_or_stdout(options.json, document)
    if options.json != "-":
        for report in reports:
            write_out("\n".join(report.lines()) + "\n\n")
    return 1 if any(report.survivors for report in reports) else 0


def _replays(options: argparse.Namespace) -> list[Replay]:
    if options.ptx is not None and not options.script:
        return [Replay(prepare(options)[0])]
    replays: list[Replay] = []

    def on_launch(setup: LaunchSetup) -> None:
        replays.append(Replay(setup))

    for failure in run_target(options, on_launch, check=False):
        write_err(f"failed: {failure}\n")
    return replays


class _Progress:
    """A line on stderr: how many mutants are done, how many were caught."""

    def __init__(self, kernel: str, *, quiet: bool) -> None:
        self._kernel = kernel
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._caught = 0

    def __call__(self, done: int, total: int, result: Result) -> None:
        """One more mutant."""
        self._caught += result.verdict == CAUGHT
        if self._quiet:
            return
        text = f"{done} of {total} mutants, {self._caught} caught"
        if self._terminal:
            sys.stderr.write(f"\r\033[K{text}")
        elif done == total or done % max(total // 10, 1) == 0:
            write_err(f"{text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """End the line."""
        if self._terminal and not self._quiet:
            sys.stderr.write("\r\033[K")
