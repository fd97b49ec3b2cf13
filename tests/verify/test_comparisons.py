"""The comparator lets nothing wrong pass and nothing right fail."""

import math

import pytest
import torch

from flashdsa import reference
from flashdsa.verify import judge_sparse_mla
from flashdsa.verify.compare import compare, compare_exact, compare_lse, compare_scores, failures
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs

NAN, INF = math.nan, math.inf
CASE = SparseMlaCase("many queries", 200, 400, 4, 64, d_qk=40, d_v=32)


@pytest.fixture
def inputs(seed):
    return make_sparse_mla_inputs(CASE, seed)


def reference_forward(inputs):
    return reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=CASE.d_v)


def reference_gradients(inputs, indices):
    O, lse = judge_sparse_mla.forward_results(inputs)
    dQ, dKV, _ = reference.mla_bwd(inputs.q, inputs.kv, inputs.do, lse, O, indices)
    return O, lse, {"dQ": dQ.to(torch.bfloat16), "dKV": dKV.float()}


def test_the_rounded_reference_passes(inputs):
    O, lse = reference_forward(inputs)
    verdicts = judge_sparse_mla.judge_forward(inputs, O.to(torch.bfloat16), lse.float())
    O, lse, gradients = reference_gradients(inputs, inputs.indices)
    verdicts += judge_sparse_mla.judge_backward(inputs, O, lse, gradients)
    assert failures(verdicts) == []
    assert [verdict.output for verdict in verdicts] == ["O", "lse", "dQ", "dKV"]
    assert all(verdict.first_bad is None and verdict.passed for verdict in verdicts)


def test_one_slot_lost_in_one_query_of_200_fails_o_though_the_norm_holds(inputs):
    lost = inputs.indices.clone()
    lost[77, 13] = -1
    O, _ = reference.sparse_mla_fwd(inputs.q, inputs.kv, lost, d_v=CASE.d_v)
    verdict = judge_sparse_mla.judge_forward(
        inputs, O.to(torch.bfloat16), reference_forward(inputs)[1]
    )[0]
    # one of 64 keys in one of 200 queries: about 1/sqrt(64 * 200) of the norm
    assert verdict.norm_error < 5 * 2.5e-3
    assert not verdict.passed
    assert verdict.worst_row[0] == 77 and verdict.first_bad[0] == 77


def test_one_contribution_lost_fails_dq_and_dkv_at_their_rows(inputs):
    lost = inputs.indices.clone()
    row = int(lost[77, 13])
    lost[77, 13] = -1
    O, lse, gradients = reference_gradients(inputs, lost)
    dQ, dKV = judge_sparse_mla.judge_backward(inputs, O, lse, gradients)
    assert not dQ.passed and dQ.worst_row[0] == 77
    assert not dKV.passed and dKV.worst_row == (row,)
    assert dKV.first_bad[0] == row and f"row ({row},)" in dKV.message


def test_a_row_error_fails_where_the_norm_rule_does_not_apply():
    ref = torch.ones(1000, 4, dtype=torch.float64)
    out = ref.clone()
    out[512] *= 1.02
    verdict = compare("x", out, ref, norm_tolerance=None)
    assert not verdict.passed and verdict.worst_row == (512,) and verdict.norm_limit is None
    assert verdict.row_error == pytest.approx(0.02)
    assert verdict.headline == (verdict.row_error, verdict.row_limit)
    out[512] = 1.005
    assert compare("x", out, ref, norm_tolerance=None).passed


def test_a_norm_error_fails_where_no_row_does():
    ref = torch.ones(10, 4, dtype=torch.float64)
    verdict = compare("x", ref * 1.004, ref, norm_tolerance=2.5e-3)
    assert not verdict.passed and verdict.row_error < verdict.row_limit
    assert verdict.headline == (verdict.norm_error, 2.5e-3)
    assert compare("x", ref * 1.002, ref, norm_tolerance=2.5e-3).passed


