"""`ptxemu exec` runs scripts that were written for a GPU, as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxemu.cli.main import main

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

SCRIPT = Path(__file__).with_name("compile_and_run.py")
ROOT = Path(__file__).parents[2]


def execute(*args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    environment.pop("CUTE_DSL_ARCH", None)
    return subprocess.run(
        [sys.executable, "-m", "ptxemu", "exec", *args], capture_output=True, text=True,
        env=environment, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip


def test_a_script_for_the_gpu_runs_and_is_reported(tmp_path):
    report = tmp_path / "report.json"
    ran = execute("--arch", "sm_90a", "--json", str(report), str(SCRIPT), "--flag", "7")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "clusters 66 (9, 0)" in ran.stdout and "done ['--flag', '7']" in ran.stdout
    assert ran.stdout.rstrip().endswith("0 errors, 0 warnings, 0 notes")
    facts = json.loads(report.read_text())
    assert [launch["grid"] for launch in facts["launches"]] == [[2, 1, 1]]
    assert facts["findings"] == [] and facts["exit_code"] == 0


def test_a_finding_is_exit_code_1_and_names_the_source_line(capsys):
    before = dict(os.environ), sys.argv, list(sys.path), torch.cuda.is_available
    assert main(["exec", "--arch", "sm_100a", str(SCRIPT), "race"]) == 1
    out = capsys.readouterr().out
    assert "error: race" in out and "small_kernels.py:" in out
    assert "clusters 74 (10, 0)" in out
    assert (dict(os.environ), sys.argv, list(sys.path), torch.cuda.is_available) == before


def test_a_script_that_is_not_there_is_exit_code_2():
    ran = execute("no_such_script.py")
    assert ran.returncode == 2
    assert ran.stderr == "ptxemu: error: no_such_script.py: no such file\n"


def test_launches_are_saved_with_their_number_and_run_again(tmp_path, capsys):
    assert main(["exec", "--arch", "sm_90a", "--save", str(tmp_path), str(SCRIPT)]) == 0
    assert "note: saved " in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".0.launch")
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "0 errors" in out and "b: 127 of 512 bytes changed" in out
