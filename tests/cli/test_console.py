"""What commands print: widths and bars."""

from __future__ import annotations

import re
import sys
import time
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from flashdsa.cli import console


def test_without_a_terminal_progress_is_plain_lines_on_stderr_while_a_step_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.05)
    with console.progress_bar() as on_progress:
        on_progress(2, 4, "half way")
        time.sleep(0.4)  # the step says nothing itself
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) >= 2 and all(line.startswith(" 50% half way") for line in lines)
    assert lines[-1].startswith(" 50% half way (")  # the seconds that the step has taken


def test_a_quick_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar() as on_progress:
        on_progress(1, 4, "over at once")
    assert capsys.readouterr() == ("", "")


def test_a_pipe_has_100_columns_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console.new_console().width == 100
    monkeypatch.setenv("COLUMNS", "80")
    assert console.new_console().width == 80


def test_parts_of_a_step_do_not_start_its_clock_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.05)
    with console.progress_bar() as on_progress:
        for part in range(8):
            on_progress(2 + part / 8, 4, f"a case (about {part / 8:.0%})")
            time.sleep(0.05)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert lines[-1].startswith((" 69%", " 72%")) and "a case (about " in lines[-1]
    assert lines[-1].endswith(" s)")


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


TABLE = console.TextTable(
    "Sizes [bytes]",
    [("region", "left"), ("bytes", "right"), ("holds", "wrap")],
    [("q", "18,432", "Q of the item, 9 x [heads, 64], " * 5), ("s", "64", "ok")],
    "All of [bold] them.",
)


@pytest.mark.parametrize("columns", [60, 100])
def test_a_table_has_the_same_words_without_rich(
    columns: int,
    without_rich: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plain = console.new_console()
    console.print_tables(plain, [TABLE], {"ok": "bold red"})
    console.print_indented(plain, "[green]two[/] words " + console.escape("[bold]"))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns and lines[0] == "Sizes [bytes]"
    rows = [line.split(maxsplit=2) for line in lines[1:5]]
    assert rows[0] == ["region", "bytes", "holds"] and {*"".join(rows[1])} == {"-"}
    assert rows[2][:2] == ["q", "18,432"] and len(rows[3]) == 3  # the second line of a cell
    assert "".join(shown.split()).count("[heads,64]") == 5 and lines[-3:] == [
        "All of [bold] them.",
        "",
        "  two words [bold]",
    ]


def test_progress_without_rich_is_plain_lines(
    without_rich: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.05)
    with console.progress_bar() as on_progress:
        on_progress(2, 4, "half way")
        time.sleep(0.2)
    assert capsys.readouterr().err.startswith(" 50% half way")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_in_a_terminal_the_times_stay_whole_whatever_runs(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=columns)
    monkeypatch.setattr(console, "new_console", lambda stderr: screen)
    what = "sparse_mla_fwd: v32_no_rope beside v32_no_rope, 150 queries of 2048 slots " * 2
    with console.progress_bar() as on_progress:
        on_progress(1, 4, what)
        time.sleep(0.3)
    assert isinstance(screen.file, StringIO)
    lines = [
        line for line in Text.from_ansi(screen.file.getvalue()).plain.splitlines() if "%" in line
    ]
    assert re.search(r" 25% 0:00:00 left [-0-9:]{7} sparse_m.*…", lines[-1])
    assert len(lines[-1]) <= columns
