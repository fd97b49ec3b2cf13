"""The Hopper forward on a GPU, where it is not what every backend's tests ask for."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

GROUPED = [
    # name, S, S_kv, H, topk: more queries than (group - 1) times the SMs
    SparseMlaCase("groups of 2", 151, 300, 32, 70, invalid=True, topk_length=True),
    SparseMlaCase("groups of 4", 402, 300, 16, 70, duplicates=True, attn_sink="finite"),
    SparseMlaCase("groups of 8", 930, 300, 8, 40, invalid=True, poison=True),
]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups_of_queries_are_within_the_contract(case: SparseMlaCase) -> None:
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    assert failures(check_forward(inputs, "sm90")) == []


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_a_groups_list_is_the_same_every_time(case: SparseMlaCase) -> None:
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    first = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, **inputs.options)
    for _ in range(5):
        again = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, **inputs.options)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_it_on_new_values(heads: int) -> None:
    case = SparseMlaCase("graph", 402, 300, heads, 64)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, backend="sm90")

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    inputs.q.copy_(inputs.q.flip(0))
    inputs.indices.copy_(inputs.indices.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, forward(), strict=True))
