"""ptxemu exec runs scripts for a GPU; PTX is kept whoever is imported first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxemu.cli.main import main

# `ptxemu exec` runs scripts that were written for a GPU, as they are.

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


# PTX is kept whichever of ptxemu.cutedsl and CuTe DSL is imported first.

PROGRAM = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/src"]
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
{first}
from tests.cutedsl.small_kernels import TILE, cute, reverse_twice
from cutlass.cute.runtime import make_fake_compact_tensor as fake
t = fake(cute.Int32, (cute.sym_int(),), assumed_align=16)
{second}
function = cute.compile(reverse_twice, t, t, t, cute.Int32(1))
{third}
import ptxemu.cutedsl, torch
x = torch.ones(TILE, dtype=torch.int32)
d = cute.runtime.from_dlpack(x, assumed_align=16).mark_layout_dynamic()
with ptxemu.cutedsl.emulate(arch=None) as run:
    function(d, d, d, 2)
print(len(run.launches), int(x[0]), ".loc" in function.__ptx__)
"""


def run(*, first="", second="", third=""):
    program = PROGRAM.format(root=str(ROOT), first=first, second=second, third=third)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("place", ["first", "second"])
def test_ptx_and_lines_are_kept_if_ptxemu_comes_before_the_compilation(place):
    ran = run(**{place: "import ptxemu.cutedsl"})
    assert ran.stdout == "2 4 True\n", ran.stderr


def test_a_function_compiled_before_is_an_error_that_says_what_to_do():
    ran = run()
    assert ran.returncode != 0
    assert "MissingPtxError" in ran.stderr and "import ptxemu.cutedsl before" in ran.stderr


LOOKS = """
import ptxemu.cutedsl
from ptxemu.cutedsl import retention
from cutlass._mlir_helpers import op
looks = []
def counted(name):
    look_up = getattr(op, name)
    setattr(op, name, lambda frame: looks.append(name) or look_up(frame))
for name in ("_fast_frameinfo", "_is_framework_stack_frame"):
    counted(name)
{before}
"""


def test_the_lines_are_the_same_if_each_is_looked_up_once():
    """Today's CuTe DSL has the functions; a release without them fails here."""
    prints = "print([looks.count(name) for name in set(looks)]); print(function.__ptx__)"
    never = "retention.begin_compilation = lambda: None"
    usual, once = (run(first=LOOKS.format(before=x), third=prints) for x in (never, ""))
    counts, ptx = zip(*(ran.stdout.split("\n", 1) for ran in (usual, once)), strict=True)
    assert ptx[0] == ptx[1] and ".loc" in ptx[0], once.stderr
    usually, now = (sorted(map(int, count.strip("[]").split(","))) for count in counts)
    assert len(now) == 2 and all(5 * a < b for a, b in zip(now, usually, strict=True)), counts
