"""Peak memory of an operation, each call in a fresh process so that no other call shows in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from flashdsa.bench.cases import Shape
from flashdsa.bench.result import MemoryRow
from flashdsa.errors import FlashDsaError

QUERIES = (16, 64, 256)
"""Numbers of queries S: the peak beyond inputs and outputs must not grow with them."""
OPERATIONS = ("sparse_mla_fwd", "mla_bwd")
LIMIT_BYTES = 1 << 30


class MemoryProbeError(FlashDsaError, RuntimeError):
    """The measuring process failed; the message holds the last line that it wrote."""


def measure_memory(op: str, shape: Shape, backend: str) -> MemoryRow:
    """Run `op` once on `shape` in a fresh process.

    Raises:
        MemoryProbeError: that process failed.
    """
    request = json.dumps({"op": op, "shape": asdict(shape), "backend": backend})
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "flashdsa.bench.memory_probe", request],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MemoryProbeError(f"memory of {op} at {asdict(shape)}: {last}")
    problem: dict[str, int | str] = {
        "S": shape.s,
        "S_kv": shape.s_kv,
        "H": shape.h,
        "topk": shape.topk,
        "dtype": shape.dtype,
    }
    return MemoryRow(op=op, backend=backend, problem=problem, **json.loads(done.stdout))
