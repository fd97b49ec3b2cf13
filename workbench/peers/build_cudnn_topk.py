"""cuDNN Frontend's top-k, compiled ahead: a peer of `flashdsa bench indexer` without CuTe DSL.

Its own wrapper compiles the kernel with CuTe DSL when it is called. This compiles what the bench's
cases ask for, on a machine without a GPU, into a shared object beside a module that calls it as the
wrapper does. Put the folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flashdsa.bench.gpu.cases import TOPK, indexer_cases
from flashdsa.jit.shared_object import build_shared_object

PACKAGES = ("", ".deepseek_sparse_attention", *(
    f".deepseek_sparse_attention.{name}" for name in ("indexer_forward", "indexer_top_k", "utils")
))  # fmt: skip
KERNEL = "cudnn.deepseek_sparse_attention.indexer_top_k.indexer_top_k_decode_varlen"
MANY_ROWS = 148
"""With more of them its kernel takes less of an SM's shared memory; see the module below, too."""
MODULE = '''"""cuDNN Frontend's top-k, compiled; made by workbench/peers/build_cudnn_topk.py."""

from functools import lru_cache
from pathlib import Path

import torch

from flashdsa.jit.shared_object import load_shared_object

_load = lru_cache(load_shared_object(Path(__file__).with_name("libcudnn_topk.so")))


def indexer_top_k_wrapper(scores, lengths, k, return_val=False):
    """Positions (B, k) int32 of the k best fp32 scores of each row, then -1, as "indices"."""
    rows, width = scores.shape
    positions = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    memory = torch.empty(rows, 2, width, dtype=torch.int32, device=scores.device)
    few_or_many = "many" if rows > 148 else "few"
    kernel = _load(f"topk_{1 << (width - 1).bit_length()}_{few_or_many}")
    kernel(scores, None, memory, None, lengths, positions, None)
    return {"indices": positions}
'''


def import_kernel(unpacked: Path, module: str = KERNEL) -> Any:
    """A kernel's module, without its packages' own imports, which ask for a GPU's libraries."""
    for name in PACKAGES:
        package = types.ModuleType(f"cudnn{name}")
        package.__path__ = [str(unpacked / f"cudnn{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    return import_module(module)


def main() -> None:
    """Compile, and write the module beside the object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("unpacked", type=Path, help="the folder of the unpacked wheel")
    parser.add_argument("target", type=Path, help="a folder")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    kernel = import_kernel(arguments.unpacked)
    compiled = {}
    for case in indexer_cases():
        rows, width = len(case.lengths), max(case.lengths)
        few_or_many = "many" if rows > MANY_ROWS else "few"
        name = f"topk_{1 << (width - 1).bit_length()}_{few_or_many}"
        if name not in compiled:
            compiled[name] = kernel.compile_topk_kernel(
                torch.float32, rows, width, TOPK, 1, return_val=False
            )
            print(name, flush=True)
    build_shared_object(arguments.target / "libcudnn_topk.so", compiled, "cudnn")
    (arguments.target / "cudnn_topk.py").write_text(MODULE)


if __name__ == "__main__":
    main()
