"""The command line as a function: exit code, stdout and stderr of a run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from flashdsa.cli.main import cli

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _as_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as a pipe, whatever the terminal of the tests is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run() -> Run:
    """`run("info", "--json")` is `flashdsa info --json`."""
    return lambda *arguments: CliRunner().invoke(cli, list(arguments))
