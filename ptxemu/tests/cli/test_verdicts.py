"""What commands say: the last line and the exit code, help, names, paths that cannot be written."""

import json
import os
import re
import resource
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.check.checked_run import check
from tests.check.test_tmem import ALLOC, BARRIER, END, USES, WAIT
from tests.kernel_run import TID, source, store

from ptxemu.api import LaunchResult
from ptxemu.cli import kernel_names
from ptxemu.cli.help_text import fitted
from ptxemu.cli.host_report import junit, sarif
from ptxemu.cli.kernel_names import file_name, for_people, readable
from ptxemu.cli.main import main
from ptxemu.cli.outcome import Results
from ptxemu.cli.report import as_json, finding_lines, is_failure, summary_line
from ptxemu.machine.state import Launch

# What the last line and the exit code say of a run: failures, both kinds of error, groups.

ENDS_BADLY = {
    "an illegal address": ("st.global.b32 [%rd_x+1048576], %r0;", "0x"),
    "a deadlock": ("mov.u32 %r1, 1;\nbar.sync 1, 64;", "deadlock"),
    "a trap": ("trap;", "trap"),
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("name", ENDS_BADLY)
def test_the_last_line_says_that_the_launch_failed_and_why(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, reason = ENDS_BADLY[name]
    path = tmp_path / "kernel.ptx"
    path.write_text(source(TID + body, ["x"]))
    assert main([command, str(path), "--block", "32", "--arg", "u32[32]=zeros", "--quiet"]) == 1
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert re.match(r"0 launches ended, 1 launch FAILED, [1-9]\d* warp instructions", last)
    assert "failed: kernel k: " in last and reason in last


def test_the_kinds_of_error_are_told_apart_and_selected() -> None:
    early = check(
        TID + ALLOC + USES["a store"] + BARRIER + WAIT + END,
        how={"arch": "sm_100a", "shared": 1024},
        out=64,
    )
    assert "1 error (1 only against the ISA)" in summary_line(Results(findings=early), checked=True)
    assert finding_lines(early, with_notes=False)[0].startswith("error against the ISA: ")
    assert [is_failure(early, on) for on in ("hardware", "isa", "warning", "never")] == [
        False,
        True,
        True,
        False,
    ]


def test_reports_for_tools_have_versions_times_names_and_notes() -> None:
    name = "_Z6reduceILi3EEvPf"
    launch = Launch(name, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, b"")
    ended = LaunchResult(name, launch, 5, 0, seconds=0.25)
    ran = Results([ended], failures=[f"kernel {name}: stopped"], notes=["refused: smem"])
    ran.unfinished = 37
    case, failed, host = ElementTree.fromstring(junit("t", ran, 0, 1.0, fail_on="isa")).iter(
        "testcase"
    )
    assert (case.get("time"), case.get("name")) == ("0.250", "launch 0: reduce<3>")
    assert (
        failed.get("name") == "kernel reduce<3>" and host.findtext("system-out") == "refused: smem"
    )
    (run,) = json.loads(sarif(ran))["runs"]
    assert run["tool"]["driver"]["version"] and not run["invocations"][0]["executionSuccessful"]
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert told["message"]["text"] == "refused: smem"
    (facts,) = json.loads(as_json(ran.launches, []))["launches"]
    assert facts["kernel"] == "void reduce<3>(float*)" and facts["symbol"] == name
    assert "42 warp instructions" in summary_line(ran, checked=True)


def test_findings_of_one_pair_of_lines_are_one_line() -> None:
    """Ten stores and loads of one source line, none ordered: one bug, one line."""
    pairs = "".join(
        f"st.shared.b32 [%r1+{4 * n}], %r0;\nld.shared.b32 %r2, [%r1+{4 * n}];\n" for n in range(10)
    )
    body = ".loc 1 7 0\nmov.u32 %r1, smem;\n" + pairs + ".loc 1 8 0\n"
    found = check(TID + body, block=64, how={"shared": 1024, "before": '.file 1 "kernel.cu"\n'})
    assert len([f for f in found if f.level == "error"]) >= 10
    (line,) = finding_lines([f for f in found if f.code == "race"], with_notes=False)
    assert "such pairs of instructions in these lines" in line


@pytest.mark.parametrize("masked", [False, True])
def test_uninitialised_shared_memory_is_an_error_where_it_reaches_a_result(
    masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "mov.u32 %r1, smem;\nld.shared.b32 %r2, [%r1];\n"
    body += "and.b32 %r2, %r2, 0;\n" if masked else ""
    path = tmp_path / "kernel.ptx"
    path.write_text(source(TID + body + store("x", "%r2"), ["x"], shared=1024))
    code = main(["check", str(path), "--block", "32", "--arg", "u32[32]=zeros", "--quiet"])
    out = capsys.readouterr().out
    assert code == (0 if masked else 1)
    assert ("error: uninitialised-result: " in out) != masked
    assert "warning: uninitialised-read: " in out


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--require-launch",), 1)])
def test_host_code_that_launches_nothing_can_be_made_to_fail(
    options: tuple[str, ...], code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('no device: all tests skipped')\n")
    junit = tmp_path / "report.xml"
    assert main(["exec", *options, "--junit", str(junit), str(script)]) == code
    assert ("no launch of a kernel ran to its end" in capfd.readouterr().out) == bool(code)
    assert ('errors="1"' in junit.read_text()) == bool(code)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_time_limit_is_a_number_of_seconds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["exec", f"--time-limit={text}", "script.py"])
    assert stop.value.code == 2
    assert "expected seconds, more than 0" in capsys.readouterr().err


# Help in terminals of any width.

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


# Names of kernels as people read them.

reads_names = pytest.mark.skipif(
    kernel_names.demangled("_Z3sumPKiPi") == "_Z3sumPKiPi",
    reason="the C++ runtime is not there, which reads names",
)


@reads_names
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_Z3sumPKiPi", "sum"),
        ("_Z4fillIfLi4EEvPT_", "fill<float, 4>"),
        ("_ZN12_GLOBAL__N_14copyEPfS0_", "(anonymous namespace)::copy"),
        ("axpy", "axpy"),
        ("_Znonsense", "_Znonsense"),
        ("k" * 30 + "m" * 60 + "last_part", "k" * 30 + "m" * 6 + "...last_part"),
    ],
)
def test_parameters_are_left_out_and_long_names_cut(name: str, text: str) -> None:
    assert readable(name) == text


@reads_names
def test_paths_are_shown_from_this_folder_on() -> None:
    assert for_people(f"at {os.getcwd()}/src/a.cu:3, in /usr/b.h") == "at src/a.cu:3, in /usr/b.h"


def test_names_inside_a_message_and_for_files() -> None:
    assert for_people("kernel _Z3sumPKiPi: late") == "kernel sum: late"
    assert file_name("_Z4fillIfLi4EEvPT_") == "fill_float_4"


# Where a command is to write is tried before it begins, and nothing is left behind.

OUTPUTS = {
    "exec --json": "x.json",
    "exec --junit": "x.xml",
    "exec --sarif": "x.sarif",
    "exec --save": "launches",
    "check --junit": "x.xml",
    "check --sarif": "x.sarif",
    "check --save": "launches",
    "trace --out": "trace",
    "mutate --json": "x.json",
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_a_path_that_cannot_be_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    name, option = command.split()
    with pytest.raises(SystemExit) as stop:
        main([name, option, str(in_the_way / OUTPUTS[command]), "no_such_program"])
    assert stop.value.code == 2
    assert f"argument {option}: cannot write" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_names_the_file_and_leaves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # compiled modules would end there, too
    kernel, out = tmp_path / "nothing.ptx", tmp_path / "out"
    kernel.write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry nothing() { ret; }\n"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # bytes of a file
    try:
        code = main(["trace", str(kernel), "--grid", "1", "--block", "32", "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert code == 2 and f"File too large: '{out}" in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kernel]
