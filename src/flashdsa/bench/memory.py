"""Peak memory of an operation, each call in a fresh process so that no other call shows in it.

python -m flashdsa.bench.memory '{"operation": "sparse_mla_fwd", "case": {...}, "backend": "cpu"}'
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

import flashdsa
from flashdsa.bench.attention import make_inputs
from flashdsa.bench.cases import Case
from flashdsa.bench.result import MemoryRow
from flashdsa.errors import FlashDsaError
from flashdsa.problem import D_V

QUERIES = (16, 64, 256)
"""Numbers of queries S: the peak beyond inputs and outputs must not grow with them."""
Tensors = tuple[torch.Tensor, ...]
_PEAK_METHOD = "VmHWM after a reset through /proc/self/clear_refs"
_FALLBACK_METHOD = "ru_maxrss before and after (an earlier peak can hide a small one)"


class MemoryProbeError(FlashDsaError, RuntimeError):
    """The measuring process failed; the message holds the last line that it wrote."""


def measure_memory(operation: str, case: Case, backend: str) -> MemoryRow:
    """Run `operation` once on `case` in a fresh process.

    Raises:
        MemoryProbeError: that process failed.
    """
    request = {"operation": operation, "case": asdict(case), "backend": backend}
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "flashdsa.bench.memory", json.dumps(request)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MemoryProbeError(f"memory of {operation}, {case.label}: {last}")
    return MemoryRow(operation, backend, case.problem, **json.loads(done.stdout))


def probe(operation: str, case: Case, backend: str) -> dict[str, int | str]:
    """Run `operation` once; bytes of its inputs, its outputs, and of the peak beyond both."""
    _prepare(operation, replace(case, s=1, s_kv=64, topk=64), backend)[0]()  # loads libraries
    run, inputs = _prepare(operation, case, backend)
    _give_back_freed_memory()
    method = _PEAK_METHOD if _reset_peak() else _FALLBACK_METHOD
    before = _status_bytes("VmRSS") if method == _PEAK_METHOD else _peak_bytes(method)
    output_bytes = _bytes(run())
    return {
        "input_bytes": _bytes(inputs),
        "output_bytes": output_bytes,
        "extra_peak_bytes": max(0, _peak_bytes(method) - before - output_bytes),
        "method": method,
    }


def _prepare(operation: str, case: Case, backend: str) -> tuple[Callable[[], Tensors], Tensors]:
    """The call and its operands. The backward gets a plausible O and lse; no forward runs."""
    q, kv, indices, *_ = make_inputs(case, "cpu", seed=0)
    if operation == "sparse_mla_fwd":
        return partial(flashdsa.sparse_mla_fwd, q, kv, indices, backend=backend), (q, kv, indices)
    d_out = torch.randn(*q.shape[:2], D_V).to(q.dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:2], math.log(case.topk), dtype=lse_dtype)
    operands = (q, kv, d_out, lse, torch.randn_like(d_out), indices)
    return partial(flashdsa.mla_bwd, *operands, backend=backend), operands


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _give_back_freed_memory() -> None:
    """Let glibc return what making the inputs freed; elsewhere this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes(method: str) -> int:
    if method == _PEAK_METHOD:
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answer = probe(asked["operation"], Case(**asked["case"]), asked["backend"])
    sys.stdout.write(json.dumps(answer) + "\n")
