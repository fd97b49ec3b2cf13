"""What commands print: widths, bars, and the choice among names."""

from __future__ import annotations

import json
import re
import time
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

from flashdsa.cli import console
from flashdsa.cli.main import cli


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


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (["--queries", "64", "--format", "v32"], "mla_decode_dealt_packed"),
        (["--queries", "64", "--format", "v4", "--no-lengths"], "mla_decode_v4"),
        (["--queries", "4096", "--no-lengths"], "mla_used_slots, mla_fwd_drawn"),
        (["--queries", "128", "--d-qk", "512", "--max-logits"], "mla_fwd_512"),
    ],
)
def test_the_choice_of_a_call_is_shown(options: list[str], kernels: str) -> None:
    """The same in both forms, one way taken."""
    shown = CliRunner().invoke(cli, ["choose", "sparse_mla", *options])
    assert shown.exit_code == 0 and kernels in shown.output
    found = json.loads(CliRunner().invoke(cli, ["choose", "sparse_mla", *options, "--json"]).stdout)
    (taken,) = (way for way in found if way["taken"])
    assert taken["kernels"].startswith(kernels)
    assert all(way["us"] is None or way["us"] >= taken["us"] for way in found)


def test_packed_rows_have_no_largest_logits() -> None:
    done = CliRunner().invoke(cli, ["choose", "sparse_mla", "--format", "v4", "--max-logits"])
    assert done.exit_code == 2 and "--max-logits" in done.output


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--requests", "1", "--tokens", "40000"], "row"),
        (["--requests", "200"], "shared"),
        (["--requests", "200", "--next-n", "2"], "ranked"),
        (["--tokens", "2048"], "unscored"),
        (["--tokens", "2048", "--sorted"], "row"),
    ],
)
def test_the_indexer_says_which_launches_it_takes(options: list[str], kind: str) -> None:
    shown = CliRunner().invoke(cli, ["choose", "dsa_topk_indexer", *options])
    assert shown.exit_code == 0 and kind in shown.output
    given = ["choose", "dsa_topk_indexer", *options, "--json"]
    first, *others = json.loads(CliRunner().invoke(cli, given).stdout)
    assert first["kind"] == kind and first["taken"] and not any(x["taken"] for x in others)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--heads", "64", "--topk", "512"], "groups of 4"),
        (["--queries", "200", "--deterministic"], "slots"),
        (["--queries", "200", "--d-qk", "512", "--no-lengths"], "additions by tickets"),
        (["--heads", "136"], "heads 128:136: additions"),
    ],
)
def test_the_backward_says_its_parts(options: list[str], says: str) -> None:
    shown = CliRunner().invoke(cli, ["choose", "mla_bwd", *options])
    found = json.loads(CliRunner().invoke(cli, ["choose", "mla_bwd", *options, "--json"]).stdout)
    assert shown.exit_code == 0 and any(says in part["part"] for part in found)
    assert all(part["plans"] for part in found)
