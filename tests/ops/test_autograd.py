"""Gradients: checked numerically in float64, in the inputs' dtypes, once differentiable."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import Implementation
from flashdsa.errors import UnsupportedError
from flashdsa.problem import Problem
from tests.ops import inputs


@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradcheck_in_float64(with_sink: bool, with_length: bool) -> None:
    x = inputs.attention(torch.float64)
    sink = x.attn_sink.double().requires_grad_() if with_sink else None
    length = x.topk_length if with_length else None

    def attend(q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
        return flashdsa.sparse_mla(
            q, kv, x.indices, d_v=x.d_v, topk_length=length, attn_sink=attn_sink
        )

    args = (x.q.requires_grad_(), x.kv.requires_grad_(), sink)
    assert torch.autograd.gradcheck(attend, args)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_gradients_have_the_inputs_dtypes_and_shapes(dtype: torch.dtype) -> None:
    x = inputs.attention(dtype)
    q, kv = x.q.requires_grad_(), x.kv[:, None].clone().requires_grad_()
    sink = x.attn_sink.requires_grad_()
    flashdsa.sparse_mla(q, kv, x.indices[:, None], d_v=x.d_v, attn_sink=sink).sum().backward()
    for tensor in (q, kv, sink):
        assert tensor.grad is not None
        assert tensor.grad.dtype == tensor.dtype
        assert tensor.grad.shape == tensor.shape


def test_autograd_gives_what_mla_bwd_gives() -> None:
    x = inputs.attention(torch.float32)
    q, kv, sink = (t.requires_grad_() for t in (x.q, x.kv, x.attn_sink))
    out, lse = flashdsa.sparse_mla_fwd(q, kv, x.indices, d_v=x.d_v, attn_sink=sink)
    dO = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, kv, sink), dO)
    with torch.no_grad():
        direct = flashdsa.mla_bwd(q, kv, dO, lse, out, x.indices, attn_sink=sink)
    assert len(direct) == 3
    for got, expected in zip(grads, direct, strict=True):
        assert torch.equal(got, expected)


def test_lse_and_indices_are_not_differentiable() -> None:
    x = inputs.attention(torch.float32)
    out, lse = flashdsa.sparse_mla_fwd(x.q.requires_grad_(), x.kv, x.indices, d_v=x.d_v)
    assert out.requires_grad
    assert not lse.requires_grad
    assert not x.indices.requires_grad


def test_fp16_is_as_near_to_float64_as_its_rounding_allows() -> None:
    x = inputs.attention(torch.float16)
    results = []
    for dtype in (torch.float16, torch.float64):
        q, kv = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.kv))
        out = flashdsa.sparse_mla(q, kv, x.indices, d_v=x.d_v, backend="cpu")
        assert out.dtype == dtype
        results.append([out, *torch.autograd.grad(out.sum(), (q, kv))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.usefixtures("new_calls")
def test_the_backward_may_run_on_a_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = registry.select

    def noted(problem: Problem, backend: str) -> Implementation:
        asked.append((problem.operation, backend))
        return select(problem, "cpu")

    monkeypatch.setattr(registry, "select", noted)
    x = inputs.attention(torch.float32)
    q = x.q.requires_grad_()
    for backend in (("cpu", "emulate-sm100"), "auto"):
        flashdsa.sparse_mla(q, x.kv, x.indices, d_v=x.d_v, backend=backend).sum().backward()
    assert set(asked) == {
        ("sparse_mla_fwd", "cpu"),
        ("mla_bwd", "emulate-sm100"),
        ("sparse_mla_fwd", "auto"),
        ("mla_bwd", "auto"),
    }


def test_a_forward_whose_backward_is_refused_is_refused_where_a_gradient_is_asked_for() -> None:
    """Of the Blackwell backward, which is deterministic with 128 heads alone."""
    q = torch.randn(1, 64, 576, dtype=torch.bfloat16)
    kv, indices = torch.randn(40, 576, dtype=torch.bfloat16), torch.zeros(1, 32, dtype=torch.int32)
    pair = "cpu", "emulate-sm100"
    kept = flashdsa.sparse_mla(q, kv, indices, deterministic=True, backend=pair)
    wanted = (
        "^mla_bwd: .*: num_heads 64 and deterministic: not together. sparse_mla_fwd needs mla_bwd"
    )
    for named in (q.clone().requires_grad_(), torch.nn.Parameter(q)):
        with pytest.raises(UnsupportedError, match=wanted):
            flashdsa.sparse_mla(named, kv, indices, deterministic=True, backend=pair)
        with torch.no_grad():
            again = flashdsa.sparse_mla(named, kv, indices, deterministic=True, backend=pair)
        assert torch.equal(again, kept)


@pytest.mark.parametrize("name", ["sparse_mla", "indexer_kl"])
@pytest.mark.parametrize(
    "around", [nullcontext(), torch.device("cpu")], ids=["plain", "dispatcher"]
)
def test_a_call_whose_forward_is_refused_too_says_that_alone(
    name: str, around: AbstractContextManager[object]
) -> None:
    scores = torch.zeros(2, 3, requires_grad=True)
    operands = [scores, torch.zeros(2, 3)]
    if name == "sparse_mla":
        q = torch.zeros(3, 2, 576, dtype=torch.bfloat16, requires_grad=True)
        operands = [q, q[:, 0].detach(), torch.zeros(3, 4, dtype=torch.int32)]
    with around, pytest.raises(UnsupportedError) as error:
        getattr(flashdsa, name)(*operands, backend="sm90")
    said = "backend 'sm90' cannot serve this call. sm90: device: takes cuda; got cpu"
    mend = ": move the tensors, or backend='auto'"
    assert str(error.value).split(": ", 1)[1] == said + mend