def test_cancellation_is_allowed_for_by_the_magnitude_only():
    ref, out = torch.full((2, 4), 1e-3, dtype=torch.float64), torch.full((2, 4), 1.1e-3)
    assert not compare("x", out, ref, norm_tolerance=None).passed
    summed = torch.full((2, 4), 2.0)  # 1e-4 of it may be lost: 2e-4 > 1e-4
    assert compare("x", out, ref, norm_tolerance=None, magnitude=summed).passed
    assert not compare("x", out, ref, norm_tolerance=None, magnitude=summed / 4).passed
    tiny = torch.tensor([[1e-9], [1e6]], dtype=torch.float64)  # 1e-8 of the largest row: 1e-2
    small_error = torch.tensor([[9e-3], [0.0]], dtype=torch.float64)
    assert compare("x", tiny + small_error, tiny, norm_tolerance=None, magnitude=tiny).passed
    large_error = torch.tensor([[1.1e-2], [0.0]], dtype=torch.float64)
    assert not compare("x", tiny + large_error, tiny, norm_tolerance=None, magnitude=tiny).passed


def test_each_grouping_of_rows_is_judged():
    ref = torch.ones(2, 50, 4, dtype=torch.float64)
    out = ref.clone()
    out[1, 20] *= 1.03  # of the query 0.03 / sqrt(50), of the head 0.03
    assert compare("x", out, ref, norm_tolerance=None, row_ndims=(1,)).passed
    verdict = compare("x", out, ref, norm_tolerance=None, row_ndims=(1, 2))
    assert not verdict.passed and verdict.worst_row == (1, 20)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_stray_non_finite_value_fails_everywhere(value):
    ref = torch.ones(3, 4, dtype=torch.float64)
    out = ref.clone()
    out[2, 1] = value
    size = torch.ones_like(ref)
    verdicts = [
        compare("x", out, ref, norm_tolerance=1.0),
        compare("x", out, ref, norm_tolerance=None, row_tolerance=None),
        compare_lse("x", out, ref, absolute=1e9, relative=1e9),
        compare_scores("x", out, ref, size, c=1e9, dtype=torch.float64),
        compare_exact("x", out, ref),
    ]
    assert [verdict.passed for verdict in verdicts] == [False] * 5
    assert [verdict.first_bad for verdict in verdicts] == [(2, 1)] * 5


def test_non_finite_values_must_be_of_the_same_kind():
    ref = torch.tensor([NAN, INF, -INF, 1.0], dtype=torch.float64)
    assert compare("x", ref.clone(), ref, norm_tolerance=1e-3).passed
    assert compare_lse("x", ref.clone(), ref, absolute=0.0, relative=0.0).passed
    for wrong in ([INF, INF, -INF, 1.0], [NAN, -INF, -INF, 1.0], [NAN, INF, -INF, NAN]):
        assert not compare("x", torch.tensor(wrong), ref, norm_tolerance=1e-3).passed
        assert not compare_lse("x", torch.tensor(wrong), ref, absolute=9.0, relative=9.0).passed


def test_a_nan_limit_or_magnitude_never_passes_an_error():
    ref, out = torch.ones(2, 2, dtype=torch.float64), torch.full((2, 2), 1.5)
    assert not compare("x", out, ref, norm_tolerance=NAN).passed
    assert not compare("x", out, ref, norm_tolerance=None, row_tolerance=NAN).passed
    size = torch.full((2, 2), NAN)
    assert not compare("x", out, ref, norm_tolerance=None, magnitude=size).passed
    assert not compare_scores("x", out, ref, size, c=1.0).passed
    assert not compare_lse("x", out, ref, absolute=NAN, relative=0.0).passed


def test_a_wrong_shape_or_dtype_fails_with_both_named():
    ref = torch.ones(3, 4, dtype=torch.float64)
    for verdict in (
        compare("x", ref[:2], ref, norm_tolerance=1.0),
        compare_lse("x", ref[:2], ref, absolute=1.0, relative=1.0),
        compare_exact("x", ref[:2], ref),
    ):
        assert not verdict.passed and "(2, 4)" in verdict.message and "(3, 4)" in verdict.message
    for verdict in (
        compare("x", ref, ref, norm_tolerance=1.0, dtype=torch.float32),
        compare_lse("x", ref, ref, absolute=1.0, relative=1.0, dtype=torch.float32),
        compare_exact("x", ref, ref.float()),
    ):
        assert not verdict.passed
        assert "float64" in verdict.message and "float32" in verdict.message


def test_rows_that_must_be_zero_admit_not_even_a_rounding_error():
    ref = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    zero_rows = torch.tensor([False, True])
    size = torch.full((2, 2), 1e6)
    assert compare("x", ref, ref, norm_tolerance=1e-3, zero_rows=zero_rows).passed
    out = ref.clone()
    out[1, 0] = 1e-30
    verdict = compare("x", out, ref, norm_tolerance=1e-3, magnitude=size, zero_rows=zero_rows)
    assert not verdict.passed and verdict.first_bad == (1, 0)
    assert "exactly 0" in verdict.message


