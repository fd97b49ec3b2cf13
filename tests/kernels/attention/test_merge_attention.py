"""merge_attention: results over parts of the keys give those over all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.errors import UnsupportedError
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs


def parts(inputs: Any, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """O and lse over each of `count` stretches of the slots."""
    results = [
        flashdsa.sparse_mla_fwd(
            inputs.q, inputs.kv, slots.contiguous(), d_v=inputs.case.d_v, backend="cpu"
        )
        for slots in inputs.indices.tensor_split(count, dim=1)
    ]
    outs, lses = zip(*results, strict=True)
    return list(outs), list(lses)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_parts_give_the_whole(count: int, dtype: torch.dtype, limit: float) -> None:
    case = SparseMlaCase("parts", 5, 60, 4, 21, d_qk=24, d_v=16, dtype=dtype, empty_rows=True,
                         invalid=True, logit_scale=50.0)  # fmt: skip
    inputs = make_sparse_mla_inputs(case, 0)
    O, lse = flashdsa.merge_attention(*parts(inputs, count))
    ref_O, ref_lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=16)
    assert O.dtype == lse.dtype == dtype
    torch.testing.assert_close(O.double(), ref_O, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=limit, atol=limit)


def test_an_empty_part_weighs_nothing_whatever_its_o_holds() -> None:
    full, lse = torch.randn(3, 2, 8), torch.randn(3, 2) * 1e4
    empty, no_key = torch.full_like(full, torch.nan), torch.full_like(lse, math.inf)
    merged, merged_lse = flashdsa.merge_attention([empty, full, empty], [no_key, lse, no_key])
    assert torch.equal(merged, full) and torch.equal(merged_lse, lse)
    merged, merged_lse = flashdsa.merge_attention([empty, empty], [no_key, no_key])
    assert not merged.any() and (merged_lse == math.inf).all()


def test_a_gradient_is_refused_and_never_a_part_of_one() -> None:
    """The weights' share of it would be missing: lse has no gradient."""
    q = torch.randn(2, 2, 24, requires_grad=True)
    kv, slots = torch.randn(8, 24), torch.arange(8, dtype=torch.int32).expand(2, 8)
    halves = [
        flashdsa.sparse_mla_fwd(q, kv, half.contiguous(), d_v=16) for half in slots.split(4, dim=1)
    ]
    outs, lses = zip(*halves, strict=True)
    message = r"merge_attention: no gradient .* torch.no_grad\(\)"
    with pytest.raises(UnsupportedError, match=message):
        flashdsa.merge_attention(outs, lses)
    plain = [out.detach() for out in outs]
    with pytest.raises(UnsupportedError, match=message):
        flashdsa.merge_attention(plain, [lse.clone().requires_grad_() for lse in lses])
    with pytest.raises(UnsupportedError, match=message):
        torch.func.grad(lambda out: flashdsa.merge_attention([out, plain[1]], lses)[0].sum())(
            plain[0]
        )
    with torch.no_grad():
        merged, _ = flashdsa.merge_attention(outs, lses)
    assert torch.equal(merged, flashdsa.merge_attention(plain, lses)[0])


def test_stacked_parts_and_bf16() -> None:
    outs, lses = torch.randn(4, 3, 2, 8).bfloat16(), torch.randn(4, 3, 2)
    O, lse = flashdsa.merge_attention(outs, lses)
    expected = (outs.double() * lses.double().softmax(0)[..., None]).sum(0)
    assert O.dtype == torch.bfloat16
    torch.testing.assert_close(O.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse, lses.logsumexp(0))


def test_a_part_s_nan_is_not_hidden() -> None:
    outs, lses = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    outs[1, 0, 0] = lses[1, 0, 0] = torch.nan
    O, lse = flashdsa.merge_attention(outs, lses)
    assert O[0, 0].isnan().all() and lse[0, 0].isnan()
    assert O[1:].isfinite().all() and lse[1:].isfinite().all()


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, "at least 1; got 0 and 0"),
        ([torch.zeros(3, 2, 8)], [], ValueError, "as many parts as outs has.*; got 0 and 1"),
        ([torch.zeros(3, 2, 8)], [torch.zeros(3, 1)], ValueError, r"lses: .*\[3, 2\]; got"),
        ([torch.zeros(3, 2, 8)], [torch.zeros(3, 2).half()], TypeError, "lses: expected dtype"),
        (
            [torch.zeros(3, 2, 8), torch.zeros(3, 2, 9)],
            [torch.zeros(3, 2)] * 2,
            ValueError,
            r"outs: expected shape of the first part = \[3, 2, 8\]; got",
        ),
        ([torch.zeros(3, 2, 8), 1], [torch.zeros(3, 2)] * 2, TypeError, "outs: expected a torch"),
        (None, torch.zeros(1, 3, 2), TypeError, "outs: expected a tensor, or a sequence"),
    ],
)
def test_what_is_refused(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flashdsa.merge_attention(outs, lses)
