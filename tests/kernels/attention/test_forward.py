"""Every backend's sparse_mla_fwd is right on every case, and keeps the contract's promises."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.kernels.attention.sm90.decode.full.plan import JOINED_FORMATS, MIXED_FORMATS
from flashdsa.kernels.catalog import (
    SPARSE_MLA_DECODE,
    SPARSE_MLA_DECODE_FEW_HEADS,
    SPARSE_MLA_DECODE_STREAM_K,
    SPARSE_MLA_DECODE_STREAM_K_FEW_HEADS,
)
from flashdsa.problem import INT32_MAX
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify import calls
from flashdsa.verify.compare import failures
from flashdsa.verify.draw_rows import INT32_MIN, invalid_values
from flashdsa.verify.judge_sparse_mla import (
    check_autograd,
    check_backward,
    check_forward,
    judge_forward,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from tests.support.cases import PACKED_CASES, SPARSE_MLA_CASES

FEATURES = next(case for case in SPARSE_MLA_CASES if case.name == "every feature")


def forward(inputs, backend):
    return flashdsa.sparse_mla_fwd(
        inputs.q, inputs.kv, inputs.indices, d_v=inputs.case.d_v, backend=backend, **inputs.options
    )


def test_forward_is_within_the_contract(subtests, backend, device, seed):
    for case in [*SPARSE_MLA_CASES, *PACKED_CASES]:
        with subtests.test(case.name):
            assert (
                failures(check_forward(make_sparse_mla_inputs(case, seed, device), backend)) == []
            )


def test_forward_is_bit_identical_from_run_to_run(subtests, backend, device, seed):
    for case in [*SPARSE_MLA_CASES[:2], FEATURES]:
        with subtests.test(case.name):
            inputs = make_sparse_mla_inputs(case, seed, device)
            first = forward(inputs, backend)
            for _ in range(3):
                again = forward(inputs, backend)
                assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_forward_leaves_its_inputs_as_they_were(backend, device, seed):
    inputs = make_sparse_mla_inputs(FEATURES, seed, device)
    tensors = [inputs.q, inputs.kv, inputs.indices, inputs.topk_length, inputs.attn_sink]
    before = [tensor.clone() for tensor in tensors]
    forward(inputs, backend)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_a_query_without_a_valid_slot_ignores_even_its_own_nan(backend, device, seed):
    case = SparseMlaCase("empty rows", 4, 30, 16, 20, empty_rows=True, attn_sink="finite")
    inputs = make_sparse_mla_inputs(case, seed, device)
    inputs.q[0], inputs.q[3] = torch.nan, torch.inf
    O, lse = forward(inputs, backend)
    assert failures(judge_forward(inputs, O, lse, backend=backend)) == []
    assert (O[[0, 3]] == 0).all() and (lse[[0, 3]] == math.inf).all()


def test_an_empty_query_s_nan_does_not_blur_its_neighbours(backend, device, seed):
    case = next(case for case in SPARSE_MLA_CASES if case.name == "logits to 1e4, rounded dots")
    inputs = make_sparse_mla_inputs(case, seed, device)
    inputs.indices[0] = -1
    inputs.q[0] = torch.nan
    O, lse = forward(inputs, backend)
    assert failures(judge_forward(inputs, O, lse, backend=backend)) == []


def test_finite_inputs_do_not_overflow_however_large_the_logits(subtests, backend, device, seed):
    for size in [1e6, 1e9, 1e12, 1e20, 1e30]:
        with subtests.test(size):
            case = SparseMlaCase("huge", 5, 150, 16, 64, logit_scale=size)
            inputs = make_sparse_mla_inputs(case, seed, device)
            O, lse = forward(inputs, backend)
            assert torch.isfinite(O).all() and torch.isfinite(lse).all()
            assert failures(judge_forward(inputs, O, lse, backend=backend)) == []


def test_a_valid_slot_s_nan_reaches_the_queries_that_name_it_and_no_other(backend, device, seed):
    inputs = make_sparse_mla_inputs(SparseMlaCase("nan", 6, 40, 8, 10), seed, device)
    row = int(inputs.indices[2, 3])
    inputs.kv[row] = torch.nan
    O, lse = forward(inputs, backend)
    naming = (inputs.indices == row).any(dim=1)
    assert O[naming].isnan().all() and lse[naming].isnan().all()
    assert torch.isfinite(O[~naming]).all() and torch.isfinite(lse[~naming]).all()
    assert not naming.all()


@pytest.mark.parametrize("sink", [None, "finite"])
def test_logits_of_minus_infinity_are_no_invalid_slots(backend, device, seed, sink):
    """On the CPU; GPU kernels mark invalid slots by them. Other heads and queries see nothing."""
    case = SparseMlaCase("-inf", 4, 30, 16, 20, attn_sink=sink)
    inputs = make_sparse_mla_inputs(case, seed, device)
    inputs.kv[:, 0] = inputs.kv[:, 0].abs() + 1
    inputs.indices.clamp_(0, 29)
    expected = forward(inputs, backend)
    inputs.q[1, 3, 0] = -torch.inf
    options = {**inputs.options, "d_v": case.d_v}
    given = inputs.q, inputs.kv, inputs.indices
    *got, largest = flashdsa.sparse_mla_fwd(
        *given, **options, return_max_logits=True, backend=backend
    )
    for value, other, wanted in zip(
        got, expected, reference.sparse_mla_fwd(*given, **options), strict=True
    ):
        row = wanted[1, 3].to(value)
        if backend != "cpu":
            row = torch.zeros_like(row) if value.dim() == 3 else torch.full_like(row, torch.inf)
        torch.testing.assert_close(value[1, 3], row, equal_nan=True)
        other[1, 3] = value[1, 3]
        torch.testing.assert_close(value, other, rtol=2**-7, atol=2e-3, equal_nan=True)
    assert largest[1, 3] == -torch.inf and largest.isfinite().sum() == largest.numel() - 1


def test_the_order_of_slots_does_not_matter_beyond_rounding(backend, device, seed):
    inputs = make_sparse_mla_inputs(SparseMlaCase("order", 3, 200, 16, 150), seed, device)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(seed)).to(device)
    O, lse = flashdsa.sparse_mla_fwd(
        inputs.q, inputs.kv, inputs.indices[:, order].contiguous(), backend=backend
    )
    assert failures(judge_forward(inputs, O, lse, backend=backend)) == []


def test_a_lone_slot_at_any_place_is_found(backend, device, seed):
    topk = 130
    places = [0, 1, 31, 32, 63, 64, 65, 127, 128, 129]
    case = SparseMlaCase("lone", len(places), 50, 4, topk)
    inputs = make_sparse_mla_inputs(case, seed, device)
    inputs.indices.fill_(-1)
    for s, place in enumerate(places):
        inputs.indices[s, place] = 40 - s
    O, lse = forward(inputs, backend)
    assert failures(judge_forward(inputs, O, lse, backend=backend)) == []


@pytest.mark.parametrize("order", ["ascending", "descending", "valid last", "valid first"])
def test_long_rows_may_meet_their_largest_logit_anywhere(order, backend, device, seed):
    """6000 slots, more than a backend holds at once: the running maximum moves, or never starts."""
    case = SparseMlaCase("long", 2, 6000, 4, 6000, d_qk=72, d_v=64)
    inputs = make_sparse_mla_inputs(case, seed, device)
    if order.startswith("valid"):
        inputs.indices[:, 100:] = -1
        if order == "valid last":
            inputs.indices.copy_(inputs.indices.flip(1))
    else:
        inputs.q.copy_(inputs.q[:1, :1].abs() + 0.5)
        by_logit = (inputs.kv.float() @ inputs.q[0, 0].float()).argsort()
        by_logit = by_logit.flip(0) if order == "descending" else by_logit
        inputs.indices.copy_(by_logit.to(torch.int32).expand(2, -1))
    O, lse = forward(inputs, backend)
    assert failures(judge_forward(inputs, O, lse, backend=backend)) == []


@pytest.mark.parametrize("width", [(), (1,)], ids=["kv 2-D", "kv 3-D"])
def test_rows_beyond_2_to_the_31_elements_are_reached(backend, device, seed, width):
    """kv is reserved, not filled: a backend that reads rows no slot names takes gigabytes here."""
    num_keys = 2**31 // 576 + 10
    try:
        kv = torch.empty(num_keys, *width, 576, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 4.3 GB of address space: {error}")
    generator = torch.Generator().manual_seed(seed)
    kv[-9:] = torch.randn(9, *width, 576, generator=generator).to(torch.bfloat16)
    kv[:2] = torch.nan  # where an offset that wrapped around may land
    q = torch.randn(2, 4, 576, generator=generator).to(torch.bfloat16).to(device)
    tail = [[num_keys - 1, num_keys - 9, num_keys - 4], [num_keys - 2, num_keys, num_keys - 2]]
    indices = torch.tensor(tail, dtype=torch.int32, device=device)
    O, lse = flashdsa.sparse_mla_fwd(q, kv, indices, backend=backend)
    ref_O, ref_lse = reference.sparse_mla_fwd(q, kv, indices)
    torch.testing.assert_close(O.double(), ref_O, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=0, atol=1e-4)


FUZZED = 500
BATCH = 50
"""Cases of one test."""
FURTHER = (12, 53, 91, 1028, 1221)
"""Seeds of one case each, for kernels that no other case reaches."""
MIXED = tuple(form.name for form in MIXED_FORMATS)


def sources(draw: random.Random) -> dict[str, Any]:
    """Features of the rows: bf16 or of any format, of one source or two, named by ids or ranges."""
    found: dict[str, Any] = {"d_qk": draw.choice([512, 512, 576])}
    two = draw.random() < 0.4
    if draw.random() < 0.4:
        found["max_logits"] = draw.random() < 0.3
    elif found["d_qk"] == 576:  # packed rows with RoPE columns of which only one list is taken
        return found | {"packed": draw.choice(["ue8m0", "fp32"]), "page_size": draw.choice([0, 64])}
    else:
        form = draw.choice(["v32_no_rope", *(form.name for form in JOINED_FORMATS)])
        scale = draw.choice(["ue8m0", "fp32"]) if form == "v32_no_rope" else "ue8m0"
        found |= {"packed": scale, "kv_format": form, "page_size": draw.choice([0, 64])}
        if two:
            found["extra_format"] = draw.choice(MIXED) if form in MIXED else form
    if two:
        found |= {"extra_keys": draw.choice([5, 90, 300]), "extra_topk": draw.choice([3, 64, 128])}
        found["ranges"] = draw.choice(["", "kv", "extra_kv", "kv and extra_kv"])
    if "kv" not in found.get("ranges", "").split() and draw.random() < 0.25:
        found["index_block"] = draw.choice([4, 64])
    return found


def drawn(draw: random.Random, number: int) -> SparseMlaCase:
    """Any shape and features: few queries, a wave of them, or so many that they are grouped."""
    found, heads = sources(draw), draw.choice([1, 8, 16, 16, 20, 32, 64, 65, 100, 128])
    queries, topk = draw.randint(1, 12), draw.choice([1, 63, 64, 127, 128, 129, 500])
    size = draw.random()
    if heads in (8, 16, 32) and "packed" not in found and size < 0.3:
        queries, topk = (64 // heads - 1) * 132 + draw.randint(1, 40), draw.randint(1, 70)
    elif size > 0.6:
        queries, topk = draw.choice([40, 70, 70, 135, 150]), draw.choice([40, 1000, 2048])
    page, largest = found.get("page_size"), 1000 if "packed" in found else 5000
    return SparseMlaCase(
        f"fuzzed {number}", queries,
        draw.choice([64, 320, 1024] if page else [1, 63, 64, 65, 300, largest]), heads, topk,
        duplicates=draw.random() < 0.3, invalid=draw.random() < 0.5, empty_rows=draw.random() < 0.3,
        topk_length=draw.random() < 0.5, attn_sink=draw.choice([None, "finite", "infinite"]),
        poison=draw.random() < 0.3, strided=draw.random() < 0.3, **found,
    )  # fmt: skip


def batch_of(number: int) -> list[SparseMlaCase]:
    """The cases of one test; with these seeds all of them reach every kernel."""
    draw = random.Random(1000 + number)
    cases = [drawn(draw, number * BATCH + at) for at in range(BATCH)]
    if number == 0:
        cases += [drawn(random.Random(seed), seed) for seed in FURTHER]
    return cases


def test_tiny_forms_of_fuzzed_cases_are_legal_and_within_the_contract() -> None:
    for case in batch_of(0):
        most = {"num_queries": 3, "num_heads": 2, "topk": 20, "num_keys": 320}
        tiny = replace(case, **{name: min(getattr(case, name), n) for name, n in most.items()})
        assert failures(check_forward(make_sparse_mla_inputs(tiny, 0), "cpu")) == [], tiny


@pytest.mark.slow
def test_fuzzed_cases_reach_every_kind_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper serves each."""

    def packed(kv: torch.Tensor, scale: str, form: str) -> torch.Tensor:
        return torch.zeros(len(kv), ROW_FORMATS[form].row_bytes, dtype=torch.uint8)

    zeros = lambda *shape, generator=None, **kind: torch.zeros(*shape, **kind)
    monkeypatch.setattr(torch, "randn", zeros)  # kernels are chosen by shapes and lists
    monkeypatch.setattr(reference, "quantize_kv", packed)
    recorder = Recorder(H200)
    with running_on(recorder):
        for number in range(FUZZED // BATCH):
            for case in batch_of(number):
                calls.sparse_mla_fwd(make_sparse_mla_inputs(case, 0), "emulate-sm90")
    decodes = (SPARSE_MLA_DECODE, SPARSE_MLA_DECODE_STREAM_K)
    few = (SPARSE_MLA_DECODE_FEW_HEADS, SPARSE_MLA_DECODE_STREAM_K_FEW_HEADS)
    wanted = {plan.name for spec in (*decodes, *few) for plan in spec.plans}
    assert wanted - set(recorder.launched) == set()
    assert {group for group in (2, 4, 8) if f"group{group}" not in str(recorder.launched)} == set()


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
