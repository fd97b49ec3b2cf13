"""Programs with their own host code, run unchanged with the stand-in in the place of CUDA."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.cuda.conftest import PROGRAMS, compile_c
from tests.kernel_run import setup, source

from ptxemu import load_launch
from ptxemu.cli.main import main
from ptxemu.cuda.build import Standin
from ptxemu.launch_log import Log

# Programs with their own host code, run unchanged with the stand-in in the place of CUDA.


@pytest.fixture(scope="module")
def driver_program(made_standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    return compile_c(PROGRAMS / "driver.c", program, made_standin, "libcuda.so.1")


def test_a_program_of_the_driver_api_runs(
    driver_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "new" / "report.json"
    command = ["exec", "--arch", "sm_100a", "--json", str(written), "--save", str(tmp_path)]
    assert main([*command, str(driver_program)]) == 0
    assert capfd.readouterr().out.startswith("done\n")
    report = json.loads(written.read_text())
    assert [launch["kernel"] for launch in report["launches"]] == ["add", "add"]
    assert report["exit_code"] == 0 and report["findings"] == [] == report["failures"]
    assert any("cuTexObjectCreate is not emulated" in note for note in report["notes"])
    # The second launch reads a variable that the host had changed: its file has that value.
    again = load_launch(tmp_path / "add.1.launch")
    again.launch(check=True)
    x = next(a for a in again.memory.allocations if a.name.startswith("cudaMalloc"))
    assert x.data.view("u4")[:9].tolist() == [15] * 8 + [10]


def test_a_program_with_the_runtime_linked_in_runs(
    runtime_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel that leaves its allocation makes the run fail; nothing else does."""
    files = {name: tmp_path / name for name in ("report.json", "junit.xml", "found.sarif")}
    report, junit, sarif = map(str, files.values())
    options = ["--arch", "sm_90a", "--json", report, "--junit", junit, "--sarif", sarif]
    assert main(["exec", *options, str(runtime_program)]) == 1
    out = capfd.readouterr().out
    assert out.startswith("before the greeting\ngreeting 1\n0 broken\ndone\n"), out
    facts = json.loads(files["report.json"].read_text())
    assert facts["exit_code"] == 0 and facts["findings"] == []
    (failure,) = facts["failures"]
    line = 1 + next(
        number
        for number, text in enumerate((PROGRAMS / "runtime.cu").read_text().splitlines())
        if "void outside" in text
    )
    assert f"runtime.cu:{line})" in failure and "illegal global address" in failure
    assert sum("refused, as CUDA does" in note for note in facts["notes"]) == 6
    suite = ElementTree.parse(files["junit.xml"]).getroot()[0]
    assert suite.get("errors") == "1" and suite.get("failures") == "0"
    assert int(suite.get("tests", "0")) == len(facts["launches"]) + 2
    (result,) = json.loads(files["found.sarif"].read_text())["runs"][0]["results"]
    assert result["ruleId"] == "launch-failed" and "illegal" in result["message"]["text"]


