"""What a kernel with P and dS in bf16 cannot keep: the row rule where a dKV row cancels, and dQ's
norm where few dS make it up; and what it can.

The rule (`||row error||` at most 1e-2 of the row, or 1e-4 of what was summed) is the contract's.
The model here is the reference, in float64, but for one rounding to bf16 of each P and dS.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.verify.compare import Comparison
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from flashdsa.verify.tolerances import BF16_ROUNDING
from tests.support.cases import SPARSE_MLA_CASES

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


def judged(inputs: SparseMlaInputs, dkv: Tensor, bf16_operands: bool) -> Comparison:
    """The verdict on dKV."""
    O, lse = forward_results(inputs)
    return judge_backward(inputs, O, lse, {"dKV": dkv}, bf16_operands=bf16_operands)[0]


@pytest.mark.parametrize("seed", range(4))
def test_rounding_alone_breaks_the_row_rule_where_rows_cancel(seed: int) -> None:
    inputs = make_sparse_mla_inputs(CANCELS, seed)
    dkv = rounded_dkv(inputs)
    by_contract, by_rounding = judged(inputs, dkv, False), judged(inputs, dkv, True)
    assert not by_contract.passed and by_contract.row_error > 1e-2
    assert by_rounding.passed, by_rounding.message


def test_on_plain_data_it_is_well_within_the_contract() -> None:
    inputs = make_sparse_mla_inputs(PLAIN, 0)
    verdict = judged(inputs, rounded_dkv(inputs), False)
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
    verdict = judged(inputs, dkv, True)
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
