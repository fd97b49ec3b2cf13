"""Backends and adapters are imported on machines that have no CuTe DSL, and import no peer."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import flashdsa.backends

RECORDED = json.loads((Path(__file__).parents[1] / "adapters/signatures.json").read_text())
PROGRAM = """
import importlib, sys
for name in ("cutlass", "tvm_ffi"):
    sys.modules[name] = None  # an import of it is an error
import flashdsa
flashdsa.sparse_mla
names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
assert not any(name.startswith("flashdsa.adapters") for name in sys.modules)
for name in {adapters}:
    importlib.import_module(f"flashdsa.adapters.{{name}}")
assert not {{"flash_mla", "deep_gemm", "cudnn", "flashinfer", "tilelang"}} & set(sys.modules)
"""


def test_no_backend_needs_the_compiler_before_it_compiles_nor_an_adapter_its_peer() -> None:
    """Nor does anything import an adapter, or load a kernel."""
    found = pkgutil.walk_packages(flashdsa.backends.__path__, "flashdsa.backends.")
    names = [one.name for one in found if ".gpu.empty_kernel" not in one.name]
    assert "flashdsa.backends.sm90.mla_bwd" in names
    program = PROGRAM.format(adapters=[*RECORDED, "tilelang"])
    command = [sys.executable, "-c", program, "flashdsa.ops", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