def test_hosts_that_touch_device_memory_die_as_with_a_gpu(
    made_standin: Standin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "touch.c"
    source.write_text(
        "int cudaMalloc(void **, unsigned long);\n"
        "int main(void) { int *p; cudaMalloc((void **)&p, 4); return *p; }\n"
    )
    program = compile_c(source, tmp_path / "touch", made_standin, "libcudart.so.13")
    assert main(["exec", str(program)]) == 128 + 11
    assert "SIGSEGV (does the host read or write device memory?)" in capfd.readouterr().out


RACE = """
#include <cstdio>
#include <cstdlib>
__global__ void sum(const int *x, int *out) {
    __shared__ int part[64];
    part[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 32) part[threadIdx.x] += part[threadIdx.x + 32];
    if (threadIdx.x == 0) *out = part[0];
}
int main(int argc, char **argv) {
    int *x;
    cudaMalloc(&x, 65 * sizeof *x);
    cudaMemset(x, 1, 65 * sizeof *x);
    sum<<<1, 64>>>(x, x + 64);
    printf("given %s\\n", argv[1]);
    return atoi(argv[2]);
}
"""


def test_a_source_is_compiled_run_and_checked(
    runtime_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "race.cu"
    source.write_text(RACE)
    sarif = tmp_path / "race.sarif"
    assert main(["check", str(source), "--sarif", str(sarif), "--", "-x", "0"]) == 1
    out = capfd.readouterr().out
    assert out.startswith("given -x\n") and "error: race: kernel sum" in out
    (result,) = json.loads(sarif.read_text())["runs"][0]["results"]
    assert result["ruleId"] == "race" and result["level"] == "error"
    regions = [
        place["physicalLocation"]["region"]["startLine"]
        for place in (*result["locations"], *result["relatedLocations"])
    ]
    assert sorted(regions) == [6, 7]
    assert main(["run", str(source), "--json", "--", "-x", "3"]) == 3
    captured = capfd.readouterr()
    assert json.loads(captured.out)["exit_code"] == 3 and "given -x" in captured.err


KERNEL = "template <int N> __global__ void set(int *x) { x[threadIdx.x] = N; }\n"
KERNEL += "template __global__ void set<5>(int *);\n"


def test_a_kernel_of_a_source_without_main_is_launched(
    runtime_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "set.cu"
    source.write_text(KERNEL)
    launch = ["--kernel", "set<5>", "--block", "64", "--arg", "i32[64]=zeros"]
    assert main(["check", str(source), *launch]) == 0
    assert "64 of 64 changed, min 5, max 5" in capfd.readouterr().out
    assert main(["check", str(source)]) == 2
    assert "has no main: --grid, --block and --arg" in capfd.readouterr().err
    assert main(["info", str(source)]) == 0
    assert "kernel void set<5>(int*)" in capfd.readouterr().out


def test_every_command_takes_a_program(
    runtime_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(runtime_program)]) == main(["exec", str(runtime_program)])
    assert main(["info", str(runtime_program)]) == 0
    assert main(["trace", str(runtime_program), "--out", str(tmp_path)]) == 1  # one kernel fails
    assert list(tmp_path.glob("*.trace.json"))


IDLE = "__global__ void k() {}\nint main(int n, char **) { if (n > 1) k<<<1, 1>>>(); }\n"


def test_a_program_with_kernels_that_launches_none_fails(
    runtime_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "idle.cu"
    source.write_text(IDLE)
    assert main(["run", str(source)]) == 1
    assert "failed: " in (out := capfd.readouterr().out) and "--allow-no-launch" in out
    assert main(["run", str(source), "--allow-no-launch"]) == 0
    assert main(["run", str(source), "--", "launch"]) == 0


def test_a_program_without_cuda_is_not_checked(
    made_standin: Standin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    for program in ("/bin/true", str(script)):
        for command in (["check"], ["run"], ["trace", f"--out={tmp_path / 'trace'}"]):
            assert main([*command, program]) == 2
            assert "launch" in capfd.readouterr().err
        assert main(["check", "--allow-no-launch", program]) == main(["exec", program]) == 0
    assert main(["check", "/bin/false"]) == 1
    assert not (tmp_path / "trace").exists()


def test_what_cannot_be_run_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "k.cu"
    assert main(["run", str(source)]) == 2
    assert "k.cu: no such file" in capsys.readouterr().err
    assert main(["run", "/bin/true", "--grid", "2"]) == 2
    assert "its host code launches, so there is no --grid" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "k.ptx"), "--", "3"]) == 2
    assert "are for host code" in capsys.readouterr().err
    source.write_text("__global__ void k() {}")
    assert main(["run", str(source), "--nvcc=-rdc=true"]) == 2
    assert "relocatable device code (-rdc=true) is not emulated" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert main(["exec", "/bin/true"]) == 2
    assert "no C compiler" in capsys.readouterr().err


def test_options_behind_the_program_are_the_programs(
    made_standin: Standin, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also those that begin like one of ptxemu's."""
    assert main(["exec", "/bin/echo", "--n=128", "--json", "x", "-m"]) == 0
    assert capfd.readouterr().out.startswith("--n=128 --json x -m\n")


# What is remembered of launches, and which of them are checked.

SAME_WORD = "mov.u32 %r0, %ctaid.x; st.global.u32 [%rd_out], %r0;"


@pytest.mark.parametrize(("pattern", "is_checked"), [("^k$", False), ("other", True)])
def test_kernels_that_unchecked_names_run_without_the_check(pattern, is_checked):
    out = np.full(1, 7, np.uint32)
    launch = setup(source(SAME_WORD, ["out"]), [out], grid=(2, 1, 1), block=(1, 1, 1))
    log = Log(unchecked=re.compile(pattern))
    log.run(launch)
    log.run(launch)
    assert out[0] in (0, 1) and len(log.launches) == 2
    assert bool(log.findings) == is_checked
    assert log.notes == ([] if is_checked else ["kernel k was not checked, as --unchecked says"])
