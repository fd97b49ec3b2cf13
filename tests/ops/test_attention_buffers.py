"""The forward into the caller's buffers, and its largest logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from tests.ops import inputs

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


def test_compiled_code_writes_to_its_buffers() -> None:
    arguments = _arguments()
    out, lse, _ = _buffers()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        rest = {name: arguments[name] for name in ("kv", "indices")}
        flashdsa.sparse_mla_fwd(q, **rest, d_v=D_V, out=out, lse=lse)
        return out + 1

    expected = flashdsa.sparse_mla_fwd(**arguments, d_v=D_V)
    assert torch.equal(step(arguments["q"], out, lse), expected[0] + 1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_vmap_writes_a_buffer_an_element() -> None:
    arguments = _arguments()
    queries = torch.stack([arguments["q"], -arguments["q"]])
    out, lse, _ = _buffers()
    outs, lses = out.expand(2, *out.shape).clone(), lse.expand(2, *lse.shape).clone()

    def one(q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        rest = {name: arguments[name] for name in ("kv", "indices")}
        flashdsa.sparse_mla_fwd(q, **rest, d_v=D_V, out=out, lse=lse)
        return q

    torch.vmap(one)(queries, outs, lses)
    for q, got in zip(queries, outs, strict=True):
        rest = {name: arguments[name] for name in ("kv", "indices")}
        assert torch.equal(got, flashdsa.sparse_mla_fwd(q, **rest, d_v=D_V)[0])


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
