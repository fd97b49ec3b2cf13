"""Help in terminals of any width."""

import pytest

from ptxemu.cli.help_text import fitted
from ptxemu.cli.main import main

COMMANDS = ("info", "run", "check", "trace", "mutate", "exec")


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("command", [[], *([one] for one in COMMANDS)])
def test_no_line_is_longer_than_the_terminal_or_100(
    command: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    assert all(one in "\n".join(lines) for one in ([] if command else COMMANDS))


def test_prose_is_filled_and_lists_keep_their_lines() -> None:
    text = "one two\nthree\n\n  a    b c\n  dddd\n    e f"
    items = ["  a    b", "       c", "  dddd", "    e f"]
    assert fitted(text, 9) == ["one two", "three", "", *items]


def test_an_item_without_columns_goes_on_behind_its_beginning() -> None:
    assert fitted("  a bb cc dd", 9) == ["  a bb cc", "      dd"]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("ptxemu ")
