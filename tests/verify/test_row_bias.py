"""A row that is 1 % too long or too short is seen, with bf16 too; roundings are not."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import Comparison, compare, failures, judge_bias
from flashdsa.verify.indexer_training_cases import IndexerTrainingCase, make_indexer_training_inputs
from flashdsa.verify.judge_indexer_training import check_index_backward, judge_index_backward
from flashdsa.verify.judge_sparse_mla import (
    check_backward,
    check_forward,
    forward_results,
    judge_backward,
    judge_forward,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from flashdsa.verify.tolerances import BF16_ROUNDING
from tests.support.cases import SPARSE_MLA_CASES
from tests.support.subtests import CaseLoop

CASE = SparseMlaCase("few rows", 3, 60, 8, 32)
FEATURES = SparseMlaCase(
    "features", 6, 60, 4, 24, duplicates=True, invalid=True, topk_length=True, attn_sink="finite"
)
SEEDS = range(6)
FACTORS = (1.01, 0.99)


def bf16_operands(inputs, O, lse):
    """dQ and dKV in float64 from one rounding to bf16 of each P and dS, as tensor cores take."""
    dq = torch.zeros(inputs.q.shape, dtype=torch.float64)
    dkv = torch.zeros(inputs.kv.shape, dtype=torch.float64)
    named = reference.valid_slots(inputs.indices, inputs.num_keys, inputs.topk_length)
    scale = inputs.q.shape[-1] ** -0.5
    for s, rows in enumerate(named):
        if not len(rows):
            continue
        keys, q, do = (x.double() for x in (inputs.kv[rows], inputs.q[s], inputs.do[s]))
        p = torch.exp(scale * q @ keys.T - lse[s].double()[:, None])
        delta = (O[s].double() * do).sum(-1, keepdim=True)
        ds = p * (do @ keys[:, : do.shape[-1]].T - delta) * scale
        p, ds = p.bfloat16().double(), ds.bfloat16().double()
        dq[s] = ds @ keys
        dkv.index_add_(0, rows, ds.T @ q)
        dkv[:, : do.shape[-1]].index_add_(0, rows, p.T @ do)
    return dq.bfloat16(), dkv


def planted(x: Tensor, row: tuple[int, ...], factor: float) -> Tensor:
    """A copy in which one row is multiplied, as precisely as its dtype has it."""
    x = x.clone()
    x[row] = (x[row].double() * factor).to(x.dtype)
    return x


def test_one_percent_in_one_row_of_o_is_seen(subtests: CaseLoop) -> None:
    for seed in SEEDS:
        with subtests.test(f"{seed=}"):
            inputs = make_sparse_mla_inputs(CASE, seed)
            O, lse = forward_results(inputs)
            for factor, row in product(FACTORS, ((seed % 3,), (seed % 3, seed % 8))):
                verdict = judge_forward(inputs, planted(O, row, factor), lse)[0]
                assert not verdict.passed and verdict.bias_error > 5e-3
                assert verdict.worst_row is not None and verdict.worst_row[0] == row[0]
            assert failures(judge_forward(inputs, O, lse)) == []


def test_one_percent_in_one_row_of_a_gradient_is_seen(subtests: CaseLoop) -> None:
    for seed in SEEDS:
        with subtests.test(f"{seed=}"):
            plant_into_gradients(seed)


def plant_into_gradients(seed: int) -> None:
    """The CPU's, and those of a kernel whose P and dS have 8 bits."""
    inputs = make_sparse_mla_inputs(CASE, seed)
    O, lse = forward_results(inputs)
    q, kv, do, indices = inputs.q, inputs.kv, inputs.do, inputs.indices
    of_cpu = flashdsa.mla_bwd(q, kv, do, lse, O, indices, backend="cpu")[:2]
    for rounds, (dq, dkv) in ((False, of_cpu), (True, bf16_operands(inputs, O, lse))):
        honest = {"dQ": dq, "dKV": dkv.float()}
        if rounds:
            honest["dKV:bf16"] = dkv.bfloat16()
        assert failures(judge_backward(inputs, O, lse, honest, bf16_operands=rounds)) == []
        named = int(indices[seed % 3, seed % 32])
        rows = {"dQ": [(seed % 3,), (seed % 3, seed % 8)], "dKV": [(named,)]}
        rows["dKV:bf16"] = rows["dKV"]
        for name, right in honest.items():
            for row, factor in product(rows[name], FACTORS):
                wrong = planted(right, row, factor)
                (verdict,) = judge_backward(inputs, O, lse, {name: wrong}, bf16_operands=rounds)
                assert not verdict.passed, (name, row, verdict.bias_error)
                assert verdict.bias_error > 5e-3


