"""What the last line and the exit code say of a run: failures, both kinds of error, groups."""

from pathlib import Path

import pytest
from tests.check.checked_run import check
from tests.check.test_tmem_loads import ALLOC, BARRIER, END, USES, WAIT
from tests.kernel_run import TID, source, store

from ptxemu.cli.main import main
from ptxemu.cli.report import finding_lines, is_failure, summary_line

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
    assert last.startswith("0 launches ended, 1 launch FAILED")
    assert "failed: kernel k: " in last and reason in last


def test_the_kinds_of_error_are_told_apart_and_selected() -> None:
    early = check(
        TID + ALLOC + USES["a store"] + BARRIER + WAIT + END,
        how={"arch": "sm_100a", "shared": 1024},
        out=64,
    )
    assert "1 error (1 only against the ISA)" in summary_line([], early, checked=True)
    assert finding_lines(early, with_notes=False)[0].startswith("error against the ISA: ")
    assert [is_failure(early, on) for on in ("hardware", "isa", "warning", "never")] == [
        False,
        True,
        True,
        False,
    ]


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
