"""Numbers that are too large: an error that names the argument, before anything is allocated."""

from __future__ import annotations

from inspect import signature
from itertools import product

import pytest
import torch

import flashdsa
from flashdsa.errors import ArgumentValueError
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

COUNTS = {
    "block", "index_block", "ratio", "d_v", "max_len", "topk", "num_queries", "table_page_size",
}  # fmt: skip
EACH = [
    (name, argument)
    for name, call in public_calls("cpu").items()
    if not name.startswith("bind, ")
    for argument in signature(call.function).parameters
]


def refused(name: str, argument: str, value: int, message: str) -> None:
    call = public_calls("cpu")[name]
    with pytest.raises(ArgumentValueError, match=f"^{argument}: {message}; got"):
        call.function(**{**call.arguments, argument: value})


@pytest.mark.parametrize("bits", [31, 40, 62, 70, 1329, 16610])
def test_counts(bits: int, subtests: CaseLoop) -> None:
    tried = set()
    for name, argument in EACH:
        if argument in COUNTS:
            tried.add(argument)
            with subtests.test(f"{name}, {argument}"):
                refused(name, argument, 2**bits, "expected at most 2147483647")
    assert tried == COUNTS


@pytest.mark.parametrize("bits", [1329, 16610])
def test_numbers(bits: int, subtests: CaseLoop) -> None:
    for (name, argument), sign in product(EACH, (1, -1)):
        if argument in ("sm_scale", "eps"):
            with subtests.test(f"{name}, {argument}"):
                refused(name, argument, sign * 2**bits, "expected a finite number")


def test_a_result_is_checked_before_a_buffer_beside_it_is_made() -> None:
    q, kv, ids = torch.zeros(3, 2, 16), torch.zeros(9, 16), torch.zeros(3, 4).int()
    with pytest.raises(ArgumentValueError, match="d_v: expected at most q's last dimension, 16"):
        flashdsa.sparse_mla_fwd(q, kv, ids, d_v=2**31 - 1, lse=torch.zeros(3, 2))


def test_ids_of_blocks_do_not_wrap_around() -> None:
    """Cut to 64 bits, 2**62 * 4 would be row 0."""
    ids, positions = torch.tensor([[2**62, 2**63 - 1, 1, -(2**63)]]), torch.tensor([2**63 - 1])
    rows = flashdsa.expand_blocks(ids, 4, positions=positions)[0].tolist()
    assert rows[8:16] == [4, 5, 6, 7, -1, -1, -1, -1]
    assert all(not 0 <= row < 2**31 - 1 for row in rows[:8] + rows[16:])


@pytest.mark.parametrize("index_block", [4, 2**31 - 1])
def test_targets_of_blocks(index_block: int, seed: int) -> None:
    """Lengths beyond a list count as all of it, in any dtype; a block ends with kv's last row."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, kv, ids = normal(3, 2, 16), normal(34, 16), torch.tensor([[0, 8, 1]] * 3)
    whole = {"sm_scale": 0.25, "index_block": index_block}
    _, lse = flashdsa.sparse_mla_fwd(q, kv, ids, d_v=8, **whole)
    target = flashdsa.attention_target(q, kv, lse, ids, **whole)
    torch.testing.assert_close(target.sum(1), torch.full((3,), 2.0, dtype=torch.float64))
    index = normal(3, 4, 128), normal(9, 128), normal(3, 4)
    loss = flashdsa.indexer_kl_loss(*index, ids, q=q, kv=kv, lse=lse, **whole)
    assert (loss > 0).all() or index_block > 34  # one block, 0 of the three
    for length, dtype in product((3, 2**29, 2**31 - 1, 2**63 - 1), (torch.int32, torch.int64)):
        if length > torch.iinfo(dtype).max:
            continue
        given = {**whole, "topk_length": torch.full((3,), length, dtype=dtype)}
        assert torch.equal(flashdsa.attention_target(q, kv, lse, ids, **given), target)
        got = flashdsa.indexer_kl_loss(*index, ids, q=q, kv=kv, lse=lse, **given)
        assert torch.equal(got, loss)


BEYOND_INT32 = [2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31) - 1, -(2**32) + 2, -(2**63)]


def test_int64_gives_what_int32_gives() -> None:
    x = inputs.attention(torch.float32)
    q, kv = x.q.requires_grad_(), x.kv.requires_grad_()
    results = []
    for dtype in (torch.int32, torch.int64):
        indices, length = x.indices.to(dtype)[:, None], x.topk_length.to(dtype)
        out, lse = flashdsa.sparse_mla_fwd(q, kv, indices, d_v=x.d_v, topk_length=length)
        by_autograd = torch.autograd.grad(out.sum(), (q, kv))
        dO = torch.ones_like(out)
        dq, dkv = flashdsa.mla_bwd(q, kv, dO, lse, out, indices, topk_length=length)
        results.append([out, lse, *by_autograd, dq, dkv])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_values_that_int32_does_not_hold_are_invalid() -> None:
    """Cut to 32 bits, 2**32 + 1 would name row 1."""
    x = inputs.attention(torch.float32, num_queries=1)
    wanted = torch.tensor([[1, 2]])
    outside = torch.tensor([[1, *BEYOND_INT32, 2]])
    expected = flashdsa.sparse_mla(x.q, x.kv, wanted, d_v=x.d_v)
    got = flashdsa.sparse_mla(x.q, x.kv, outside, d_v=x.d_v)
    torch.testing.assert_close(got, expected)


def test_lengths_beyond_int32_are_clamped() -> None:
    x = inputs.attention(torch.float32, num_queries=3)
    indices = torch.tensor([[1, 2]] * 3)
    length = torch.tensor([2**32, -(2**32) + 1, 1])
    got = flashdsa.sparse_mla(x.q, x.kv, indices, d_v=x.d_v, topk_length=length)
    clamped = torch.tensor([2, 0, 1], dtype=torch.int32)
    expected = flashdsa.sparse_mla(x.q, x.kv, indices, d_v=x.d_v, topk_length=clamped)
    assert torch.equal(got, expected)
    assert not got[1].any()
