"""A process of its own that runs one operation once and prints the peak memory that it took.

python -m flashdsa.bench.memory_probe '{"op": "sparse_mla_fwd", "shape": {...}, ...}'
"""

from __future__ import annotations

import ctypes
import json
import math
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import flashdsa
from flashdsa.bench.cases import Shape, attention_inputs

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], Tensors]

_PEAK_METHOD = "VmHWM after a reset through /proc/self/clear_refs"
_FALLBACK_METHOD = "ru_maxrss before and after (an earlier peak can hide a small one)"


def probe(op: str, shape: Shape, backend: str) -> dict[str, int | str]:
    """Run `op` once on `shape`; bytes of its inputs, its outputs, and of the peak beyond both."""
    _prepare(op, replace(shape, s=1, s_kv=64, topk=64), backend)[0]()  # loads libraries
    run, inputs = _prepare(op, shape, backend)
    _give_back_freed_memory()
    method = _PEAK_METHOD if _reset_peak() else _FALLBACK_METHOD
    before = _resident_bytes(method)
    output_bytes = _bytes(run())
    peak = _peak_bytes(method)
    return {
        "input_bytes": _bytes(inputs),
        "output_bytes": output_bytes,
        "extra_peak_bytes": max(0, peak - before - output_bytes),
        "method": method,
    }


def _prepare(op: str, shape: Shape, backend: str) -> tuple[Run, Tensors]:
    """The call and its operands. The backward gets a plausible O and lse; no forward runs."""
    x = attention_inputs(shape)
    if op == "sparse_mla_fwd":
        forward = partial(flashdsa.sparse_mla_fwd, x.q, x.kv, x.indices, backend=backend)
        return forward, (x.q, x.kv, x.indices)
    out = torch.randn(x.d_out.shape).to(x.d_out.dtype)
    lse = torch.full(out.shape[:2], math.log(shape.topk), dtype=_lse_dtype(out.dtype))
    operands = (x.q, x.kv, x.d_out, lse, out, x.indices)
    return partial(flashdsa.mla_bwd, *operands, backend=backend), operands


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def _resident_bytes(method: str) -> int:
    return _status_bytes("VmRSS") if method == _PEAK_METHOD else _peak_bytes(method)


def _peak_bytes(method: str) -> int:
    if method == _PEAK_METHOD:
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def main() -> None:
    """Read the request from the command line, write the answer to stdout as JSON."""
    request = json.loads(sys.argv[1])
    answer = probe(request["op"], Shape(**request["shape"]), request["backend"])
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
