"""The indexer on GPUs with a topk of any number, not only those of the models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import flashdsa
from tests.kernels.indexer.inputs import Inputs, expected_ids, make_inputs
from tests.support.hopper_gpu import HOPPER_GPU

LENGTHS = [130, 0, 700, 70]


def on(backend: str) -> AbstractContextManager[Any]:
    """A small emulated device, or none."""
    if not backend.startswith("emulate"):
        return nullcontext()
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    from flashdsa.backends.emulated.devices import SMALL
    from flashdsa.backends.emulated.runner import emulation

    return emulation(SMALL)


def judge(inputs: Inputs, topk: int, backend: str, calls: int = 2) -> None:
    """Both orders, twice: the second call is one that was served."""
    for by_score in (False, True):
        expected = expected_ids(inputs, topk, by_score)
        for _ in range(calls):
            ids = inputs.output(topk)
            flashdsa.dsa_topk_indexer(*inputs, ids, sorted=by_score, backend=backend)
            if by_score:
                assert torch.equal(ids, expected)
            else:  # the order is the backend's own, and -1 comes last
                assert torch.equal(ids < 0, expected < 0)
                assert torch.equal(ids.sort().values, expected.sort().values)


@pytest.mark.parametrize(("values", "calls"), [("random", 2), ("two", 1)])
def test_ids_are_exact(values: str, calls: int) -> None:
    with on("emulate-sm90"):
        judge(make_inputs(LENGTHS, num_heads=16, values=values), 100, "emulate-sm90", calls)


def test_two_queries_of_a_request_and_an_int8_cache() -> None:
    rows = make_inputs([130, 130, 70, 70], num_heads=16)
    table = rows.block_table[[1, 3]].contiguous()
    rows.block_table[0], rows.block_table[2] = rows.block_table[1], rows.block_table[3]
    ids = torch.full((2, 2, 40), -99, dtype=torch.int32)
    with on("emulate-sm90"):
        flashdsa.dsa_topk_indexer(
            rows.q_index_fp8.unflatten(0, (2, 2)),
            rows.k_index_cache_fp8.view(torch.int8),
            rows.weights.unflatten(0, (2, 2)),
            rows.seq_lens.unflatten(0, (2, 2)),
            table,
            ids,
            sorted=True,
            backend="emulate-sm90",
        )
    assert torch.equal(ids.flatten(0, 1), expected_ids(rows, 40, by_score=True))


@pytest.mark.parametrize("topk", [1, 100, 511, 513, 1500, 2047])
@pytest.mark.parametrize("heads", [16, 32, 64])
class TestOnHopper:
    """The same on the GPU, with long rows too."""

    pytestmark = HOPPER_GPU

    def test_ids_are_exact(self, heads: int, topk: int) -> None:
        for lengths in ([40_000, *LENGTHS], [3000] * 150):
            judge(make_inputs(lengths, num_heads=heads).to("cuda"), topk, "sm90")

    def test_other_ids_of_as_many_elements_are_refused(self, heads: int, topk: int) -> None:
        inputs = make_inputs([3000, 500], num_heads=heads).to("cuda")
        flashdsa.dsa_topk_indexer(*inputs, inputs.output(topk), backend="sm90")
        wrong = inputs.output(topk).view(1, 2 * topk)
        with pytest.raises(ValueError, match="topk_indices"):
            flashdsa.dsa_topk_indexer(*inputs, wrong, backend="sm90")

    def test_positions(self, heads: int, topk: int) -> None:
        inputs = make_inputs([3000, 500], num_heads=heads).to("cuda")
        ids, slots = inputs.output(topk), inputs.output(topk)
        flashdsa.dsa_topk_indexer(*inputs, ids, sorted=True, ids="position", backend="sm90")
        flashdsa.dsa_topk_indexer(*inputs, slots, sorted=True, backend="sm90")
        page = inputs.block_table.gather(1, ids.clamp_min(0).long() // 64)
        assert torch.equal(torch.where(ids < 0, -1, page * 64 + ids % 64), slots)
