"""The entry point `flashdsa`: its commands, its version, and errors as one line."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from flashdsa.cli.bench import bench
from flashdsa.cli.check import check
from flashdsa.cli.choose import choose
from flashdsa.cli.extras import EXTRAS, say_missing
from flashdsa.cli.info import info
from flashdsa.cli.moved import moved_commands
from flashdsa.errors import FlashDsaError

INTERRUPTED = 130


class OneLineError(click.ClickException):
    """An error that the user can act on: one line on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"flashdsa: error: {self.format_message()}", file=file or sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show an error that explains itself as one line."""
    try:
        yield
    except KeyboardInterrupt as error:
        click.echo("flashdsa: interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of a pipe went away; click ends quietly
            raise
        raise OneLineError(str(error)) from error
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise OneLineError(f"this command {say_missing(package)}") from error
    except (FlashDsaError, ValueError) as error:
        raise OneLineError(" ".join(str(error).split())) from error


class FlashDsaCommand(click.Command):
    """A command that may raise the library's errors, its options' values, too."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Read the command line."""
        with one_line_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        prepare_process()
        with one_line_errors():
            return super().invoke(ctx)


class FlashDsaGroup(FlashDsaCommand, click.Group):
    """A group whose commands may raise the library's errors."""


def prepare_process() -> None:
    """Set what torch reads when it is imported, which commands do."""
    # NOTE: OpenMP threads that spin while they wait make every run ten times slower as soon as
    # something else wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch says on import that there is no numpy, which nothing here needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import flashdsa

        click.echo(f"flashdsa {flashdsa.__version__}")
        ctx.exit()


@click.group(
    cls=FlashDsaGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log to stderr, e.g. which backend was chosen.")
def cli(verbose: bool) -> None:
    """DeepSeek Sparse Attention: sparse MLA forward and backward, fp8 top-k indexer.

    \b
    Start with:
      flashdsa info      what this machine can run, and why not the rest
      flashdsa check     errors of every operation against float64
      flashdsa bench     speed and memory, as JSON and a chart
      flashdsa choose    which kernels serve a call, and why

    Every command takes --json (one JSON document on stdout, nothing else) and --help. Exit codes:
    0 done, 1 a check failed, 2 wrong input or something this machine cannot do, 130 interrupted.
    """
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


for command in (info, check, bench, choose, *moved_commands()):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit."""
    cli(prog_name="flashdsa")
