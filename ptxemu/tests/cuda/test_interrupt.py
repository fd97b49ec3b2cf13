"""Ctrl-C, and a program that dies, end the launch that is under way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cuda.conftest import PROGRAMS, compile_c

from ptxemu.cuda.build import Standin

LIMIT_SECONDS = 5.0
"""Of the end, on a machine that has other work; it takes less than one."""
UNDER_WAY_SECONDS = 0.5
"""CPU time of a launch by which its clusters are dealt."""
SCRIPT = """
import ctypes, re, sys
import pycuda  # at which the stand-in comes
cuda = ctypes.CDLL("libcuda.so.1")
lines = re.findall('^    "(.*)"', open(sys.argv[1]).read(), re.MULTILINE)
ptx = "".join(lines).replace("\\\\n", "\\n").encode()
context, module, function, x = (ctypes.c_void_p() for _ in range(4))
ref = ctypes.byref
assert not cuda.cuInit(0) and not cuda.cuCtxCreate_v2(ref(context), 0, 0)
assert not cuda.cuModuleLoadData(ref(module), ptx)
assert not cuda.cuModuleGetFunction(ref(function), module, b"endless")
assert not cuda.cuMemAlloc_v2(ref(x), ctypes.c_size_t(4096))
print("begins", flush=True)
arguments = (ctypes.c_void_p * 1)(ctypes.addressof(x))
assert not cuda.cuLaunchKernel(function, 64, 1, 1, 32, 1, 1, 0, None, arguments, None)
"""
"""A package that calls CUDA from C, as Triton does: an interrupt cannot pass through it."""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def endless(made_standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("endless") / "endless"
    return compile_c(PROGRAMS / "endless.c", program, made_standin, "libcuda.so.1")


def _let_interrupts_come() -> None:
    """What a shell starts in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(endless: Path, made_standin: Standin) -> Iterator[Start]:
    """Starts `ptxemu exec` of the program; it has a process group of its own, as in a shell."""
    started: list[subprocess.Popen[str]] = []
    source = str(PROGRAMS / "endless.c")  # what a script needs, and the program does not read

    def run(*options: str, host: str = str(endless)) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ptxemu", "exec", "--quiet", *options, host, source],
            env={**os.environ, "PTXEMU_CACHE": str(made_standin.folder.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_let_interrupts_come,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        until = _cpu_seconds_of(process.pid) + UNDER_WAY_SECONDS
        while _cpu_seconds_of(process.pid) < until:
            time.sleep(0.05)
        assert process.poll() is None
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _processes_of(group: int) -> list[tuple[str, float]]:
    """Names and CPU seconds of the processes in a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        state, _, process_group, *more = rest.split()
        if int(process_group) == group and state != "Z":
            ticks = int(more[8]) + int(more[9])
            found.append((name.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK")))
    return found


def _cpu_seconds_of(group: int) -> float:
    return sum(seconds for _, seconds in _processes_of(group))


@pytest.mark.parametrize(
    "options", [(), ("--no-check", "--processes", "2")], ids=["checked", "in two processes"]
)
@pytest.mark.parametrize("whom", ["group", "ptxemu"])
def test_the_first_interrupt_ends_it(start: Start, options: tuple[str, ...], whom: str) -> None:
    process = start(*options)
    interrupted = time.monotonic()
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert time.monotonic() - interrupted < LIMIT_SECONDS
    assert process.returncode == 130
    assert stderr == "ptxemu: interrupted\n"
    assert "kernel endless: interrupted" in stdout
    assert _processes_of(process.pid) == []


SIGNALS = [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")]


@pytest.mark.parametrize(("number", "reason"), SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_the_report_has_what_was_found_until_then(
    start: Start, tmp_path: Path, number: int, reason: str
) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "sarif")}
    process = start(*(f"--{kind}={file}" for kind, file in files.items()))
    os.kill(process.pid, number)
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, stderr) == (128 + number, f"ptxemu: {reason}\n")
    report = json.loads(files["json"].read_text())
    assert report["stopped"] == reason
    assert {finding["code"] for finding in report["findings"]} == {"race"}
    assert "needs a barrier" in stdout
    assert f"kernel endless: {reason}" in files["junit"].read_text()
    found = json.loads(files["sarif"].read_text())["runs"][0]["results"]
    assert {result["ruleId"] for result in found} == {"race", "launch-failed"}


def test_the_time_limit_ends_it_with_a_report(start: Start) -> None:
    began = time.monotonic()
    process = start("--time-limit", "4")
    stdout, stderr = process.communicate(timeout=4 + LIMIT_SECONDS)
    assert time.monotonic() - began > 2
    assert (process.returncode, stderr) == (124, "ptxemu: stopped, as --time-limit 4 says\n")
    assert "race" in stdout and "kernel endless: stopped, as --time-limit 4 says" in stdout


@pytest.mark.parametrize(("number", "reason"), SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_a_kernel_of_a_ptx_file_is_reported_on_too(
    tmp_path: Path, number: int, reason: str
) -> None:
    path = tmp_path / "endless.ptx"
    lines = re.findall('^    "(.*)"', (PROGRAMS / "endless.c").read_text(), re.MULTILINE)
    path.write_text("".join(lines).replace("\\n", "\n"))
    command = ("check", str(path), "--grid=64", "--block=32", "--arg=u32[1024]=zeros", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "ptxemu", *command, "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_let_interrupts_come,
    )
    while _cpu_seconds_of(process.pid) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, stderr) == (128 + number, f"ptxemu: {reason}\n")
    report = json.loads(stdout)
    assert report["stopped"] == reason
    assert {finding["code"] for finding in report["findings"]} == {"race"}


def test_an_interrupt_ends_a_script_whose_launch_is_called_from_c(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "pycuda.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = start(host=str(script))
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130, stdout
    assert stderr == "ptxemu: interrupted\n"
    assert "kernel endless: interrupted" in stdout


def test_the_launch_of_a_dead_program_ends(start: Start) -> None:
    """It has no one to report to; the report says why it stopped."""
    process = start()
    (program,) = (
        int(child)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    os.kill(program, signal.SIGKILL)
    stdout, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert "the program was ended by SIGKILL" in stdout
    assert "kernel endless: stopped" in stdout
