"""What the newest assembler says of a kernel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashdsa.toolchain.ptxas import Assembler


def assert_it_assembles_without_spills(
    ptx: str, folder: Path, arch: str = "sm_90a", functions: int | None = None
) -> None:
    """ptxas takes the module, spills no register and makes no wgmma wait for the one before.

    The test is skipped where there is no ptxas.

    Args:
        ptx: the module's text. folder: for its files.
        functions: how many the module has; None: one or more.
    """
    found = Assembler.find()
    if found is None:
        pytest.skip("needs ptxas: pip install nvidia-cuda-nvcc")
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [str(found.path), f"-arch={arch}", "-v", str(source), "-o", str(folder / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills and set(spills) == {("0", "0")}
    assert functions is None or len(spills) == functions
    assert "wgmma" not in done.stderr  # a warning says that one waits
