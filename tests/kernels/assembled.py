"""What the newest assembler says of a kernel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flashdsa.backends.emulated.runner import compiled
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from flashdsa.toolchain import Assembler


def ptx_of(spec: KernelSpec, plan: KernelPlan) -> str:
    """PTX of a plan's function and of those launched with it."""
    return str(compiled(spec, plan).__ptx__).rstrip("\0")


def assert_it_assembles_without_spills(
    spec: KernelSpec, plan: KernelPlan, functions: int | None = None
) -> None:
    """ptxas takes the module, spills no register and makes no wgmma wait for the one before.

    The test is skipped where there is no ptxas.

    Args:
        functions: how many the module has; None: one or more.
    """
    found = Assembler.find()
    if found is None:
        pytest.skip("needs ptxas: pip install nvidia-cuda-nvcc")
    with TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "cubin")
        source.write_text(ptx_of(spec, plan))
        command = [str(found.path), f"-arch={spec.arch}", "-v", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills and set(spills) == {("0", "0")}
    assert functions is None or len(spills) == functions
    assert "wgmma" not in done.stderr  # a warning says that one waits
