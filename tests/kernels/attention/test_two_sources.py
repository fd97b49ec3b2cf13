"""Two sources in one softmax, ranges and blocks of rows: worked examples, merged parts, forms."""

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

F64 = {"dtype": torch.float64}
LN2, LN3, LN4 = (math.log(n) for n in (2, 3, 4))


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_two_rows_of_a_window_a_selected_one_and_a_sink():
    """Weights of 10: 1 and 2 of the window, 3 of the selected row, 4 of the sink."""
    q, d_o = torch.tensor([[[1.0, 0.0]]], **F64), torch.tensor([[[0.0, 1.0]]], **F64)
    selected = torch.tensor([[LN3, 2.0]], **F64)
    window = torch.tensor([[0.0, 1.0], [LN2, 0.0]], **F64)
    sink = torch.tensor([LN4], **F64)
    expected = {
        "O": torch.tensor([[[(2 * LN2 + 3 * LN3) / 10, 0.7]]], **F64),
        "lse": torch.tensor([[math.log(6)]], **F64),
        "dQ": torch.tensor([[[-0.14 * LN2 + 0.39 * LN3, 0.81]]], **F64),
        "selected": torch.tensor([[0.39, 0.3]], **F64),
        "window": torch.tensor([[0.03, 0.1], [-0.14, 0.2]], **F64),
        "d_sink": torch.tensor([-0.28], **F64),
    }
    options = {"sm_scale": 1.0, "attn_sink": sink}
    lists = {"extra_kv": window, "extra_indices": (ids(0), ids(2))}

    O, lse = flashdsa.sparse_mla_fwd(q, selected, ids([0]), d_v=2, **options, **lists)
    gradients = flashdsa.mla_bwd(q, selected, d_o, lse, O, ids([0]), **options, **lists)
    for got, want in zip((O, lse, *gradients), expected.values(), strict=True):
        torch.testing.assert_close(got, want)

    rows, joined = reference.join_sources(selected, ids([0]), **lists)
    assert joined.tolist() == [[0, 1, 2]]
    O, lse = reference.sparse_mla_fwd(q, rows, joined, d_v=2, **options)
    dQ, dKV, d_sink = reference.mla_bwd(q, rows, d_o, lse, O, joined, **options)
    for got, want in zip((O, lse, dQ, dKV[:1], dKV[1:], d_sink), expected.values(), strict=True):
        torch.testing.assert_close(got, want)


def named_rows(num_rows, num_queries, indices, **lists):
    """How often each query names each row of kv, and of extra_kv: O of logits that are all 0."""
    kv = torch.eye(num_rows, **F64)
    q = torch.zeros(num_queries, 1, num_rows, **F64)
    if "extra_indices" in lists:
        lists["extra_kv"] = kv
    O, lse = flashdsa.sparse_mla_fwd(q, kv, indices, d_v=num_rows, **lists)
    times = (O * lse.exp().masked_fill(lse == math.inf, 0)[..., None])[:, 0]
    return [[row for row, n in enumerate(one) for _ in range(round(n))] for one in times.tolist()]


def test_pools_of_four_and_the_incomplete_one():
    p = torch.tensor([5, 3, 2])
    pools = ids([0, -1], [0, -1], [-1, -1])
    tail = (p + 1) // 4 * 4, p + 1
    seen = named_rows(7, 3, pools, index_block=4, extra_indices=tail)
    assert seen == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1, 2]]


def test_a_row_that_both_lists_name_counts_twice():
    both = named_rows(6, 1, ids([4, 1, 4]), extra_indices=(ids(3), ids(5)))
    assert both == [[1, 3, 4, 4, 4]]


def test_values_that_int32_does_not_hold_bound_a_range():
    starts, ends = torch.tensor([-(2**40), 3, 2**40]), torch.tensor([2, 2**40, 2**41])
    assert named_rows(5, 3, (starts, ends)) == [[0, 1], [3, 4], []]
    assert named_rows(5, 3, (starts.clamp(-9, 9).int(), ends)) == [[0, 1], [3, 4], []]


def leaves(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, **F64).requires_grad_() for shape in shapes]


