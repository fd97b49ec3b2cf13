"""Progress without a terminal: lines now and then, on stderr only."""

from __future__ import annotations

import pytest

from flashdsa.cli import console


def test_without_a_terminal_progress_is_plain_lines_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.progress_bar() as on_progress:
        on_progress(1, 4, "too early")
        now = 11.0
        on_progress(2, 4, "half way")
        on_progress(3, 4, "too soon again")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == " 50% half way\n"
