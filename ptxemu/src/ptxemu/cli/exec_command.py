"""`ptxemu exec`: run a script or a program written for a GPU, every launch emulated and checked."""

from __future__ import annotations

import argparse
from typing import Any

from ptxemu.cli.help_text import HelpFormatter
from ptxemu.cli.host_report import add_report_options, carry_out_host
from ptxemu.cli.hosts import ARCHS
from ptxemu.cli.interruption import add_time_limit_option
from ptxemu.cli.options import (
    add_failure_option,
    add_finding_options,
    add_json_file_option,
    add_lanes_option,
    add_schedule_options,
    add_unchecked_option,
)
from ptxemu.cli.output_paths import output_folder
from ptxemu.cli.schedules import add_seeds_option
from ptxemu.errors import LaunchError

_HELP = """\
Run host code that launches kernels, unmodified, on a machine without a GPU. Every launch runs on
the emulator and is checked, and a report closes the run. The host code is

  a program that was compiled with nvcc: a stand-in takes the place of the CUDA runtime and \
driver, and kernels are taken from the PTX that the program has in it (compile with -gencode \
arch=compute_90a,code=compute_90a, and -lineinfo for lines of the source);
  a Python script (.py, or -m module) that compiles CuTe DSL kernels and launches them on torch \
tensors: those on "cuda" are CPU tensors, torch.cuda and the CUDA driver answer as the emulated \
device, benchmarks run their kernel once;
  a source (.cu), which nvcc compiles first.

Options of ptxemu come before the host code, everything behind it is the host code's.

Keep problems small: the emulator runs some 30,000 to 300,000 warp instructions a second.

--save DIR writes every launch to a file of its own: PTX, launch shape, parameters and all memory
that it may use, as they were before it. ptxemu run, check, trace, mutate and info take such a file
in the place of a PTX file, later or on another machine, with neither the program nor torch.

Ctrl-C, SIGTERM and --time-limit end it, and the report says what was found until then.

Exit code: the host code's, or 1 if the check found an error or a launch failed; 128 + the signal's
number, or 124, if it was ended.

examples:
  ptxemu exec ./my_test --gtest_filter=Gemm.*
  ptxemu exec --junit report.xml --sarif report.sarif ./my_test
  ptxemu exec --arch sm_100a dense_gemm.py --mnkl 256,256,128,1
  ptxemu exec --arch sm_90a -m mypackage.selftest
  ptxemu exec --save launches dense_gemm.py --mnkl 256,256,128,1
  ptxemu check launches/Gemm.0.launch"""


def add_parser(commands: Any, name: str) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        name,
        help="run a program or script, every launch emulated and checked",
        description=_HELP,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # a program may have options that begin like these
    )
    parser.add_argument(
        "--arch",
        choices=ARCHS,
        help="the GPU to pretend (default: what the program has PTX for, else sm_90a; of a\n"
        "script sm_100a)",
    )
    add_schedule_options(parser)
    add_seeds_option(parser)
    add_time_limit_option(parser)
    parser.add_argument("--no-check", dest="check", action="store_false", help="run only")
    add_unchecked_option(parser)
    add_lanes_option(parser)
    parser.add_argument(
        "--save",
        type=output_folder,
        metavar="DIR",
        help="write each launch N (from 0) to DIR/KERNEL.N.launch before it runs",
    )
    add_json_file_option(parser)
    add_report_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_finding_options(parser)
    add_failure_option(parser)
    parser.add_argument(
        "--nvcc", default="", metavar="OPTIONS", help="options of nvcc for a source, in one string"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m"
    )
    parser.add_argument("script", help="the program, script or source (or the module)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(carry_out=carry_out, program=None, is_check=False)


def carry_out(options: argparse.Namespace) -> int:
    """Run the host code and report."""
    if options.seeds is not None and options.save is not None:
        raise LaunchError("--save: of one schedule; leave out --seeds")
    return carry_out_host(options)
