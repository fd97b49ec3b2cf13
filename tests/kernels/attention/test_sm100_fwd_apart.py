"""The Blackwell forward on keys whose RoPE columns are a tensor of their own, on ptxemu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm100.sparse_mla import bind_plan, write_apart
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from flashdsa.ops.attention import SparseMlaOutOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs

CASE = SparseMlaCase("3 queries of 16 heads, two tiles", 3, 90, 16, 50, invalid=True,
                     duplicates=True, empty_rows=True, topk_length=True)  # fmt: skip
ROW = 77


def operands_of(inputs: SparseMlaInputs, kv: Tensor) -> SparseMlaOutOperands:
    """The call's operands with poisoned results."""
    out = torch.full((*inputs.q.shape[:2], 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(inputs.q.shape[:2], torch.nan)
    indices = inputs.indices.reshape(CASE.num_queries, CASE.topk)
    return SparseMlaOutOperands(inputs.q, kv, indices, out, lse, None, inputs.topk_length)


@pytest.mark.parametrize("poison", [pytest.param(False, marks=pytest.mark.slow), True])
def test_results_are_those_of_whole_rows_bit_for_bit(poison: bool) -> None:
    """With a row of NaN and infinite RoPE columns, too, that one query names: the others of its
    group are computed again."""
    inputs = make_sparse_mla_inputs(CASE, 0, "cpu")
    rows = inputs.kv.view(-1, 576)
    if poison:
        assert inputs.topk_length is not None
        reads = int(inputs.topk_length.argmax())
        inputs.indices[inputs.indices == ROW] = -1
        inputs.indices[reads, ..., 0] = ROW
        rows[ROW, 3], rows[ROW, 570] = torch.nan, torch.inf
    whole, apart = operands_of(inputs, rows), operands_of(inputs, rows[:, :512].contiguous())
    emulator, scale = Emulator(on_finding="collect"), 576**-0.5
    with emulator.launching():
        bind_plan(emulator, FwdPlan(8), whole.inputs, scale)(whole)
    write_apart(emulator, apart, rows[:, 512:].contiguous(), scale)
    assert [str(finding) for finding in emulator.findings] == []
    for ours, expected in ((apart.out, whole.out), (apart.lse, whole.lse)):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(ours.isnan(), expected.isnan())
    judged = judge_forward(inputs, apart.out, apart.lse, None, backend="emulate-sm100")
    assert failures(judged) == []
    assert poison == bool(apart.out.isnan().any())
