"""The Hopper decode on a GPU, where it is not what every backend's tests ask for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.support.hopper_gpu import HOPPER_GPU, by_turns_on_streams

pytestmark = HOPPER_GPU


@pytest.mark.parametrize(("packed", "heads"), [("", 64), ("ue8m0", 64), ("ue8m0", 16)])
@pytest.mark.parametrize("queries", [1, 8, 30, 50, 66, 132, 133, 200, 300])
def test_every_number_of_ctas_is_within_the_contract_and_repeats(
    queries: int, packed: str, heads: int
) -> None:
    case = SparseMlaCase("decode", queries, 700, heads, 600, packed=packed, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    assert failures(check_forward(inputs, "sm90")) == []
    first = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    for _ in range(5):
        again = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("queries", [8, 136])
def test_a_graph_replays_it_on_new_values(queries: int, heads: int) -> None:
    """Other lengths and ids, a row of -1, a length of 0, NaN in a row that no valid slot names.

    8 queries are clusters', tiles of 136 are dealt out.
    """
    case = SparseMlaCase("graph", queries, 3000, heads, 2048, packed="ue8m0")
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    lengths = torch.full((queries,), 2048, dtype=torch.int32, device="cuda")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(
            inputs.q, inputs.kv, inputs.indices, topk_length=lengths, backend="sm90"
        )

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    lengths.view(-1, 8).copy_(torch.tensor([1, 64, 65, 128, 0, 1000, 2047, 2048]))
    inputs.indices.copy_(inputs.indices.flip(0))
    inputs.indices[5].fill_(-1)
    inputs.indices[inputs.indices == 7] = 8
    inputs.indices[0, 1] = 7
    inputs.kv[7].fill_(0x7F)
    graph.replay()
    torch.cuda.synchronize()
    O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, topk_length=lengths)
    torch.testing.assert_close(captured[1].cpu().double(), lse, rtol=1e-5, atol=1e-4)
    assert (captured[0].cpu().double() - O).norm() <= 2.5e-3 * O.norm()
    assert all(torch.equal(x, y) for x, y in zip(captured, forward(), strict=True))


@pytest.mark.parametrize(("packed", "heads"), [("", 64), ("ue8m0", 64), ("ue8m0", 16)])
def test_dealt_tiles_of_two_streams_do_not_meet(packed: str, heads: int) -> None:
    """Each stream has a workspace."""
    cases = [SparseMlaCase("stream", 140, 2500, heads, 2048, packed=packed) for _ in range(2)]
    inputs = [make_sparse_mla_inputs(case, seed, "cuda") for seed, case in enumerate(cases)]

    def forward(number: int) -> tuple[torch.Tensor, ...]:
        x = inputs[number]
        return flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend="sm90")

    alone = [forward(number) for number in range(2)]
    together = by_turns_on_streams([partial(forward, number) for number in range(2)], 10)
    for expected, every in zip(alone, together, strict=True):
        for results in every:
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
