"""PTX is kept whichever of ptxemu.cutedsl and CuTe DSL is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

ROOT = Path(__file__).parents[2]
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
from ptxemu.cutedsl import source_lines
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
    never = "source_lines.begin_compilation = lambda: None"
    usual, once = (run(first=LOOKS.format(before=x), third=prints) for x in (never, ""))
    counts, ptx = zip(*(ran.stdout.split("\n", 1) for ran in (usual, once)), strict=True)
    assert ptx[0] == ptx[1] and ".loc" in ptx[0], once.stderr
    usually, now = (sorted(map(int, count.strip("[]").split(","))) for count in counts)
    assert len(now) == 2 and all(5 * a < b for a, b in zip(now, usually, strict=True)), counts
