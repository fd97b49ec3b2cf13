"""The emulated indexer with a topk of any number, not only those of the models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from tests.kernels.indexer.inputs import expected_ids, make_inputs

LENGTHS = [130, 0, 700, 70]
BACKEND = "emulate-sm90"


@pytest.mark.usefixtures("lines", "small_device")  # so that others need not compile the kernel
@pytest.mark.parametrize(("values", "calls"), [("random", 2), ("two", 1)])
def test_ids_are_exact(values: str, calls: int) -> None:
    """Both orders; the second call is one that was served."""
    inputs, topk = make_inputs(LENGTHS, num_heads=16, values=values), 100
    for by_score in (False, True):
        expected = expected_ids(inputs, topk, by_score)
        for _ in range(calls):
            ids = inputs.output(topk)
            flashdsa.dsa_topk_indexer(*inputs, ids, sorted=by_score, backend=BACKEND)
            if by_score:
                assert torch.equal(ids, expected)
            else:  # the order is the backend's own, and -1 comes last
                assert torch.equal(ids < 0, expected < 0)
                assert torch.equal(ids.sort().values, expected.sort().values)


@pytest.mark.usefixtures("small_device")
def test_two_queries_of_a_request_and_an_int8_cache() -> None:
    rows = make_inputs([130, 130, 70, 70], num_heads=16)
    table = rows.block_table[[1, 3]].contiguous()
    rows.block_table[0], rows.block_table[2] = rows.block_table[1], rows.block_table[3]
    ids = torch.full((2, 2, 40), -99, dtype=torch.int32)
    q, weights, lengths = (
        x.unflatten(0, (2, 2)) for x in (rows.q_index_fp8, rows.weights, rows.seq_lens)
    )
    cache = rows.k_index_cache_fp8.view(torch.int8)
    flashdsa.dsa_topk_indexer(q, cache, weights, lengths, table, ids, sorted=True, backend=BACKEND)
    assert torch.equal(ids.flatten(0, 1), expected_ids(rows, 40, by_score=True))