def test_what_underflows_in_the_output_s_dtype_may_be_zero():
    ref = torch.full((2, 2), 2.5e-173, dtype=torch.float64)
    assert compare("x", torch.zeros(2, 2), ref, norm_tolerance=1e-3).passed
    assert not compare("x", torch.zeros(2, 2).double(), ref, norm_tolerance=1e-3).passed
    assert not compare("x", torch.zeros(2, 2), ref + 1e-29, norm_tolerance=1e-3).passed


def test_anything_over_an_all_zero_reference_fails():
    ref = torch.zeros(2, 2, dtype=torch.float64)
    assert compare("x", torch.zeros(2, 2), ref, norm_tolerance=1e-3).passed
    assert not compare("x", torch.full((2, 2), 1e-9), ref, norm_tolerance=1e-3).passed


def test_the_norm_of_what_cancels_is_a_share_of_what_was_summed():
    ref, size = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2)
    for out, passes in ((4e-6, True), (4.1e-6, False)):
        verdict = compare("x", torch.full((2, 2), out), ref, norm_tolerance=1e-3, magnitude=size)
        assert verdict.passed == passes and verdict.row_error < verdict.row_limit
    # ||ref|| is larger than 4e-3 of 100: judged as without a magnitude
    assert not compare("x", ref + 1.0011, ref + 1, norm_tolerance=1e-3, magnitude=100 * size).passed


def test_dq_of_queries_with_a_single_key():
    """It is 0 but for P (dP - delta), whose rounding in fp32 passes, and nothing larger."""
    one_key = SparseMlaCase("one key a query", 3, 40, 4, 5, d_qk=40, d_v=32, topk_length=True)
    inputs = make_sparse_mla_inputs(one_key, 0)
    inputs.topk_length.fill_(1)
    O, lse, gradients = reference_gradients(inputs, inputs.indices[:, :1])
    for error, passes in ((1e-6, True), (1e-3, False)):
        gradients["dQ"] = torch.full_like(gradients["dQ"], error)
        verdict = judge_sparse_mla.judge_backward(inputs, O, lse, gradients)[0]
        assert verdict.passed == passes


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_empty_outputs_pass(shape):
    empty = torch.zeros(shape, dtype=torch.float64)
    size = torch.zeros(shape)
    assert compare("x", empty, empty, norm_tolerance=0.0, magnitude=size, row_ndims=(1, 2)).passed
    assert compare_lse("x", empty, empty, absolute=0.0, relative=0.0).passed
    assert compare_exact("x", empty, empty).passed


def test_an_lse_in_base_2_or_off_by_a_lost_key_fails(inputs):
    O, lse = reference_forward(inputs)
    out = O.to(torch.bfloat16)
    for wrong in (lse / math.log(2), lse + math.log(1 - 1 / 64), lse + 2e-4):
        assert not judge_sparse_mla.judge_forward(inputs, out, wrong.float())[1].passed
    assert judge_sparse_mla.judge_forward(inputs, out, (lse + 5e-5).float())[1].passed


def test_scores_are_judged_by_their_magnitude():
    ref, size = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 100.0])
    assert compare_scores("x", torch.tensor([1.000009, 9e-4]), ref, size, c=1e-5).passed
    verdict = compare_scores("x", torch.tensor([1.00002, 0.0]), ref, size, c=1e-5)
    assert not verdict.passed and verdict.first_bad == (0,)
    assert not compare_scores("x", torch.tensor([1.0, 2e-3]), ref, size, c=1e-5).passed


def test_exact_comparison_names_the_first_difference_and_counts_them():
    ref = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    out = ref.clone()
    out[1, 0] = out[1, 2] = 9
    verdict = compare_exact("ids", out, ref)
    assert not verdict.passed and verdict.first_bad == (1, 0)
    assert "2 of 6 differ" in verdict.message and "9, expected 4" in verdict.message


def test_exact_comparison_is_of_bits():
    zero, nan = torch.tensor([0.0]), torch.tensor([NAN])
    assert not compare_exact("x", -zero, zero).passed
    assert compare_exact("x", nan, nan.clone()).passed
