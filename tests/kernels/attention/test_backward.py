"""Every backend's mla_bwd and sparse_mla gradients are right on every case, and keep promises."""

import math
from itertools import product

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import (
    check_autograd,
    check_backward,
    forward_results,
    judge_backward,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.support.cases import SPARSE_MLA_CASES

FEATURES = next(case for case in SPARSE_MLA_CASES if case.name == "every feature")
BF16_CASES = [case for case in SPARSE_MLA_CASES if case.dtype == torch.bfloat16]


def backward(inputs, O, lse, backend, **options):
    """The gradients by name."""
    results = flashdsa.mla_bwd(
        inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices, backend=backend, **inputs.options,
        **options,
    )  # fmt: skip
    assert len(results) == (2 if inputs.attn_sink is None else 3)
    return dict(zip(("dQ", "dKV", "d_sink"), results, strict=False))


def test_backward_is_within_the_contract(subtests, backend, device, seed):
    forms = [False, True] if device == "cuda" else [False]  # the CPU's additions are in order
    for case, deterministic in product(SPARSE_MLA_CASES, forms):
        with subtests.test(f"{case.name}, {deterministic=}"):
            inputs = make_sparse_mla_inputs(case, seed, device)
            assert failures(check_backward(inputs, backend, deterministic=deterministic)) == []


def some_of(cases, device):
    """All on a GPU; on the CPU, whose gradients are those of the test above, each third one."""
    return cases if device == "cuda" else cases[::3]


def test_dkv_in_bf16_is_within_the_contract(subtests, backend, device, seed):
    for case in some_of(BF16_CASES, device):
        with subtests.test(case.name):
            inputs = make_sparse_mla_inputs(case, seed, device)
            assert failures(check_backward(inputs, backend, dkv_dtype=torch.bfloat16)) == []


def test_autograd_is_within_the_contract(subtests, backend, device, seed):
    for case in some_of(SPARSE_MLA_CASES, device):
        with subtests.test(case.name):
            assert (
                failures(check_autograd(make_sparse_mla_inputs(case, seed, device), backend)) == []
            )


def test_the_deterministic_backward_is_bit_identical_from_run_to_run(
    subtests, backend, device, seed
):
    for case in [*SPARSE_MLA_CASES[:2], FEATURES]:
        with subtests.test(case.name):
            inputs = make_sparse_mla_inputs(case, seed, device)
            O, lse = forward_results(inputs)
            first = backward(inputs, O, lse, backend, deterministic=True)
            for _ in range(3):
                again = backward(inputs, O, lse, backend, deterministic=True)
                assert all(torch.equal(again[name], first[name]) for name in first)


def test_a_thousand_deterministic_backwards_are_bit_identical(backend, device, seed):
    """Many queries name few rows, so that an order of additions would show."""
    case = SparseMlaCase("again", 6, 9, 4, 8, duplicates=True, attn_sink="finite")
    inputs = make_sparse_mla_inputs(case, seed, device)
    O, lse = forward_results(inputs)
    first = backward(inputs, O, lse, backend, deterministic=True)
    for _ in range(1000):
        again = backward(inputs, O, lse, backend, deterministic=True)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_deterministic_gradients_through_autograd_are_bit_identical(backend, device, seed):
    case = SparseMlaCase("autograd", 8, 60, 16, 64, duplicates=True, attn_sink="finite")
    gradients = []
    for _ in range(3):
        inputs = make_sparse_mla_inputs(case, seed, device)
        leaves = [x.requires_grad_() for x in (inputs.q, inputs.kv, inputs.attn_sink)]
        O = flashdsa.sparse_mla(
            inputs.q,
            inputs.kv,
            inputs.indices,
            deterministic=True,
            backend=backend,
            **inputs.options,
        )
        gradients.append(torch.autograd.grad(O, leaves, inputs.do))
    for again in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, gradients[0], strict=True))


def test_backward_leaves_its_inputs_as_they_were(backend, device, seed):
    inputs = make_sparse_mla_inputs(FEATURES, seed, device)
    O, lse = forward_results(inputs)
    tensors = [inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices, inputs.attn_sink]
    before = [tensor.clone() for tensor in tensors]
    backward(inputs, O, lse, backend)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("attn_sink", [None, "finite"])
def test_backward_uses_the_lse_and_o_that_it_is_given(attn_sink, backend, device, seed):
    case = SparseMlaCase("given", 4, 60, 16, 32, attn_sink=attn_sink)
    inputs = make_sparse_mla_inputs(case, seed, device)
    O, lse = forward_results(inputs)
    other_O, other_lse = (O * 3).contiguous(), lse + math.log(2)
    gradients = backward(inputs, other_O, other_lse, backend)
    assert failures(judge_backward(inputs, other_O, other_lse, gradients)) == []
    assert failures(judge_backward(inputs, O, lse, gradients)) != []


