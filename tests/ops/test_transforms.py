"""torch.func, forward-mode AD, vmap and autocast: right, or an error that says what is missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashdsa
from flashdsa.dispatch.transforms import VIEWS_BYTES
from flashdsa.errors import ArgumentValueError, UnsupportedError
from tests.ops import inputs
from workbench.public_calls import public_calls

X = inputs.attention(torch.float64)
NEWER_TORCH = r"torch\.vmap over packed bytes needs a newer torch"
OF_BYTES = ("fake_quantize_index", "quantize_kv", "write_kv_cache, packed", "read_kv_cache, packed")
NO_FORWARD_MODE = r"forward-mode AD .* is not available"


def attend(q: Tensor, kv: Tensor = X.kv, sink: Tensor | None = None) -> Tensor:
    return flashdsa.sparse_mla(q, kv, X.indices, d_v=X.d_v, attn_sink=sink)


def loss(q: Tensor, kv: Tensor = X.kv) -> Tensor:
    return attend(q, kv).square().sum()


def _normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


INDEX, KV, KEYS = _normal(3, 2, 128), _normal(2, 576).bfloat16(), _normal(9, 128)
WEIGHTS, ANGLES = _normal(3, 2), _normal(5, 3)


def dense_loss(q_index: Tensor, row_weight: Tensor | None = None) -> Tensor:
    ends = torch.tensor([9, 3, 5], dtype=torch.int32)
    keys = KEYS[:, : X.q.shape[2]]
    return flashdsa.indexer_kl_loss_dense(
        *(q_index, KEYS, WEIGHTS, X.q, keys, WEIGHTS + 4, ends), row_weight=row_weight
    )


def rotated(x: Tensor) -> Tensor:
    tables = ANGLES.cos(), ANGLES.sin()
    return flashdsa.rotate_tail(x, torch.tensor([4, 0, 2]), tables).pow(3).sum()


def rounded(scale: str) -> Callable[[Tensor], Tensor]:
    return lambda x: (flashdsa.fake_quantize_index(x, scale=scale) * (INDEX + 1)).sum()


def write_kv(kv: Tensor) -> Tensor:
    cache = kv.new_zeros(3, 576)
    flashdsa.write_kv_cache(kv, torch.tensor([2, 0]), cache)
    return cache


def one_recorded_dual() -> Any:
    with forward_ad.dual_level():
        q = X.q.detach().clone().requires_grad_()
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(q, X.q))).tangent


@pytest.mark.parametrize(
    "derive",
    [
        lambda: torch.func.jacfwd(attend)(X.q),
        lambda: torch.func.hessian(loss)(X.q),
        lambda: torch.func.jvp(torch.func.grad(loss), (X.q,), (X.q,)),
        one_recorded_dual,
        lambda: torch.func.hessian(dense_loss)(INDEX),
        lambda: torch.func.jvp(partial(dense_loss, INDEX), (X.q[:, 0, 0],), (X.q[:, 0, 0],)),
        lambda: torch.func.jvp(torch.vmap(dense_loss), (INDEX[None],), (INDEX[None],)),
        lambda: torch.func.jvp(torch.vmap(write_kv), (KV[None],), (KV[None],)),
        lambda: torch.func.jvp(
            lambda k: flashdsa.quantize_index_k(k)[1], (torch.ones(2, 128),), (torch.ones(2, 128),)
        ),
    ],
    ids=[
        *("jacfwd", "hessian", "of grad", "dual, recorded"),
        *("hessian of dense", "weights of rows", "dense, vmap", "write, vmap", "keys"),
    ],
)
def test_forward_mode_is_an_error_and_never_a_number(derive: Callable[[], Any]) -> None:
    """Composed; of every operand alone in test_forward_mode.py."""
    with pytest.raises(UnsupportedError, match=NO_FORWARD_MODE):
        derive()


def test_duals_of_other_operands_and_inactive_levels_do_not_matter() -> None:
    with forward_ad.dual_level():
        assert torch.equal(attend(X.q), attend(X.q.clone()))
    assert attend(X.q).shape == (3, 2, X.d_v)


def test_grad_vjp_and_jacrev_of_torch_func_give_autograds_gradients() -> None:
    q, kv = X.q.detach().requires_grad_(), X.kv.detach().requires_grad_()
    expected = torch.autograd.grad(loss(q, kv), (q, kv))
    for got, wanted in zip(torch.func.grad(loss, (0, 1))(X.q, X.kv), expected, strict=True):
        assert torch.equal(got, wanted)
    (through_vjp,) = torch.func.vjp(loss, X.q)[1](torch.ones((), dtype=torch.float64))
    assert torch.equal(through_vjp, expected[0])
    torch.testing.assert_close(torch.func.jacrev(loss)(X.q), expected[0])


def test_a_gradient_of_a_gradient_is_the_same_error_in_torch_func() -> None:
    with pytest.raises(NotImplementedError, match="mla_bwd: no gradient of a gradient"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(X.q)


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_vmap_is_a_call_an_element(dim: int, capfd: pytest.CaptureFixture[str]) -> None:
    queries = torch.stack([X.q, 2 * X.q, -X.q])
    keys = torch.stack([X.kv, X.kv.flip(0), 3 * X.kv])
    expected = torch.stack([attend(q, kv) for q, kv in zip(queries, keys, strict=True)])
    moved = queries.movedim(0, dim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(attend, in_dims=(dim, 0))(moved, keys)
    assert torch.equal(got, expected)
    assert "batching rule" not in capfd.readouterr().err  # torch's slow way, which it warns of


def test_gradients_of_each_element_by_vmap() -> None:
    queries = torch.stack([X.q, 2 * X.q])
    got = torch.vmap(torch.func.grad(loss))(queries)
    assert torch.equal(got, torch.stack([torch.func.grad(loss)(q) for q in queries]))


@pytest.mark.parametrize(
    "function",
    [dense_loss, rotated, *map(rounded, ("ue8m0", "fp32", "mxfp4"))],
    ids=["dense", "rotate", "ue8m0", "fp32", "mxfp4"],
)
def test_functions_that_are_no_operations(
    function: Callable[[Tensor], Tensor], request: pytest.FixtureRequest
) -> None:
    batch = torch.stack([INDEX, 2 * INDEX])
    if not VIEWS_BYTES and request.node.callspec.id in ("ue8m0", "mxfp4"):
        with pytest.raises(UnsupportedError, match=NEWER_TORCH):
            torch.vmap(function)(batch)
        return
    batch.requires_grad_()
    values = torch.stack([function(x) for x in batch])
    (expected,) = torch.autograd.grad(values.sum(), batch)
    batch = batch.detach()
    assert expected.any() and torch.equal(torch.vmap(function)(batch), values)
    grad = torch.func.grad(function)
    assert torch.equal(grad(batch[0]), expected[0])
    assert torch.equal(torch.vmap(grad)(batch), expected)
    of_batch = torch.func.grad(lambda x: torch.vmap(function)(x).sum())
    assert torch.equal(of_batch(batch), expected)
    torch.compiler.reset()
    compiled = torch.compile(grad, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch[0]), expected[0])


def test_straight_through_is_the_rounding_itself() -> None:
    x = torch.cat((_normal(4, 128), torch.zeros(1, 128), -1e-9 * _normal(1, 128).abs()))
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    for scale in ("ue8m0", "fp32", "mxfp4"):
        got = flashdsa.fake_quantize_index(x, scale=scale)
        one_by_one = [flashdsa.fake_quantize_index(row, scale=scale) for row in x]
        assert got.isnan().all(1).tolist() == [True, True, *[False] * 4]
        assert torch.equal(got[2:], torch.stack(one_by_one)[2:])
        assert (got[5].signbit() == x[5].signbit()).all()  # of 0, too


@pytest.mark.parametrize("width", [576, 656])
def test_vmap_of_a_kv_cache(width: int) -> None:
    kv, slots = _normal(2, 3, 576).float(), torch.tensor([[1, -1, 5], [130, 3, 0]])
    dtype = torch.bfloat16 if width == 576 else torch.uint8
    caches = torch.zeros(2, 3, 64, width, dtype=dtype)
    expected = caches.clone()
    for given in zip(kv, slots, expected, strict=True):
        flashdsa.write_kv_cache(*given)
    write = partial(torch.vmap, flashdsa.write_kv_cache, out_dims=None)
    if not VIEWS_BYTES and width == 656:
        with pytest.raises(UnsupportedError, match=NEWER_TORCH):
            write()(kv, slots, caches)
        return
    write()(kv, slots, caches)
    assert caches.any() and torch.equal(caches, expected)
    read = torch.vmap(flashdsa.read_kv_cache)(caches, slots.clamp(0))
    for number in range(2):
        one = flashdsa.read_kv_cache(caches[number], slots[number].clamp(0))
        assert torch.equal(read[number], one)
    with pytest.raises(UnsupportedError, match=r"cache: write_kv_cache under vmap .* must have"):
        write(in_dims=(0, 0, None))(kv, slots, caches[0])
    for wrong in (slots + 99, slots.clamp(0) * 0):
        with pytest.raises(ArgumentValueError, match="slots: expected"):
            write()(kv, wrong, caches)
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("name", [n for n in public_calls("cpu") if not n.startswith("bind")])
def test_vmap_of_every_function(name: str) -> None:
    call = public_calls("cpu")[name]

    def results(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found = call.function(**{**call.arguments, **given})
        found = [given[x] for x in call.written] if found is None else found
        return (found,) if isinstance(found, Tensor) else tuple(found)

    ones: dict[str, Tensor] = {n: call.arguments[n] for n in call.tensors}
    twos = {n: 2 * x if x.is_floating_point() and x.itemsize > 1 else x for n, x in ones.items()}
    batch = {n: torch.stack((x, twos[n])) for n, x in ones.items()}
    if not VIEWS_BYTES and name in OF_BYTES:
        with pytest.raises(UnsupportedError, match=NEWER_TORCH):
            torch.vmap(results)(batch)
        return
    got = torch.vmap(results)(batch)
    for number, element in enumerate((ones, twos)):
        expected = results({n: x.clone() for n, x in element.items()})
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one[number], other, rtol=0, atol=0, equal_nan=True)
    nothing = torch.vmap(results)({n: x[:0] for n, x in batch.items()})
    for one, other in zip(nothing, got, strict=True):
        assert (one.shape, one.dtype) == ((0, *other.shape[1:]), other.dtype)


def test_vmap_of_no_element_has_a_gradient_as_others() -> None:
    """Of the results that have one, so that a loss of an empty batch goes backward."""
    queries = torch.stack([X.q, X.q])[:0].requires_grad_()
    keys = X.kv.detach().requires_grad_()
    fwd = partial(flashdsa.sparse_mla_fwd, d_v=X.d_v)
    out, lse = torch.vmap(fwd, in_dims=(0, None, None))(queries, keys, X.indices)
    assert (lse.shape, lse.requires_grad) == ((0, 3, 2), False)
    of_queries, of_keys = torch.autograd.grad(out.sum(), (queries, keys))
    assert of_queries.shape == queries.shape and torch.equal(of_keys, torch.zeros_like(keys))
    each = torch.vmap(torch.func.grad(loss))(queries.detach())
    assert each.shape == queries.shape


def test_autocast_casts_q_and_kv_and_gradients_come_back() -> None:
    x = inputs.attention(torch.float32)
    q, kv, sink = (t.requires_grad_() for t in (x.q, x.kv, x.attn_sink))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashdsa.sparse_mla(q, kv.bfloat16(), x.indices, d_v=x.d_v, attn_sink=sink)
    by_hand = flashdsa.sparse_mla(q.bfloat16(), kv.bfloat16(), x.indices, d_v=x.d_v, attn_sink=sink)
    assert out.dtype == torch.bfloat16 and torch.equal(out, by_hand)
    grads = torch.autograd.grad(out.sum(), (q, kv, sink))
    for got, wanted in zip(grads, torch.autograd.grad(by_hand.sum(), (q, kv, sink)), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(X.q).dtype == torch.float64


def test_an_empty_batch_has_zero_gradients() -> None:
    x = inputs.attention(torch.float32)
    q, kv, sink = (t.detach().requires_grad_() for t in (x.q[:0], x.kv, x.attn_sink))
    flashdsa.sparse_mla(q, kv, x.indices[:0], d_v=x.d_v, attn_sink=sink).sum().backward()
    assert q.grad is not None and q.grad.shape == (0, 2, 12)
    for tensor in (kv, sink):
        assert tensor.grad is not None and not tensor.grad.any()
