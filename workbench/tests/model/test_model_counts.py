"""What the model has recorded of emulated runs, counted again."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

from flashdsa import quantize_kv, reference
from flashdsa.backends.emulated.runner import compiled
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.kernels.catalog import MLA_BWD, SPARSE_MLA_DECODE, SPARSE_MLA_FWD
from flashdsa.kernels.sparse_mla.operands import Operands
from flashdsa.kernels.sparse_mla.sm90.decode.plan import DecodePlan
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, BwdPlan
from flashdsa.operands import MlaBwdOperands
from ptxemu.cutedsl import emulate
from ptxemu.trace.counters import Counters
from workbench.model import backward_sm100, decode_sm90, forward_sm90, indexer_sm90

for package in ("cutlass", "llvmlite", "tvm_ffi"):
    pytest.importorskip(package)

ROLES = ("softmax", "load", "reduce", "mma")
FORWARD_ROLES = ("gather", "left", "right")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The program that counts."""
    return importlib.import_module("workbench.probes.count_indexer_paths")


def executed(path: Any) -> indexer_sm90.Executed:
    return indexer_sm90.Executed(
        path.instructions, path.global_trips, path.shared_trips, path.shuffles, path.barriers
    )


def test_indexer_counts(tool: ModuleType) -> None:
    """The smallest of the shapes whose rows several CTAs share."""
    (shape,) = (shape for shape in indexer_sm90.shapes() if shape.name == "32/4K")
    assert shape.ctas > 1
    found = tool.count_row(shape.tokens, shape.ctas, shape.num_splits)
    assert abs(found.scoring.instructions / shape.scoring.instructions - 1) < 0.05
    assert abs(found.ranking.instructions / shape.ranking.instructions - 1) < 0.05
    assert abs(executed(found.ranking).barriers - shape.ranking.barriers) <= 2
    first = executed(found.first_copy)
    assert abs(first.instructions / indexer_sm90.FIRST_COPY.instructions - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("counts", backward_sm100.COUNTS.values(), ids=backward_sm100.COUNTS)
def test_backward_counts(counts: backward_sm100.Counts) -> None:
    """Two blocks more."""
    plan = BwdPlan(from_registers=counts.from_registers)
    (less, few), (more, many) = (_counted(topk, plan) for topk in (64, 128))
    moved = {name: (more[name] - less[name]) / 4 for name in counts.moved}
    assert moved == pytest.approx(counts.moved, rel=0.01)
    executed_ = {role: (many[role] - few[role]) / 4 for role in ROLES}
    for role, instructions in counts.instructions.items():
        assert executed_[role] == pytest.approx(instructions, rel=0.05), role


@pytest.mark.slow
def test_forward_counts() -> None:
    """Two steps more."""
    (less, few), (more, many) = (_counted_forward(topk) for topk in (512, 768))
    moved = {name: (more[name] - less[name]) / 2 for name in forward_sm90.COUNTED}
    assert moved == forward_sm90.COUNTED
    for role, instructions in forward_sm90.COUNTED_INSTRUCTIONS.items():
        assert (many[role] - few[role]) / 2 == pytest.approx(instructions, rel=0.05), role


@pytest.mark.slow
def test_decode_counts() -> None:
    """Two steps of packed rows more."""
    (less, few), (more, many) = (_counted_forward(topk, packed=True) for topk in (512, 768))
    moved = {name: (more[name] - less[name]) / 2 for name in decode_sm90.COUNTED}
    assert moved == decode_sm90.COUNTED
    for role, instructions in decode_sm90.COUNTED_INSTRUCTIONS.items():
        assert (many[role] - few[role]) / 2 == pytest.approx(instructions, rel=0.05), role


def _counted_forward(topk: int, packed: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Bytes by path, and instructions by role, of one query of 64 heads; packed: of the decode."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 64, 576, generator=generator).bfloat16()
    kv = torch.randn(1024, 576, generator=generator).bfloat16()
    indices = torch.randperm(1024, generator=generator)[:topk].view(1, -1).int()
    out, lse = torch.zeros(1, 64, 512).bfloat16(), torch.zeros(1, 64)
    every, none = torch.empty(0, dtype=torch.int32), torch.empty(0)
    heard: list[Counters] = []

    def listen(_: Any) -> Counters:
        heard.append(Counters())
        return heard[-1]

    if packed:
        function = compiled(SPARSE_MLA_DECODE, DecodePlan(packed=True))
        kv, last = quantize_kv(kv), (1,)
    else:
        function = compiled(SPARSE_MLA_FWD, SPARSE_MLA_FWD.plans[0])
        last = (none, 1)
    with emulate(arch="sm_90a", on_launch=listen, check=False):
        function(*Operands(q, kv, indices, every, none, out, lse, 576**-0.5), *last)
    moved: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for warp in heard[-1].by_role({}):
        moved.update(warp.bytes)
        instructions[FORWARD_ROLES[warp.warps[0] // 4]] += sum(warp.instructions.values())
    return moved, instructions


def _counted(topk: int, plan: BwdPlan) -> tuple[Counter[str], Counter[str]]:
    """Bytes by path, and instructions by role, of one query: two CTAs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    q, kv, gradient = random(1, B_H, 576), random(256, 576), random(1, B_H, 512)
    indices = torch.randperm(256, generator=generator)[:topk].view(1, -1).int()
    out, lse = reference.sparse_mla_fwd(q, kv, indices)
    heard: list[Counters] = []

    def listen(_: Any) -> Counters:
        heard.append(Counters())
        return heard[-1]

    function = compiled(MLA_BWD, plan)
    with emulate(arch="sm_100a", on_launch=listen, check=False):
        run(
            function,
            MlaBwdOperands(q, kv, gradient, lse.float(), out.bfloat16(), indices),
            sm_scale=576**-0.5,
            deterministic=False,
            dkv_dtype=torch.float32,
            pairs=1,
        )
    moved: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for warp in heard[-1].by_role({}):
        moved.update(warp.bytes)
        instructions[ROLES[warp.warps[0] // 4]] += sum(warp.instructions.values())
    return moved, instructions