def test_a_query_without_a_valid_slot_adds_nothing_even_where_it_holds_nan(backend, device, seed):
    case = SparseMlaCase("empty rows", 4, 30, 16, 20, empty_rows=True, attn_sink="infinite")
    inputs = make_sparse_mla_inputs(case, seed, device)
    O, lse = forward_results(inputs)
    for tensor in (inputs.q, inputs.do, O):
        tensor[0], tensor[3] = torch.nan, torch.inf
    gradients = backward(inputs, O, lse, backend)
    assert failures(judge_backward(inputs, O, lse, gradients)) == []
    assert (gradients["dQ"][[0, 3]] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_an_empty_query_s_nan_does_not_blur_its_neighbours(backend, device, seed):
    case = next(case for case in SPARSE_MLA_CASES if case.name == "logits near -1e4")
    inputs = make_sparse_mla_inputs(case, seed, device)
    inputs.indices[0] = -1
    inputs.q[0] = torch.nan
    assert failures(check_autograd(inputs, backend)) == []


def test_a_sink_of_plus_infinity_stops_every_gradient_of_its_head(backend, device, seed):
    case = SparseMlaCase("sinks", 3, 40, 2, 20, attn_sink="infinite")
    inputs = make_sparse_mla_inputs(case, seed, device)
    assert inputs.attn_sink.tolist() == [math.inf, -math.inf]
    O, lse = forward_results(inputs)
    gradients = backward(inputs, O, lse, backend)
    assert (gradients["dQ"][:, 0] == 0).all() and (gradients["dQ"][:, 1] != 0).any()
    assert gradients["d_sink"].tolist() == [0.0, 0.0]


def test_each_duplicate_adds_once_more(backend, device, seed):
    case = SparseMlaCase("twice", 2, 9, 4, 1, d_qk=24, d_v=16, dtype=torch.float64)
    inputs = make_sparse_mla_inputs(case, seed, device)
    O, lse = forward_results(inputs)
    once = backward(inputs, O, lse, backend)["dKV"]
    thrice = inputs.indices.repeat(1, 3)
    three = flashdsa.mla_bwd(inputs.q, inputs.kv, inputs.do, lse, O, thrice, backend=backend)[1]
    # The same O and lse are given, so each of the three slots has the P and dS of the one.
    torch.testing.assert_close(three, 3 * once)


def test_rows_at_offsets_beyond_2_to_the_31_are_reached(backend, device, seed):
    """40 rows 2^26 elements apart: the last lie beyond 2^31 while dKV stays small."""
    rows, stride = 40, 2**26
    try:
        memory = torch.empty((rows - 1) * stride + 576, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 5.2 GB of address space: {error}")
    case = SparseMlaCase("far", 4, rows, 4, 30)
    inputs = make_sparse_mla_inputs(case, seed, device)
    far = memory.as_strided((rows, 576), (stride, 1))
    far.copy_(inputs.kv)
    O, lse = forward_results(inputs)
    results = flashdsa.mla_bwd(inputs.q, far, inputs.do, lse, O, inputs.indices, backend=backend)
    gradients = dict(zip(("dQ", "dKV"), results, strict=True))
    assert failures(judge_backward(inputs, O, lse, gradients)) == []


def test_gradients_sum_the_queries_that_share_a_row(backend, device, seed):
    """Many queries on few rows: every reduction into a shared row counts."""
    case = SparseMlaCase("shared", 64, 5, 8, 7, duplicates=True)
    inputs = make_sparse_mla_inputs(case, seed, device)
    assert failures(check_backward(inputs, backend)) == []
    named = reference.valid_slots(inputs.indices, 5)
    assert max(sum(row == r for rows in named for row in rows) for r in range(5)) > 60


def test_dq_of_fp32_queries_with_one_key_is_what_fp32_rounds(subtests):
    """It is exactly 0: P (dP - delta), of two sums of products that are the same number."""
    for (queries, heads), topk, logit_scale in product(
        [(1, 1), (3, 8)], [1, 7, 64], [1.0, 10.0, 100.0]
    ):
        with subtests.test(f"{queries} x {heads}, {topk=}, {logit_scale=}"):
            generator = torch.Generator().manual_seed(0)
            for _ in range(5):
                q = logit_scale * torch.randn(queries, heads, 576, generator=generator)
                kv, dO = torch.randn(20, 576, generator=generator), torch.randn_like(q[..., :512])
                row = torch.randint(0, 20, (queries,), generator=generator, dtype=torch.int32)
                indices = row[:, None].expand(-1, topk).contiguous()
                O, lse = flashdsa.sparse_mla_fwd(q, kv, indices, backend="cpu")
                dq, _ = flashdsa.mla_bwd(q, kv, dO, lse, O, indices, backend="cpu")
                keys = kv[row.long()].double().abs()
                size = torch.einsum("shd,sd->sh", dO.double().abs(), keys[:, :512])
                size = (size + (dO.double() * O).abs().sum(-1)) * 576**-0.5
                summed = size[..., None] * keys[:, None]
                assert dq.double().norm() <= 2**-22 * summed.norm()
