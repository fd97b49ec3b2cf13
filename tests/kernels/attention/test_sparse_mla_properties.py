"""Whatever the indices, lengths, sinks and dimensions, forward and backward match the oracle."""

import dataclasses
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashdsa import reference
from flashdsa.problem import INT32_MAX
from flashdsa.verify.compare import failures
from flashdsa.verify.draw_rows import INT32_MIN, invalid_values
from flashdsa.verify.judge_sparse_mla import check_autograd, check_backward, check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@st.composite
def sparse_mla_inputs(draw, dtypes=DTYPES) -> SparseMlaInputs:
    """Any indices and lengths over small dimensions; rows that no valid slot names hold poison."""
    d_v = draw(st.sampled_from([1, 8, 16]), label="d_v")
    case = SparseMlaCase(
        name="drawn", num_queries=draw(st.integers(0, 4), label="S"),
        num_keys=draw(st.integers(0, 12), label="S_kv"),
        num_heads=draw(st.integers(1, 5), label="H"), topk=draw(st.integers(1, 40), label="topk"),
        d_qk=d_v + draw(st.integers(1, 9), label="d_rope"), d_v=d_v,
        dtype=draw(st.sampled_from(dtypes), label="dtype"),
        sm_scale=draw(st.sampled_from([None, None, 0.0, 0.25]), label="sm_scale"),
        logit_scale=draw(st.sampled_from([1.0, 1.0, 1e4]), label="logit_scale"),
        strided=draw(st.booleans(), label="strided"), kv_3d=draw(st.booleans(), label="kv_3d"),
        indices_3d=draw(st.booleans(), label="indices_3d"),
        attn_sink=draw(st.sampled_from([None, "finite"]), label="sink"), cancels=True,
    )  # fmt: skip
    inputs = make_sparse_mla_inputs(case, draw(st.integers(0, 2**31), label="seed"))

    bad = st.sampled_from(invalid_values(case.num_keys))
    slot = bad if case.num_keys == 0 else st.one_of(st.integers(0, case.num_keys - 1), bad)
    row = st.lists(slot, min_size=case.topk, max_size=case.topk)
    for s in range(case.num_queries):
        values = torch.tensor(draw(row, label=f"indices of query {s}"), dtype=torch.int32)
        inputs.indices[s] = values
    topk_length = None
    if draw(st.booleans(), label="has topk_length"):
        special = st.sampled_from([0, -1, case.topk + 1, INT32_MIN, INT32_MAX])
        lengths = st.lists(
            st.one_of(st.integers(0, case.topk), special),
            min_size=case.num_queries,
            max_size=case.num_queries,
        )
        topk_length = torch.tensor(draw(lengths, label="lengths"), dtype=torch.int32)
    if inputs.attn_sink is not None:
        for h in range(case.num_heads):
            some = st.sampled_from([math.inf, -math.inf, 0.0, 1e4, -1e4, 3.4e38, None])
            sink = draw(some, label=f"sink of head {h}")
            if sink is not None:
                inputs.attn_sink[h] = sink

    slots = reference.valid_slots(inputs.indices, case.num_keys, topk_length)
    named = {r for rows in slots for r in rows.tolist()}
    poison = draw(st.sampled_from([math.nan, math.inf, -math.inf]), label="poison")
    for r in range(case.num_keys):
        if r not in named:
            inputs.kv[r] = poison
    return dataclasses.replace(inputs, topk_length=topk_length)


@given(inputs=sparse_mla_inputs())
def test_forward_matches_the_oracle(backend, device, inputs):
    assert failures(check_forward(inputs.to(device), backend)) == []


@given(inputs=sparse_mla_inputs())
def test_backward_matches_the_oracle(backend, device, inputs):
    assert failures(check_backward(inputs.to(device), backend)) == []


@given(inputs=sparse_mla_inputs(dtypes=(torch.float32, torch.float64)))
def test_autograd_matches_the_oracle(backend, device, inputs):
    assert failures(check_autograd(inputs.to(device), backend)) == []
