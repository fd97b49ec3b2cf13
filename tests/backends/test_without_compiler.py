"""Backends run compiled kernels on machines that have no CuTe DSL."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import flashdsa.backends

PROGRAM = """
import importlib, sys
sys.modules["cutlass"] = None  # an import of it is an error
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_no_backend_needs_the_compiler_before_it_compiles() -> None:
    found = pkgutil.walk_packages(flashdsa.backends.__path__, "flashdsa.backends.")
    names = [one.name for one in found if ".gpu.empty_kernel" not in one.name]
    assert "flashdsa.backends.sm90.mla_bwd" in names
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
