"""The command line as a function: exit code, stdout and stderr of a run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from flashdsa.cli.main import cli

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """`run("info", "--json")` is `flashdsa info --json`."""
    return lambda *arguments: CliRunner().invoke(cli, list(arguments))
