"""The model's counts of an emulated run, counted again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from flashdsa import reference
from flashdsa.backends.emulated.runner import compiled
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.ops.attention_backward import MlaBwdOperands
from ptxemu.cutedsl import emulate
from ptxemu.trace.counters import Counters
from workbench.model import backward_sm100
from workbench.tests.model.counted import BACKWARD_MOVED

for package in ("cutlass", "llvmlite", "tvm_ffi"):
    pytest.importorskip(package)


@pytest.mark.slow
def test_backward_counts() -> None:
    """Two blocks more."""
    (less, few), (more, many) = (_counted(topk) for topk in (64, 128))
    moved = {name: (more[name] - less[name]) / 4 for name in BACKWARD_MOVED}
    assert moved == pytest.approx(BACKWARD_MOVED, rel=0.01)
    for role, count in backward_sm100.INSTRUCTIONS.items():
        assert (many[role] - few[role]) / 4 == pytest.approx(count, rel=0.05), role


def _counted(topk: int) -> tuple[Counter[str], Counter[str]]:
    """Count bytes by path and instructions by role of one query: two CTAs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    q, kv, gradient = random(1, PAIR_ROWS, 576), random(256, 576), random(1, PAIR_ROWS, 512)
    indices = torch.randperm(256, generator=generator)[:topk].view(1, -1).int()
    out, lse = reference.sparse_mla_fwd(q, kv, indices)
    heard: list[Counters] = []

    def listen(_: Any) -> Counters:
        heard.append(Counters())
        return heard[-1]

    function = compiled(MLA_BWD, MLA_BWD.plans[0])
    with emulate(arch="sm_100a", on_launch=listen, check=False):
        run(
            function,
            MlaBwdOperands(q, kv, gradient, lse.float(), out.bfloat16(), indices),
            sm_scale=576**-0.5,
            deterministic=False,
            dkv_dtype=torch.float32,
            pairs=1,
        )
    roles = [role.name for role in MLA_BWD.plans[0].roles]
    moved: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for warp in heard[-1].by_role({}):
        moved.update(warp.bytes)
        instructions[roles[warp.warps[0] // 4]] += sum(warp.instructions.values())
    return moved, instructions
