"""Options that several commands have, and what they ask for."""

from __future__ import annotations

import argparse
import os
import re

from ptxemu.cli import report
from ptxemu.cli.output_paths import output_file_or_stdout
from ptxemu.sched.policy import DEFAULT_LIMIT, Policy

MOST_PROCESSES = 8
"""Default maximum: each process holds what it has written since the launch began."""


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose the schedule."""
    parser.add_argument("--seed", type=int, default=0, help="of inputs and schedule (default 0)")
    parser.add_argument(
        "--async",
        dest="asynchronous",
        choices=("random", "eager", "late", "slow"),
        help="when asynchronous work happens (default random)",
    )
    parser.add_argument(
        "--step-limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help=f"stop after N warp instructions (default {DEFAULT_LIMIT:,})",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="without the check: most processes among which the clusters of a long launch are\n"
        f"dealt, if nothing ties them (default: one a core, at most {MOST_PROCESSES})",
    )
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help="multiprocessors of the device (default: the real number; with few of them a\n"
        "persistent kernel goes around its loop on a small problem)",
    )


def add_json_file_option(parser: argparse.ArgumentParser) -> None:
    """The option that writes the report as JSON."""
    parser.add_argument(
        "--json",
        type=output_file_or_stdout,
        metavar="FILE",
        help="write the report there too; - for stdout",
    )


def add_finding_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose which findings are shown."""
    parser.add_argument("--notes", action="store_true", help="also show findings of level note")
    parser.add_argument(
        "--all", action="store_true", help=f"show all findings, not the first {report.MOST_SHOWN}"
    )


def add_unchecked_option(parser: argparse.ArgumentParser) -> None:
    """The option that spares kernels the check."""
    parser.add_argument(
        "--unchecked",
        type=re.compile,
        metavar="REGEX",
        help="kernels that run without the check, many times faster: a regular expression that is\n"
        "in their (mangled) names, as BlockForEach of CUTLASS's fills",
    )


def add_lanes_option(parser: argparse.ArgumentParser) -> None:
    """The option that says whether lanes of a warp may race."""
    parser.add_argument(
        "--warp-lanes",
        choices=("on", "off"),
        default="on",
        help="whether lanes of one warp race where no bar.warp.sync, shuffle, vote or other\n"
        "instruction of the warp stands between them (default on)",
    )


def add_failure_option(parser: argparse.ArgumentParser) -> None:
    """The option that says which findings make the exit code 1."""
    choices = "\n".join(f"  {name}: {meaning}" for name, meaning in report.FAIL_ON.items())
    parser.add_argument(
        "--fail-on",
        type=_fail_on,
        default="isa",
        metavar="WHAT",
        help=f"what makes the exit code 1 (default isa)\n{choices}\n"
        "codes of findings may follow: isa,unordered-float-additions",
    )


def _fail_on(text: str) -> str:
    try:
        report.codes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def policy_of(options: argparse.Namespace) -> Policy:
    """The schedule that the options ask for."""
    return Policy(
        asynchronous=options.asynchronous or Policy().asynchronous,
        seed=options.seed,
        limit=options.step_limit,
        warp_lanes=getattr(options, "warp_lanes", "on") == "on",
        processes=options.processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES),
    )
