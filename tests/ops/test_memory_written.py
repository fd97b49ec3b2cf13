"""What is written overlaps neither itself nor an input; the error names it before it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.dispatch.overlap import overlaps_itself, share_memory
from flashdsa.errors import UnsupportedError
from flashdsa.ops import OPERATIONS
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import Call, public_calls

pytestmark = pytest.mark.usefixtures("new_calls")

WRITTEN = {
    name: call.written
    for name, call in public_calls("cpu").items()
    if call.written and name != "dsa_topk_indexer, sorted"
}
"""Arguments that calls write; of the indexer's calls the one that checks, once."""
EACH = [(name, written) for name, names in WRITTEN.items() for written in names]


def test_every_operand_that_a_table_says_is_written_is_tried() -> None:
    tried = {written for names in WRITTEN.values() for written in names}
    tables = {
        operand.name for spec in OPERATIONS.values() for operand in spec.operands if operand.written
    }
    assert tables - tried == {"max_logits"}  # without a name in the public function


def expanded(tensor: Tensor) -> Tensor:
    """Of the same shape, every row the same memory."""
    return tensor[:1].clone().expand(tensor.shape)


def windows(tensor: Tensor) -> Tensor:
    """Of the same shape, rows that begin an element behind each other; as bytes, four."""
    step = 4 if tensor.dtype == torch.uint8 else 1
    strides = (step, *tensor.stride()[1:])
    return torch.zeros(2 * tensor.numel(), dtype=tensor.dtype).as_strided(tensor.shape, strides)


def bits(tensor: Tensor) -> Tensor:
    """Of each element, NaN's too."""
    return tensor.contiguous().resolve_neg().view(torch.uint8)


def refused(call: Call, match: str, **changed: Any) -> None:
    """An error that matches; nothing was written."""
    arguments = {**call.arguments, **changed}
    before = {n: bits(x).clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match=match):
        call.function(**arguments)
    for name, values in before.items():
        assert torch.equal(bits(arguments[name]), values), name