@pytest.mark.parametrize("case", [CASE, FEATURES], ids=lambda case: case.name)
def test_right_bf16_results_of_the_cpu_are_far_from_the_limit(case: SparseMlaCase) -> None:
    """Roundings of 512 numbers all but cancel along their row."""
    worst: dict[str, float] = {}
    for seed in range(100, 108):
        inputs = make_sparse_mla_inputs(case, seed)
        verdicts = check_forward(inputs, "cpu")[:1] + check_backward(inputs, "cpu")[:2]
        assert failures(verdicts) == []
        for verdict in verdicts:
            worst[verdict.output] = max(worst.get(verdict.output, 0.0), verdict.bias_error)
    assert worst["O"] < 2e-3 and worst["dQ"] < 2e-3 and worst["dKV"] < 1e-5


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("output", [0, 1])
def test_one_percent_in_one_row_of_an_indexer_gradient_is_seen(output: int, factor: float) -> None:
    case = IndexerTrainingCase(SparseMlaCase("few rows", 4, 60, 4, 32), index_heads=8)
    for seed in range(5):
        inputs = make_indexer_training_inputs(case, seed)
        assert failures(check_index_backward(inputs, "cpu")) == []
        ref = reference.indexer_bwd(*inputs.operands, inputs.grad_scores)
        found = [ref.dq_index.bfloat16(), ref.dk_index.float(), ref.d_weights.float()]
        row = seed % 4 if output == 0 else int(inputs.indices[0, seed])
        found[output] = planted(found[output], (row,), factor)
        for backend in ("cpu", "sm90"):
            verdict = judge_index_backward(inputs, tuple(found), backend)[output]
            assert not verdict.passed and verdict.bias_error > 5e-3


def judged(out: Tensor, ref: Tensor, magnitude: Tensor, **options: object) -> Comparison:
    verdict = compare("x", out, ref, norm_tolerance=None, magnitude=magnitude)
    return judge_bias(verdict, out, ref, magnitude, **options)  # type: ignore[arg-type]


def test_an_error_across_the_row_is_not_its_length_s() -> None:
    ref = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    size = ref.abs()
    across = ref + torch.tensor([[0.0, 0.009], [0.0, 0.0]])
    assert judged(across, ref, size).passed and judged(across, ref, size).bias_error == 0
    longer = ref * torch.tensor([[1.0], [1.006]])
    verdict = judged(longer, ref, size)
    assert (
        not verdict.passed
        and verdict.worst_row == (1,)
        and "(1,) is 6.000e-03 too long" in (verdict.message)
    )
    assert verdict.headline == (verdict.bias_error, 5e-3)
    assert "too short" in judged(ref * 0.99, ref, size).message
    assert judged(ref * 1.004, ref, size).passed


def test_a_row_that_cancels_is_left_to_the_row_rule() -> None:
    ref = torch.full((2, 4), 1e-3, dtype=torch.float64)
    assert not judged(ref * 1.006, ref, 99 * ref).passed
    assert judged(ref * 1.006, ref, 101 * ref).passed


def test_what_rounding_may_do_along_a_row_is_allowed() -> None:
    ref = torch.ones(2, 4, dtype=torch.float64)
    rounding = torch.tensor([0.0, 0.02])  # of a row of length 2: 1e-2
    for row, passes in ((0, False), (1, True)):
        out = planted(ref, (row,), 1.009)
        assert judged(out, ref, ref, rounding=rounding).passed == passes
    assert not judged(planted(ref, (1,), 1.011), ref, ref, rounding=rounding).passed


def test_a_nan_limit_a_wrong_shape_and_no_row() -> None:
    ref = torch.ones(2, 4, dtype=torch.float64)
    assert not judged(ref * 1.001, ref, ref, limit=float("nan")).passed
    assert not judged(ref[:1], ref, ref).passed
    stray = judged(planted(ref, (1,), float("nan")), ref, ref)
    assert not stray.passed and "too" not in stray.message
    empty = torch.zeros(0, 4, dtype=torch.float64)
    assert judged(empty, empty, empty, row_ndims=(1, 2)).passed


def test_the_parts_along_a_row_of_dkv_are_those_of_its_terms() -> None:
    case = SparseMlaCase("small", 2, 6, 3, 8, d_qk=5, d_v=4, duplicates=True)
    inputs = make_sparse_mla_inputs(case, 0)
    O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=4)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    _, dKV, _ = reference.mla_bwd(*operands, sm_scale=0.4)
    total, spread = reference.MlaBackward(*operands, sm_scale=0.4).dkv_along(dKV)
    sums, squares = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    unit = dKV / dKV.norm(dim=1).clamp_min(1e-30)[:, None]
    for s in range(2):
        slots = inputs.indices[s].tolist()
        for row in sorted(set(slots)):
            for head in range(3):
                q, key = inputs.q[s, head].double(), inputs.kv[row].double()
                do = inputs.do[s, head].double()
                p = torch.exp(0.4 * (q @ key) - lse[s, head]) * slots.count(row)
                ds = p * (do @ key[:4] - O[s, head] @ do) * 0.4
                for part in (ds * (q @ unit[row]), p * (do @ unit[row, :4])):
                    sums[row] += part.abs()
                    squares[row] += part.square()
    torch.testing.assert_close(total, sums)
    torch.testing.assert_close(spread, squares.sqrt())
    assert (total >= dKV.norm(dim=1) * (1 - 1e-12)).all()


