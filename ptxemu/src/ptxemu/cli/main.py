"""Entry point: the parser of the command line, and errors as one line with exit code 2."""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from ptxemu.cli import report
from ptxemu.cli.help_text import HelpFormatter
from ptxemu.cli.interruption import interruptible
from ptxemu.cli.terminal import write_err
from ptxemu.cuda.nvcc import NvccError
from ptxemu.errors import Interruption, PtxEmuError
from ptxemu.machine.device import device_for, limit_sms

COMMANDS = {
    "info": "info_command",
    "run": "launch_command",
    "check": "launch_command",
    "trace": "trace_command",
    "mutate": "mutate_command",
    "exec": "exec_command",
    "nvcc": "nvcc_command",
}
"""The file of each command, which is loaded when it is asked for."""
CANNOT = 2
INTERRUPTED = 130

_DESCRIPTION = """\
Run and check Hopper and Blackwell PTX on a machine without the GPU.

  ptxemu exec ./program                  run a CUDA program as it is, check it
  ptxemu exec --arch sm_100a script.py   the same for a CuTe DSL script
  ptxemu check kernel.cu -- 1024         compile a source with its host code,
                                         run and check it
  ptxemu info kernel.ptx                 what a PTX file holds, needs and lacks
  ptxemu check kernel.ptx --grid 4 --block 128 --arg f32[1024]=random
                                         run a kernel, check it
  ptxemu run kernel.ptx ...              run it only
  ptxemu trace kernel.ptx ...            timeline, memory maps, bank conflicts
  ptxemu mutate kernel.ptx ...           break each synchronisation in turn
  ptxemu nvcc ...                        the nvcc that ptxemu finds, pip's too

Exit code: 0 all is well, 1 something was found (a hazard, a missing
instruction), 2 the command could not be carried out, 130 it was interrupted, 143
it was stopped by SIGTERM, 124 its time (--time-limit) was over."""


class _Parser(argparse.ArgumentParser):
    """A parser, and with it those of its commands, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong; the usage has as many lines as a command has options."""
        self.exit(CANNOT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser(*names: str) -> argparse.ArgumentParser:
    """The parser of these commands; by default of all."""
    root = _Parser(prog="ptxemu", description=_DESCRIPTION, formatter_class=HelpFormatter)
    root.add_argument("--version", action="version", version=f"ptxemu {report.own_version()}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names or COMMANDS:
        import_module(f"ptxemu.cli.{COMMANDS[name]}").add_parser(commands, name)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    behind: list[str] = []
    if words[:1] in (["run"], ["check"]) and "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    named = [name for name in words[:1] if name in COMMANDS]
    options = parser(*named).parse_args(words)
    if behind:
        options.arguments = behind
    try:
        limit_sms(getattr(options, "sms", None))
        if (arch := getattr(options, "arch", None)) is not None:
            device_for(arch)  # or nvcc would compile for it, and the program run first
        # Commands with a limit of their time have their own context.
        with nullcontext() if hasattr(options, "time_limit") else interruptible(None):
            code: int = options.carry_out(options)
    except NvccError as error:  # the compiler's lines stay lines
        write_err(f"ptxemu: error: {error}\n")
        return CANNOT
    except (PtxEmuError, ValueError, OSError, zlib.error) as error:
        write_err(f"ptxemu: error: {' '.join(str(error).split())}\n")
        return CANNOT
    except MemoryError as error:
        write_err(f"ptxemu: error: there is not enough memory: {error or 'for this file'}\n")
        return CANNOT
    except RecursionError:
        write_err("ptxemu: error: something in this file is nested too deeply\n")
        return CANNOT
    except Interruption as stop:
        write_err(f"ptxemu: {stop.reason}\n")
        return stop.exit_code
    except KeyboardInterrupt:
        write_err("ptxemu: interrupted\n")
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
