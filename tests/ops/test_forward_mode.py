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

F64 = torch.float64
ROUNDING = {F64: 1e-9, torch.float32: 0, torch.bfloat16: 0.04}
"""Of a difference of two results."""
Function = Callable[[Tensor], Tensor]
Derivative = Callable[[Function, Tensor, Tensor], Tensor]
Case = tuple[str, Derivative, Function, Tensor]


def _normal(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)


X = inputs.attention(F64)
SLOTS = torch.tensor([1, 2])
INDICES = torch.tensor([[0, 1, 2], [2, -1, 4], [3, 3, 0]], dtype=torch.int32)
LSE = torch.full((3, 2), 5.0, dtype=F64)


def _added(target: Tensor) -> Tensor:
    return flashdsa.attention_target(X.q, X.kv, LSE, INDICES, accumulate_into=target)


def _rotate(x: Tensor) -> Tensor:
    return flashdsa.rotate_tail(x, SLOTS[[0, 0, 1]], (_normal(3, 3), _normal(3, 3)))


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
    "causal_ranges", "dsa_topk_indexer", "dsa_topk_prefill", "expand_blocks", "explain",
    "quantize_kv", "read_index_k_cache", "topk_indices", "warm_up", "write_index_k_cache",
}  # fmt: skip
"""Functions whose results are ids, bytes or text, or whose operands are: without a derivative."""


def _cases(table: dict[str, list[tuple[Function, Tensor]]]) -> Iterator[Case]:
    """Each derivative of each function, by name."""
    for name, functions in table.items():
        for derivative, (function, primal) in product((_by_torch_func, _by_duals), functions):
            yield f"{name}, {derivative.__name__}", derivative, function, primal


def _as_called(name: str) -> list[tuple[Function, Tensor]]:
    """A small right call of the function, as one of each operand that may have a derivative."""
    call = inputs.small_calls()[name]

    def of(argument: str) -> Function:
        def function(value: Tensor) -> Tensor:
            arguments = {**call.arguments, argument: value}
            results = call.function(**arguments)
            given = [results] if isinstance(results, Tensor) else list(results or ())
            return next(
                x
                for x in [*given, *(arguments[written] for written in call.written)]
                if x.is_floating_point() and x.itemsize > 1
            )

        return function

    given = {n: call.arguments[n] for n in call.tensors if n not in call.written}
    return [(of(n), x) for n, x in given.items() if x.is_floating_point() and x.itemsize > 1]


def test_every_public_name_is_a_function() -> None:
    assert {*RIGHT, *INTEGERS} <= set(flashdsa.__all__)
    assert all(inspect.isfunction(getattr(flashdsa, name)) for name in flashdsa.__all__)


def _by_torch_func(function: Function, primal: Tensor, along: Tensor) -> Tensor:
    return torch.func.jvp(function, (primal,), (along,))[1]


def _by_duals(function: Function, primal: Tensor, along: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal.clone(), along)
        tangent = forward_ad.unpack_dual(function(dual)).tangent
    return torch.zeros(()) if tangent is None else tangent


FORMS = ("sparse_mla_fwd, buffers", "bind, sparse_mla_fwd_out", "mla_bwd, added")
"""Further calls than one of each function."""


def test_forward_mode_is_refused(subtests: CaseLoop) -> None:
    refused = set(flashdsa.__all__) - {*RIGHT, *INTEGERS} | {"attention_target"}
    for name, derivative, function, primal in _cases(
        {x: _as_called(x) for x in [*refused - {"bind"}, *FORMS]}
    ):
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