def test_a_tensor_that_overlaps_itself_is_not_written(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    for (name, written), overlapping in product(EACH, [expanded, windows]):
        new_calls()
        with subtests.test(f"{name}, {written}, {overlapping.__name__}"):
            call = public_calls("cpu")[name]
            wrong = overlapping(call.arguments[written])
            refused(call, rf"{written}: expected .*strides", **{written: wrong})


def test_a_tensor_that_shares_memory_with_an_input_is_not_written(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    """Every input is tried; also where a call of the same sizes and strides was served before."""
    for (name, written), again in product(EACH, [False, True]):
        new_calls()
        with subtests.test(f"{name}, {written}, {again=}"):
            share_with_each_input(public_calls("cpu")[name], WRITTEN[name], written, again=again)


def share_with_each_input(call: Call, names: tuple[str, ...], written: str, *, again: bool) -> None:
    """Move `written` over the end of every other tensor; the call is refused."""
    held: Tensor = call.arguments[written]
    for other in call.tensors:
        if other == written:
            continue
        wanted: Tensor = call.arguments[other]
        if again:
            call()
            call()
        room = torch.zeros(held.nbytes + wanted.nbytes, dtype=torch.uint8)
        moved = room[: held.nbytes].view(held.dtype).view(held.shape)
        begin = max(0, held.nbytes - 64) // 64 * 64  # its last bytes, aligned
        shared = room[begin : begin + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
        shared.copy_(wanted)
        first = "|".join((written, other) if other in names else (written,))
        refused(call, rf"({first}): .*shares memory with", **{written: moved, other: shared})


def test_a_tensor_that_asks_for_a_gradient_is_not_written(subtests: CaseLoop) -> None:
    """The call that is like one before but for this, too; under no_grad it is served."""
    for name, written in EACH:
        call = public_calls("cpu")[name]
        held: Tensor = call.arguments[written]
        if not held.is_floating_point() or call.function.__name__ == "call":  # a bound one
            continue
        with subtests.test(f"{name}, {written}"):
            for _ in range(2):
                with pytest.raises(NotImplementedError, match=f"^{written}: .* has no gradient"):
                    call.function(**{**call.arguments, written: held.clone().requires_grad_()})
                call()
            with torch.no_grad():
                call.function(**{**call.arguments, written: held.clone().requires_grad_()})


def test_a_tensor_that_is_stored_negated_is_not_written(subtests: CaseLoop) -> None:
    for name, written in EACH:
        call = public_calls("cpu")[name]
        held: Tensor = call.arguments[written]
        if held.is_floating_point():
            with subtests.test(f"{name}, {written}"):
                refused(call, f"^{written}: .*negates", **{written: torch._neg_view(held.clone())})


@pytest.mark.parametrize(
    ("is_view", "backend"),
    [(False, "cpu"), (True, "cpu"), pytest.param(False, "emulate-sm90", marks=pytest.mark.slow)],
)
def test_one_tensor_gets_the_sum_of_both_gradients(is_view: bool, backend: str) -> None:
    """Where both sources are one, or the second one is rows of the first."""
    call = public_calls("cpu")["mla_bwd, two sources"]
    rows = slice(32 if is_view else None, None)
    kv: Tensor = call.arguments["kv"]
    given = {**call.arguments, "extra_kv": kv[rows], "extra_dkv": None, "deterministic": True}
    given["backend"] = backend
    _, dkv, extra_dkv, _ = call.function(**given)
    total = torch.zeros_like(dkv)
    got = call.function(**{**given, "dkv": total, "extra_dkv": total[rows]})
    expected = dkv.clone()
    expected[rows] += extra_dkv
    assert got[1] is total and torch.equal(total, expected)


def test_vmap_writes_to_no_tensor_without_its_dimension(subtests: CaseLoop) -> None:
    """Nor to one of an outer vmap's batch alone."""
    for name, written in EACH:
        if name.startswith("bind"):
            continue
        call = public_calls("cpu")[name]
        other = next(n for n in call.tensors if call.arguments[n].is_floating_point())
        value: Tensor = torch.stack([call.arguments[other]] * 2)
        target: Tensor = torch.stack([call.arguments[written]] * 2)
        before, names = bits(target).clone(), "|".join(WRITTEN[name])
        inner = torch.vmap(partial(_result, call, other, written), (0, None))
        wrong = {"alone": inner, "nested": torch.vmap(inner, (None, 0))}
        for kind, function in wrong.items():
            with subtests.test(f"{name}, {written}, {kind}"):
                with pytest.raises(UnsupportedError, match=f"^({names}): .* under vmap"):
                    function(value, target if kind == "nested" else target[0])
                assert torch.equal(bits(target), before)


def _result(call: Call, other: str, written: str, value: Tensor, target: Tensor) -> Tensor:
    """What a call writes to."""
    call.function(**{**call.arguments, other: value, written: target})
    return target


def test_neighbours_in_one_buffer_are_written() -> None:
    """Behind each other, and as columns of rows: ids beside the pages of the same requests."""
    for name in ("dsa_topk_indexer", "dsa_topk_prefill"):
        call = public_calls("cpu")[name]
        held: Tensor = call.arguments["topk_indices"]
        other = "block_table" if name == "dsa_topk_indexer" else "ends"
        wanted: Tensor = call.arguments[other]
        call()
        expected = held.clone()
        if wanted.dim() == 2:
            room = torch.zeros(len(held), held.shape[1] + wanted.shape[1], dtype=torch.int32)
            ids, beside = room.split([held.shape[1], wanted.shape[1]], dim=1)
        else:
            room = torch.zeros(held.numel() + wanted.numel(), dtype=torch.int32)
            ids, beside = room[: held.numel()].view(held.shape), room[held.numel() :]
        beside.copy_(wanted)
        for _ in range(3):
            ids.zero_()
            call.function(**{**call.arguments, "topk_indices": ids, other: beside})
            assert torch.equal(ids, expected)


def test_results_share_no_memory_with_each_other() -> None:
    q, kv = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    room = torch.zeros(24, dtype=torch.float64)
    out, lse = room.view(2, 3, 4), room[-6:].view(2, 3)
    with pytest.raises(ValueError, match=r"out: expected memory of its own .* with lse"):
        flashdsa.sparse_mla_fwd(q, kv, torch.zeros(2, 3).int(), d_v=4, out=out, lse=lse)
    assert not room.any()


@st.composite
def views(draw: st.DrawFn, room: Tensor) -> Tensor:
    """Any view of a small buffer, which may overlap itself."""
    dims = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    strides = draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims))
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    offset = draw(st.integers(0, len(room) - reach - 1))
    return room.as_strided(shape, strides, offset)


ROOM = torch.arange(96, dtype=torch.int32)


@given(views(ROOM), views(ROOM))
def test_no_overlap_is_overlooked(one: Tensor, other: Tensor) -> None:
    """The elements of the room are their addresses."""
    addresses, others = one.flatten().tolist(), other.flatten().tolist()
    assert overlaps_itself(one) or len(set(addresses)) == len(addresses)
    assert share_memory(one, other) or not set(addresses) & set(others)


APART = [
    (ROOM[:8], ROOM[8:]),
    (ROOM.view(8, 12)[:, :5], ROOM.view(8, 12)[:, 5:]),
    (ROOM.view(8, 12)[::2], ROOM.view(8, 12)[1::2]),
    (ROOM.view(4, 4, 6)[:, :2, 1:3], ROOM.view(4, 4, 6)[:, :, 3:]),
    (ROOM.view(4, 4, 6)[:, 1:3], ROOM.view(4, 4, 6)[:, 3]),
    (ROOM[:0], ROOM),
    (ROOM.to("meta"), ROOM.to("meta")),
]


def test_views_apart_are_known_to_be(subtests: CaseLoop) -> None:
    for one, other in APART:
        with subtests.test(f"{one.shape}, {other.shape}"):
            assert not share_memory(one, other) and not share_memory(other, one)
            assert not overlaps_itself(one)


D_V = 8


def _arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    x = inputs.attention(dtype)
    return {"q": x.q, "kv": x.kv, "indices": x.indices}


def _buffers(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Full of NaN: what must be written shows."""
    q = _arguments(dtype)["q"]
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.full((*q.shape[:2], D_V), math.nan, dtype=dtype)
    return out, *(torch.full(q.shape[:2], math.nan, dtype=sums) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_results_in_buffers_are_those_without(dtype: torch.dtype) -> None:
    arguments = _arguments(dtype)
    expected = flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, return_max_logits=True)
    out, lse, _ = _buffers(dtype)
    given = [{"out": out, "lse": lse}, {"out": out.clone()}, {"lse": lse.clone()}]
    for buffers in given:
        got = flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, **buffers, return_max_logits=True)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        for name, place in (("out", 0), ("lse", 1)):
            assert name not in buffers or got[place] is buffers[name]
    assert len(flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, out=out)) == 2


def test_the_largest_logits_are_those_of_valid_slots_without_the_sink() -> None:
    x = inputs.attention(torch.float64)
    options = {"sm_scale": -0.3, "topk_length": x.topk_length}
    *_, got = flashdsa.sparse_mla_fwd(
        x.q, x.kv, x.indices, d_v=D_V, attn_sink=x.attn_sink + 9, return_max_logits=True, **options
    )
    torch.testing.assert_close(
        got, reference.sparse_mla_max_logits(x.q, x.kv, x.indices, **options)
    )
    assert got[0].tolist() == [-math.inf, -math.inf]  # without a valid slot


def test_they_have_no_gradient_and_o_keeps_its_own() -> None:
    arguments = _arguments(torch.float64)
    q = arguments["q"].requires_grad_()
    out, _, largest = flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, return_max_logits=True)
    assert not largest.requires_grad
    (got,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(flashdsa.sparse_mla(**arguments, d_v=D_V).sum(), q)
    assert torch.equal(got, expected)


WRONG = [
    ("out", [1.0], TypeError, "out: expected a torch.Tensor; got list"),
    ("out", torch.zeros(3, 2, D_V), TypeError, "out: expected dtype bfloat16; got float32"),
    ("out", torch.zeros(3, D_V, 2).bfloat16().mT, ValueError, "out: expected a contiguous tensor"),
    ("lse", torch.zeros(3, 2).double(), TypeError, "lse: expected dtype float32; got float64"),
    ("lse", torch.zeros(2, 3), ValueError, r"lse: expected shape \[S, H\] = \[3, 2\]; got"),
    ("lse", torch.zeros(3, 4)[:, ::2], ValueError, "lse: expected a contiguous tensor"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_buffers(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flashdsa.sparse_mla_fwd(**_arguments(), d_v=D_V, **{name: value})


def test_a_buffer_of_another_d_v() -> None:
    with pytest.raises(ValueError, match=r"out: expected shape \[S, H, d_v\] = \[3, 2, 8\]"):
        flashdsa.sparse_mla_fwd(**_arguments(), d_v=D_V, out=torch.zeros(3, 2, 9).bfloat16())
    _, lse, _ = _buffers()
    wide = torch.zeros(3, 2, 13).bfloat16()
    with pytest.raises(ValueError, match=r"out: expected a last dimension d_v in \[1, 12\]"):
        flashdsa.bind("sparse_mla_fwd_out", (*_arguments().values(), wide, lse))


def test_a_gradient_is_refused() -> None:
    arguments, (out, lse, _) = _arguments(), _buffers()
    arguments["kv"].requires_grad_()
    with pytest.raises(NotImplementedError, match="caller's buffers have no gradient"):
        flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, out=out)
    with pytest.raises(NotImplementedError, match="a bound function records no gradient"):
        flashdsa.bind("sparse_mla_fwd_out", (*arguments.values(), out, lse))
    with torch.no_grad():
        flashdsa.sparse_mla_fwd(**arguments, d_v=D_V, out=out)


def test_packed_rows_on_hopper_have_no_largest_logits() -> None:
    rows = torch.zeros(7, 656, dtype=torch.uint8)
    q = torch.zeros(3, 2, 576).bfloat16()
    indices = torch.zeros(3, 6, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="max_logits and kv_format v32: not together"):
        flashdsa.sparse_mla_fwd(q, rows, indices, return_max_logits=True, backend="emulate-sm90")
