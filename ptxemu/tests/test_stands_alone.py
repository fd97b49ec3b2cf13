"""ptxemu needs NumPy only: from the sources, and from its wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POSSESSIVE_GROUP = re.compile(r"""r?f?["'].*[^\\]\)[*+?]\+""")
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cutlass", "cuda", "llvmlite", "tvm_ffi", "flashdsa",
                                      "rich", "click", "matplotlib"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import ptxemu

PTX = '''
.version 8.0
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 x)
{
.reg .b32 %r<3>;
.reg .b64 %rd<3>;
ld.param.u64 %rd0, [x];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd1, %r0, 4;
add.s64 %rd2, %rd0, %rd1;
ld.global.u32 %r1, [%rd2];
add.u32 %r2, %r1, %r1;
st.global.u32 [%rd2], %r2;
ret;
}
'''
x = np.arange(64, dtype=np.uint32)
result = ptxemu.load(PTX).launch("twice", 1, 64, args=[x], check=True)
assert (x == 2 * np.arange(64)).all() and result.findings == []
assert ptxemu.__file__.startswith(sys.argv[1]), ptxemu.__file__
from ptxemu.cli.main import main
print("ok")
"""


def _run_from(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_a_kernel_runs_where_nothing_but_numpy_can_be_imported() -> None:
    _run_from(ROOT / "src")


def test_its_own_wheel_holds_all_that_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "build_steps.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("ptxemu-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert "Requires-Dist: numpy" in next(tmp_path.glob("installed/*/METADATA")).read_text()
    _run_from(tmp_path / "installed")


def test_no_group_is_possessive() -> None:
    """`(?:...)*+` does not match what it should by Python 3.11.0 to 3.11.4; `(?>(?:...)*)` does."""
    sources = ROOT / "src"
    found = [
        f"{path.relative_to(sources)}:{number}"
        for path in sorted(sources.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if POSSESSIVE_GROUP.search(line) and not line.lstrip().startswith("#")
    ]
    assert found == []