def test_fp16_is_judged_to_its_smallest_numbers() -> None:
    """1e8 of its smallest normal number is 6,100: nothing of fp16 would be judged."""
    ref = torch.ones(2, 4, dtype=torch.float64)
    assert not compare("x", (ref * 1.02).half(), ref, norm_tolerance=3e-4).passed
    tiny = torch.full((2, 4), 2.0**-25, dtype=torch.float64)
    assert compare("x", torch.zeros(2, 4).half(), tiny, norm_tolerance=3e-4).passed


CANCELS = SparseMlaCase("logits near -1e4", 2, 60, 128, 48, logit_shift=-1e4)
FEW = next(case for case in SPARSE_MLA_CASES if case.name == "topk_length")
PLAIN = SparseMlaCase("plain", 2, 60, 128, 48)


def scores(inputs: SparseMlaInputs, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys named by query s, and its P and dS `[H, keys]`."""
    O, lse = (x[s].double() for x in forward_results(inputs))
    named = reference.valid_slots(inputs.indices, inputs.num_keys, inputs.topk_length)[s]
    keys, q, do = inputs.kv[named].double(), inputs.q[s].double(), inputs.do[s].double()
    p = torch.exp(q @ keys.T * 576**-0.5 - lse[:, None])
    dp = do @ keys[:, :512].T
    return named, p, p * (dp - (O * do).sum(-1, keepdim=True)) * 576**-0.5


def rounded_dkv(inputs: SparseMlaInputs) -> Tensor:
    """dKV of bf16 P and dS, everything else in float64."""
    dkv = torch.zeros(inputs.kv.shape, dtype=torch.float64)
    for s in range(inputs.case.num_queries):
        named, *both = scores(inputs, s)
        p, ds = (x.bfloat16().double() for x in both)
        dkv.index_add_(0, named, ds.T @ inputs.q[s].double())
        dkv[:, :512].index_add_(0, named, p.T @ inputs.do[s].double())
    return dkv.float()


def judged_dkv(inputs: SparseMlaInputs, dkv: Tensor, bf16_operands: bool) -> Comparison:
    """The verdict on dKV."""
    O, lse = forward_results(inputs)
    return judge_backward(inputs, O, lse, {"dKV": dkv}, bf16_operands=bf16_operands)[0]


@pytest.mark.parametrize("seed", range(4))
def test_rounding_alone_breaks_the_row_rule_where_rows_cancel(seed: int) -> None:
    inputs = make_sparse_mla_inputs(CANCELS, seed)
    dkv = rounded_dkv(inputs)
    by_contract, by_rounding = (judged_dkv(inputs, dkv, False), judged_dkv(inputs, dkv, True))
    assert not by_contract.passed and by_contract.row_error > 1e-2
    assert by_rounding.passed, by_rounding.message


def test_on_plain_data_it_is_well_within_the_contract() -> None:
    inputs = make_sparse_mla_inputs(PLAIN, 0)
    verdict = judged_dkv(inputs, rounded_dkv(inputs), False)
    assert verdict.passed and verdict.row_error < 5e-3 and verdict.norm_error < 2.5e-3


@pytest.mark.parametrize("case", [CANCELS, PLAIN], ids=lambda case: case.name)
def test_one_lost_head_of_one_slot_is_seen_all_the_same(case: SparseMlaCase) -> None:
    inputs = make_sparse_mla_inputs(case, 0)
    dkv = rounded_dkv(inputs)
    named, p, ds = scores(inputs, 0)
    sizes = (ds[:, 0] ** 2 * (inputs.q[0].double() ** 2).sum(-1)) + (
        p[:, 0] ** 2 * (inputs.do[0].double() ** 2).sum(-1)
    )
    head = int(sizes.argsort()[3 * len(sizes) // 4])  # not of the smallest, nor of the largest
    dkv[named[0]] -= (ds[head, 0] * inputs.q[0, head].double()).float()
    dkv[named[0], :512] -= (p[head, 0] * inputs.do[0, head].double()).float()
    verdict = judged_dkv(inputs, dkv, True)
    assert not verdict.passed and verdict.worst_row == (int(named[0]),)


def test_the_spread_is_the_root_of_the_sum_of_squares() -> None:
    inputs = make_sparse_mla_inputs(
        SparseMlaCase("small", 2, 6, 3, 6, d_qk=5, d_v=4, duplicates=True), 0
    )
    O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=4)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    spread = reference.MlaBackward(*operands, sm_scale=0.4).dkv_spread()
    wanted = torch.zeros(6, dtype=torch.float64)
    for s in range(2):
        for row in inputs.indices[s].tolist():
            for head in range(3):
                q, key = inputs.q[s, head].double(), inputs.kv[row].double()
                do = inputs.do[s, head].double()
                p = torch.exp(0.4 * (q @ key) - lse[s, head])
                ds = p * (do @ key[:4] - O[s, head] @ do) * 0.4
                wanted[row] += (ds * q).square().sum() + (p * do).square().sum()
    torch.testing.assert_close(spread, wanted.sqrt())


def test_dkv_in_bf16_has_its_own_rounding_on_top() -> None:
    """A row that cancels, so and so far off, in units of what fp32 may be."""
    inputs = make_sparse_mla_inputs(CANCELS, 0)
    O, lse = forward_results(inputs)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    _, dkv, _ = reference.mla_bwd(*operands)
    spread = reference.MlaBackward(*operands).dkv_spread()
    row = int((spread / dkv.norm(dim=1) - 2).abs().nan_to_num(9.0).argmin())
    allowed = BF16_ROUNDING * float(spread[row] / dkv[row].norm())
    passed = set()
    for far in (0.9, 1.1, 2.0):
        moved = dkv.clone()
        moved[row] *= 1 - far * allowed
        for name, dtype in (("dKV", torch.float32), ("dKV:bf16", torch.bfloat16)):
            (verdict,) = judge_backward(inputs, O, lse, {name: moved.to(dtype)}, bf16_operands=True)
            passed |= {(name, far)} if verdict.passed else set()
    assert passed == {("dKV", 0.9), ("dKV:bf16", 0.9), ("dKV:bf16", 1.1)}


def rounded_dq(inputs: SparseMlaInputs, bits: int = 8) -> Tensor:
    """bf16 dQ of dS with so many significant bits, everything else in float64."""
    dq = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for s in range(inputs.case.num_queries):
        named, _, ds = scores(inputs, s)
        significand, exponent = torch.frexp(ds)
        ds = torch.ldexp((significand * 2**bits).round() / 2**bits, exponent)
        dq[s] = ds @ inputs.kv[named].double()
    return dq.bfloat16()


def test_where_few_ds_make_up_dq_rounding_alone_is_beyond_its_norm() -> None:
    """And no worse a dS has room in what such a kernel is allowed there."""
    inputs = make_sparse_mla_inputs(FEW, 0)
    O, lse = forward_results(inputs)
    verdicts = {
        (bits, in_bf16): judge_backward(
            inputs, O, lse, {"dQ": rounded_dq(inputs, bits)}, bf16_operands=in_bf16
        )[0]
        for bits in (7, 8)
        for in_bf16 in (False, True)
    }
    assert 2.5e-3 < verdicts[8, False].norm_error < 2.8e-3
    passed = {key for key, verdict in verdicts.items() if verdict.passed}
    assert passed == {(8, True)}, verdicts


def test_where_many_ds_make_up_dq_its_limit_is_the_norm_s() -> None:
    inputs = make_sparse_mla_inputs(PLAIN, 0)
    O, lse = forward_results(inputs)
    (verdict,) = judge_backward(inputs, O, lse, {"dQ": rounded_dq(inputs)}, bf16_operands=True)
    assert verdict.passed and verdict.norm_limit == 2.5e-3


def test_what_rounding_does_to_dq_on_average_and_by_chance() -> None:
    """Against errors drawn many times; a key that is named twice has one error."""
    case = SparseMlaCase("small", 1, 6, 2, 8, d_qk=5, d_v=4, duplicates=True)
    inputs = make_sparse_mla_inputs(case, 1)
    O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=4)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    mean, deviation = reference.MlaBackward(*operands, sm_scale=0.4).dq_rounding()
    named, q, do = inputs.indices[0].long(), inputs.q[0].double(), inputs.do[0].double()
    keys = inputs.kv.double()
    p = torch.exp(0.4 * (q @ keys.T) - lse[0][:, None])
    ds = p * (do @ keys[:, :4].T - (O[0] * do).sum(-1, keepdim=True)) * 0.4
    ds *= torch.bincount(named, minlength=6)
    draws = torch.randn(20_000, *ds.shape, generator=torch.Generator().manual_seed(0)).double()
    squares = ((draws * ds) @ keys).square().sum(dim=(1, 2))
    assert abs(float(squares.mean()) / mean - 1) < 0.05
    assert abs(float(squares.std()) / deviation - 1) < 0.05
