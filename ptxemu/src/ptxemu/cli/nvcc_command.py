"""`ptxemu nvcc`: the nvcc that ptxemu finds; pip's package puts none on PATH."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

from ptxemu.cuda.nvcc import find_nvcc


def add_parser(commands: Any, name: str) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        name,
        help="run nvcc: this machine's, or pip's (nvidia-cuda-nvcc), which is not on PATH",
        add_help=False,  # all options are nvcc's, --help too
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Run it; returns its exit code."""
    nvcc, more = find_nvcc()
    return subprocess.run([nvcc, *more, *options.arguments], check=False).returncode
