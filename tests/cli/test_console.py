"""Progress without a terminal: lines now and then, on stderr only."""

from __future__ import annotations

import time

import pytest

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