LISTS = {
    "ids": {
        "indices": ids([0, 6, -1], [2, 2, 9], [-1, -1, -1]),
        "extra_indices": ids(*[[4, 1]] * 3),
    },
    "ranges": {
        "indices": (ids(-1, 3, 5), ids(2, 9, 5)),
        "extra_indices": (ids(0, 2, 7), ids(0, 5, 2)),
    },
    "blocks": {
        "indices": ids([1, 9], [3, 0], [-1, -1]),
        "index_block": 2,
        "extra_indices": (ids(0, 2, 7), ids(0, 5, 2)),
        "topk_length": ids(2, 1, 2),
    },
}


@pytest.mark.parametrize("name", LISTS)
def test_gradients_are_finite_differences(name, seed):
    q, kv, extra_kv, sink = leaves(seed, (3, 2, 5), (7, 5), (5, 5), (2,))

    def attention(q, kv, extra_kv, sink):
        options = {"d_v": 4, "attn_sink": sink, "extra_kv": extra_kv, **LISTS[name]}
        return flashdsa.sparse_mla(q, kv, **options)

    assert torch.autograd.gradcheck(attention, (q, kv, extra_kv, sink))


def test_a_tensor_that_is_both_sources_gets_both_gradients(seed):
    q, kv, d_o = leaves(seed, (3, 2, 5), (7, 5), (3, 2, 4))
    options = {"d_v": 4, **LISTS["blocks"]}
    of_both = torch.autograd.grad(flashdsa.sparse_mla(q, kv, extra_kv=kv, **options), kv, d_o)
    copy = kv.detach().clone().requires_grad_()
    apart = flashdsa.sparse_mla(q, kv, extra_kv=copy, **options)
    of_each = torch.autograd.grad(apart, (kv, copy), d_o)
    assert all(x.any() for x in of_each)
    torch.testing.assert_close(of_both[0], of_each[0] + of_each[1])


def backward_of(seed):
    """`mla_bwd` of two sources and a sink; the gradients without buffers."""
    q, kv, extra_kv, sink = (x.detach() for x in leaves(seed, (3, 2, 5), (7, 5), (5, 5), (2,)))
    options = {"attn_sink": sink, "extra_kv": extra_kv, **LISTS["ids"]}
    O, lse = flashdsa.sparse_mla_fwd(q, kv, d_v=4, **options)

    def backward(**buffers):
        return flashdsa.mla_bwd(q, kv, O.sin(), lse, O, **options, **buffers)

    return backward, backward()


def test_gradients_of_layers_add_up_in_the_buffers_that_they_are_given(seed):
    backward, (dq, dkv, dextra_kv, d_sink) = backward_of(seed)
    of_kv, of_extra = torch.ones_like(dkv), torch.zeros_like(dextra_kv)
    for layer in (1, 2):
        got = backward(dkv=of_kv, extra_dkv=of_extra)
        assert got[1] is of_kv and got[2] is of_extra
        torch.testing.assert_close(got, (dq, 1 + layer * dkv, layer * dextra_kv, d_sink))
    got = backward(extra_dkv=of_extra)
    torch.testing.assert_close(got, (dq, dkv, 3 * dextra_kv, d_sink))


@pytest.mark.parametrize("shape", [(128, 1, 5), (2, 64, 5), (4, 32, 1, 5)])
def test_a_second_source_may_have_pages_of_its_own(shape, seed):
    q, kv, extra_kv = leaves(seed, (3, 2, 5), (7, 5), (128, 5))
    options = {"d_v": 4, **LISTS["ids"]}
    expected = flashdsa.sparse_mla_fwd(q.detach(), kv.detach(), extra_kv=extra_kv, **options)
    pages = extra_kv.detach().view(shape)
    got = flashdsa.sparse_mla_fwd(q.detach(), kv.detach(), extra_kv=pages, **options)
    assert torch.equal(got[0], expected[0])
    results = flashdsa.mla_bwd(
        q.detach(), kv.detach(), got[0], got[1], got[0], extra_kv=pages, **LISTS["ids"]
    )
    assert results[2].shape == shape


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
