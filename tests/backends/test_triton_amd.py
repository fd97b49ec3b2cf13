"""Triton's kernels as its wheel compiles them for an AMD GPU, gfx942; on none were they tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.backends.emulated import triton_kernels
from flashdsa.backends.emulated.devices import small_device
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.backends.triton import launch
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.sparse_mla_cases import make_sparse_mla_inputs
from tests.backends.test_triton import BACKEND, PATHS, kept_kernels

__all__ = ["kept_kernels"]
SHARED_BYTES = 65536
AMPERE = (8, 0)
"""Whose choices, but for the tiles, are taken: no products of e4m3, no fences."""


class Compiler(Recorder):
    """A GPU that compiles kernels to the end, machine code for gfx942, and runs none."""

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        made, _ = triton_kernels.compiled(AMPERE, kernel, arguments, **options)
        assert made.asm["hsaco"] and "gfx942" in made.asm["amdgcn"]
        assert made.metadata.shared <= SHARED_BYTES
        super().launch_triton(kernel, grid, arguments, **options)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kernel_becomes_code_of_gfx942(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stage: Triton 3.7 does not compile the forward of two. That takes half a minute; the
    forward's alone is always tried."""
    compiler = pytest.importorskip("triton.backends.compiler")
    target = compiler.GPUTarget("hip", "gfx942", 64)
    monkeypatch.setattr(compiler, "GPUTarget", lambda *_: target)
    for kernel, tiles in launch.TILES.items():
        small = tiles["others"]._replace(stages=1, warps=4)
        if kernel not in ("valid ids", "products"):
            small = small._replace(heads=min(small.heads, 32), keys=min(small.keys, 32))
        monkeypatch.setitem(launch.TILES, kernel, {"others": small})
    recorder = Compiler(small_device(AMPERE))
    with running_on(recorder):
        for path in PATHS if every else PATHS[:1]:
            if not path.marks:
                path.call(make_sparse_mla_inputs(path.case, seed=0), BACKEND)
        if not every:
            assert "forward" in recorder.of_triton
            return
        x = make_indexer_inputs(IndexerCase("", (70,), 40, num_heads=16), seed=0)
        flashdsa.dsa_topk_indexer(*x.operands, x.output_buffer(), backend=BACKEND)
        q, weights, ids = torch.zeros(2, 16, 128).bfloat16(), torch.ones(2, 16), torch.zeros(2, 9)
        operands = q, q[0], weights, ids.int()
        of_attention = torch.zeros(2, 16, 576).bfloat16(), torch.zeros(9, 576).bfloat16()
        flashdsa.attention_target(*of_attention, weights, ids.int(), backend=BACKEND)
        flashdsa.indexer_scores(*operands, backend=BACKEND)
        flashdsa.indexer_bwd(*operands, torch.zeros(2, 9), backend=BACKEND)
    assert set(recorder.of_triton) == {
        "valid_ids", "forward", "merge", "row_products", "of_queries", "of_rows", "of_ranges",
        "sum_rows", "score", "select", "target", "scores", "backward",
    }  # fmt: skip
