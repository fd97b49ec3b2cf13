"""`deterministic=True` on Blackwell: the same bits whatever comes first, and the right ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdsa.backends.sm100 import mla_bwd
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import (
    check_backward,
    empty_queries,
    forward_results,
    judge_backward,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import unexpected
from tests.support.compilations import ptx_of

needs_dsl = pytest.mark.usefixtures("_dsl")
FEW_KEYS = SparseMlaCase("two queries on five keys", 2, 5, 128, 32, duplicates=True, invalid=True)
"""A dozen additions a key, from both queries."""
ORDERS = [Policy(asynchronous="eager", seed=seed) for seed in range(2)]


@pytest.fixture
def _dsl() -> None:
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")


def gradients(deterministic: bool, policy: Policy) -> tuple[Tensor, Tensor]:
    """dQ and dKV of FEW_KEYS, judged; nothing may be found."""
    from flashdsa.backends.emulated.runner import Emulator
    from flashdsa.backends.sm100.mla_bwd import bind

    inputs = make_sparse_mla_inputs(FEW_KEYS, 0, "cpu")
    O, lse = forward_results(inputs)
    result = Emulator(policy=policy, on_finding="collect")
    operands = MlaBwdOperands(inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    serve = bind(
        result,
        operands,
        sm_scale=FEW_KEYS.d_qk**-0.5,
        deterministic=deterministic,
        dkv_dtype=torch.float32,
    )
    dQ, dKV, *_ = serve(operands)
    assert failures(judge_backward(inputs, O, lse, {"dQ": dQ, "dKV": dKV})) == []
    assert unexpected(result.findings, in_order=deterministic) == []
    return dQ, dKV


@pytest.fixture(scope="module")
def once() -> tuple[Tensor, Tensor]:
    """The deterministic gradients, in one order of events."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    return gradients(True, ORDERS[0])


@pytest.mark.parametrize(
    "policy",
    [pytest.param(ORDERS[1], marks=pytest.mark.slow), Policy(asynchronous="late", seed=2)],
    ids=["eager", "late"],
)
def test_the_bits_do_not_depend_on_what_comes_first(
    once: tuple[Tensor, Tensor], policy: Policy
) -> None:
    again = gradients(True, policy)
    assert [torch.equal(a, b) for a, b in zip(again, once, strict=True)] == [True, True]


@pytest.mark.slow
def test_they_would_without_it(once: tuple[Tensor, Tensor]) -> None:
    """So the orders above are different ones; and the sums differ in their last bits only."""
    sums = [gradients(False, policy)[1] for policy in ORDERS]
    assert any(not torch.equal(one, sums[0]) for one in sums[1:])
    torch.testing.assert_close(sums[0], once[1], rtol=1e-5, atol=1e-4)


def test_nor_on_how_many_queries_there_is_room_for(
    once: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_bwd, "WORKSPACE_BYTES", 1)
    parts: list[int] = []
    ordered = mla_bwd.slot_order

    def counted(indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        parts.append(len(indices))
        return ordered(indices, *rest)

    monkeypatch.setattr(mla_bwd, "slot_order", counted)
    _, dKV = gradients(True, ORDERS[0])
    assert parts == [1, 1]
    assert torch.equal(dKV, once[1])


@needs_dsl
def test_the_public_operation_takes_every_feature_with_it() -> None:
    from flashdsa.backends.emulated.devices import SMALL
    from flashdsa.backends.emulated.runner import emulation

    case = SparseMlaCase(
        "every feature", 3, 60, 128, 40, duplicates=True, invalid=True, empty_rows=True,
        topk_length=True, attn_sink="infinite", poison=True, strided=True, kv_3d=True,
        indices_3d=True,
    )  # fmt: skip
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    assert empty_queries(inputs).tolist() == [True, True, False]
    with emulation(SMALL, policy=ORDERS[0]):
        assert failures(check_backward(inputs, "emulate-sm100", deterministic=True)) == []
    nothing = make_sparse_mla_inputs(SparseMlaCase("no key", 2, 0, 128, 32), 0, "cpu")
    assert failures(check_backward(nothing, "emulate-sm100", deterministic=True)) == []


@needs_dsl
def test_it_adds_nothing_in_memory() -> None:
    text = ptx_of(MLA_BWD, BwdPlan(deterministic=True))
    assert "cp.async.bulk.global.shared::cta.bulk_group" in text
    assert not re.search(r"cp\.reduce|\b(red|atom)\.\S*global", text)


ROW = 4 * 576


@pytest.mark.parametrize(
    ("num_queries", "topk", "room", "wanted"),
    [
        (4096, 2048, 1 << 30, 222),  # three waves of 74 pairs, not the 227 that have room
        (100, 2048, 1 << 30, 100),
        (4096, 2048, 5 * 2048 * ROW, 5),
        (4096, 2048, 2048 * ROW - 1, 1),
    ],
)
def test_as_many_queries_at_a_time_as_have_room(
    monkeypatch: pytest.MonkeyPatch, num_queries: int, topk: int, room: int, wanted: int
) -> None:
    monkeypatch.setattr(mla_bwd, "WORKSPACE_BYTES", room)
    assert mla_bwd.queries_at_a_time(num_queries, topk) == wanted


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_valid_slot_is_at_its_key_once_and_in_order(data: st.DataObject) -> None:
    num_queries, topk, num_keys = (data.draw(st.integers(1, high)) for high in (3, 9, 4))
    row = st.lists(st.integers(-2, num_keys + 1), min_size=topk, max_size=topk)
    indices = data.draw(st.lists(row, min_size=num_queries, max_size=num_queries))
    lengths = [data.draw(st.integers(-1, topk + 1)) for _ in range(num_queries)]
    order, starts = mla_bwd.slot_order(
        torch.tensor(indices, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), num_keys
    )
    assert (order.dtype, starts.dtype) == (torch.int32, torch.int32)
    for key in range(num_keys):
        wanted = [
            query * topk + i
            for query in range(num_queries)
            for i in range(topk)
            if indices[query][i] == key and i < lengths[query]
        ]
        assert order[starts[key] : starts[key + 1]].tolist() == wanted
