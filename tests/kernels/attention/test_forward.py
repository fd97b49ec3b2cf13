"""Every backend's sparse_mla_fwd is right on every case, and keeps the contract's promises."""

import math

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
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


def test_lse_converts_to_base_2_and_back():
    lse = torch.tensor([0.0, math.log(8), -3.0, math.inf])
    base2 = flashdsa.lse_to_base2(lse)
    torch.testing.assert_close(base2, torch.tensor([0.0, 3.0, -3.0 / math.log(2), math.inf]))
    torch.testing.assert_close(flashdsa.lse_from_base2(base2), lse)


def test_lse_for_merge_lets_a_part_without_rows_weigh_nothing():
    """A query's rows in two parts, of which one may be empty: the merged lse is that of all."""
    q, kv = torch.randn(3, 2, 16), torch.randn(9, 16)
    left = torch.tensor([[0, 1], [-1, -1], [-1, -1]], dtype=torch.int32)
    right = torch.tensor([[5, 7], [2, 4], [-1, -1]], dtype=torch.int32)
    lses = [
        flashdsa.lse_for_merge(flashdsa.sparse_mla_fwd(q, kv, ids, d_v=8)[1])
        for ids in (left, right, torch.cat([left, right], dim=1))
    ]
    assert lses[1].isneginf().sum(0).tolist() == [1, 1] and not lses[2].isposinf().any()
    torch.testing.assert_close(torch.logaddexp(lses[0], lses[1]), lses[2])
