"""Lists of the Hopper backward over many rows: as over few ones, on ptxemu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import compiled, emulation
from flashdsa.kernels.attention import union
from flashdsa.verify.judge_sparse_mla import forward_results
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.kernels.findings import unexpected


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_packed_rows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    """With rows that a query names again, and invalid slots."""
    case = SparseMlaCase("far", 3, 300, 64, 140, duplicates=True, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    found = []
    for rows in (union.FAR_ROWS, 100):
        monkeypatch.setattr(union, "FAR_ROWS", rows)
        compiled.cache_clear()
        with emulation(SMALL) as emulator:
            operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
            found.append(flashdsa.mla_bwd(*operands, deterministic=True, backend="emulate-sm90"))
        assert unexpected(emulator.findings, in_order=True) == []
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
