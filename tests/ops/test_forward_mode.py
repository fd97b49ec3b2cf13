"""Every public operation under forward-mode AD: the right derivative, or an error; never 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashdsa
from flashdsa.errors import UnsupportedError
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

F64 = torch.float64
ROUNDING = {F64: 1e-9, torch.float32: 0, torch.bfloat16: 0.04}
"""Of a difference of two results."""
Function = Callable[[Tensor], Tensor]
Derivative = Callable[[Function, Tensor, Tensor], Tensor]
Case = tuple[str, Derivative, Function, Tensor]


def _normal(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)


X = inputs.attention(F64)
SCORED = inputs.indexer()
SLOTS = torch.tensor([1, 2])
INDICES = torch.tensor([[0, 1, 2], [2, -1, 4], [3, 3, 0]], dtype=torch.int32)
Q_INDEX, K_INDEX, WEIGHTS = _normal(3, 2, 128), _normal(5, 128), _normal(3, 2)
LSE = torch.full((3, 2), 5.0, dtype=F64)


def _into_out(q: Tensor) -> Tensor:
    out = torch.zeros(3, 2, X.d_v, dtype=F64)
    return flashdsa.sparse_mla_fwd(q, X.kv, X.indices, d_v=X.d_v, out=out)[0]


def _into_lse(kv: Tensor) -> Tensor:
    return flashdsa.sparse_mla_fwd(X.q, kv, X.indices, d_v=X.d_v, lse=torch.zeros_like(LSE))[1]


def _bound(q: Tensor) -> Tensor:
    operands = q, X.kv, X.indices, torch.zeros(3, 2, X.d_v, dtype=F64), torch.zeros_like(LSE)
    flashdsa.bind("sparse_mla_fwd_out", operands)(operands)
    return operands[3]


def _into_cache(kv: Tensor) -> Tensor:
    cache = torch.zeros(64, 576, dtype=torch.bfloat16)
    flashdsa.write_kv_cache(kv, SLOTS, cache)
    return cache


def _added(target: Tensor) -> Tensor:
    return flashdsa.attention_target(X.q, X.kv, LSE, INDICES, accumulate_into=target)


def _prefill_logits(q: Tensor) -> Tensor:
    ends = torch.full((3,), 5, dtype=torch.int32)
    operands = K_INDEX.float(), WEIGHTS.float(), None, ends
    return flashdsa.prefill_logits(q, *operands)


def _bwd(dO: Tensor) -> Tensor:
    return flashdsa.mla_bwd(X.q, X.kv, dO, LSE, _normal(3, 2, X.d_v), X.indices)[0]


def _rotate(x: Tensor) -> Tensor:
    return flashdsa.rotate_tail(x, SLOTS[[0, 0, 1]], (_normal(3, 3), _normal(3, 3)))


def _dense(k_index: Tensor) -> Tensor:
    ends = torch.full((3,), 5, dtype=torch.int32)
    return flashdsa.indexer_kl_loss_dense(Q_INDEX, k_index, WEIGHTS, X.q, X.kv[:5], LSE, ends)


def _kl_loss(target: Tensor) -> Tensor:
    return flashdsa.indexer_kl_loss(Q_INDEX, K_INDEX, WEIGHTS, INDICES, target=target)


REFUSED: dict[str, list[tuple[Function, Tensor]]] = {
    "sparse_mla": [(lambda q: flashdsa.sparse_mla(q, X.kv, X.indices, d_v=X.d_v), X.q)],
    "sparse_mla_fwd": [
        (lambda kv: flashdsa.sparse_mla_fwd(X.q, kv, X.indices, d_v=X.d_v)[0], X.kv),
        (_into_out, X.q),
        (_into_lse, X.kv),
    ],
    "bind": [(_bound, X.q)],
    "mla_bwd": [(_bwd, _normal(3, 2, X.d_v))],
    "merge_attention": [
        (lambda outs: flashdsa.merge_attention(outs, _normal(2, 3, 4))[0], _normal(2, 3, 4, 8)),
        (lambda lses: flashdsa.merge_attention(_normal(2, 3, 4, 8), lses)[1], _normal(2, 3, 4)),
    ],
    "indexer_logits": [
        (lambda w: flashdsa.indexer_logits(*SCORED._replace(weights=w), 140), SCORED.weights)
    ],
    "prefill_logits": [(_prefill_logits, Q_INDEX.float())],
    "quantize_index_k": [(lambda k: flashdsa.quantize_index_k(k)[1], _normal(3, 128).float())],
    "quantize_index_q": [
        (lambda w: flashdsa.quantize_index_q(Q_INDEX.float(), w)[1], WEIGHTS.float())
    ],
    "write_kv_cache": [(_into_cache, _normal(2, 576).bfloat16())],
    "attention_target": [(lambda q: flashdsa.attention_target(q, X.kv, LSE, INDICES), X.q)],
    "indexer_scores": [
        (lambda k: flashdsa.indexer_scores(Q_INDEX, k, WEIGHTS, INDICES).nan_to_num(), K_INDEX)
    ],
    "indexer_bwd": [
        (lambda g: flashdsa.indexer_bwd(Q_INDEX, K_INDEX, WEIGHTS, INDICES, g)[0], _normal(3, 3))
    ],
    "indexer_kl": [(lambda s: flashdsa.indexer_kl(s, _normal(3, 3).exp()), _normal(3, 3))],
    "indexer_kl_bwd": [
        (lambda g: flashdsa.indexer_kl_bwd(_normal(3, 3), _normal(3, 3).exp(), g), _normal(3))
    ],
    "indexer_kl_loss": [(_kl_loss, _normal(3, 3).exp())],
    "indexer_kl_loss_dense": [(_dense, K_INDEX)],
}
RIGHT: dict[str, list[tuple[Function, Tensor]]] = {
    "lse_to_base2": [(flashdsa.lse_to_base2, _normal(5))],
    "lse_from_base2": [(flashdsa.lse_from_base2, _normal(5))],
    "lse_for_merge": [(flashdsa.lse_for_merge, _normal(5))],
    "attention_target": [(_added, _normal(3, 3))],
    "fake_quantize_index": [(flashdsa.fake_quantize_index, torch.zeros(3, 128))],
    "rotate_tail": [(_rotate, _normal(3, 2, 8))],
    "read_kv_cache": [
        (lambda cache: flashdsa.read_kv_cache(cache, SLOTS), _normal(8, 576).bfloat16())
    ],
}
INTEGERS = {
    "causal_ranges",
    "dsa_topk_indexer",
    "dsa_topk_prefill",
    "expand_blocks",
    "quantize_kv",
    "read_index_k_cache",
    "topk_indices",
    "warm_up",
    "write_index_k_cache",
}
"""Operations whose results are ids or bytes, or whose operands are: they have no derivative."""


def _cases(table: dict[str, list[tuple[Function, Tensor]]]) -> Iterator[Case]:
    """Each derivative of each function, by name."""
    for name, functions in table.items():
        for derivative, (function, primal) in product((_by_torch_func, _by_duals), functions):
            yield f"{name}, {derivative.__name__}", derivative, function, primal


def _as_called(name: str) -> list[tuple[Function, Tensor]]:
    """A small right call of the function, as one of each operand that may have a derivative."""
    call = public_calls("cpu")[name]

    def of(argument: str) -> Function:
        def function(value: Tensor) -> Tensor:
            results = call.function(**{**call.arguments, argument: value})
            first: Tensor = results if isinstance(results, Tensor) else results[0]
            return first

        return function

    tensors = {n: x for n, x in call.arguments.items() if isinstance(x, Tensor)}
    return [(of(n), x) for n, x in tensors.items() if x.is_floating_point() and x.itemsize > 1]


def test_every_public_name_is_a_function() -> None:
    assert {*REFUSED, *RIGHT, *INTEGERS} <= set(flashdsa.__all__)
    assert all(inspect.isfunction(getattr(flashdsa, name)) for name in flashdsa.__all__)


def _by_torch_func(function: Function, primal: Tensor, along: Tensor) -> Tensor:
    return torch.func.jvp(function, (primal,), (along,))[1]


def _by_duals(function: Function, primal: Tensor, along: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal.clone(), along)
        tangent = forward_ad.unpack_dual(function(dual)).tangent
    return torch.zeros(()) if tangent is None else tangent


def test_forward_mode_is_refused(subtests: CaseLoop) -> None:
    others = set(flashdsa.__all__) - {*REFUSED, *RIGHT, *INTEGERS}
    for name, derivative, function, primal in _cases(REFUSED | {x: _as_called(x) for x in others}):
        with subtests.test(name):
            with pytest.raises(UnsupportedError, match="forward-mode AD"):
                derivative(function, primal, torch.ones_like(primal))
            assert function(primal).numel()


def test_forward_mode_is_right(subtests: CaseLoop) -> None:
    """These are linear: the derivative along a direction is what the direction changes."""
    for name, derivative, function, primal in _cases(RIGHT):
        with subtests.test(name):
            along = torch.ones_like(primal)
            got = derivative(function, primal.clone(), along)
            expected = function(primal + along) - function(primal.clone())
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=ROUNDING[primal.dtype])
