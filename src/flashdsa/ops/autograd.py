"""Gradients: backwards of the operations that have one, and errors where there is none.

An operation's Autograd kernel is written here instead of by `torch.library.register_autograd`: that
one gives torch.func.grad an error about its own insides, and forward-mode AD tangents of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import Parameter

from flashdsa.backends.catalog import registry
from flashdsa.errors import DoubleBackwardError, UnsupportedError
from flashdsa.operands import IndexerKlOperands, IndexerScoresOperands, SparseMlaOperands
from flashdsa.ops.argument_rules import refuse_packed
from flashdsa.ops.call_cache import BACKWARD
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.table import (
    INDEXER_BWD,
    INDEXER_KL,
    INDEXER_KL_BWD,
    INDEXER_SCORES,
    MLA_BWD,
    SPARSE_MLA_FWD,
)

Gradients = dict[str, Tensor | None]
"""Gradients by the name of an operand; operands without a gradient are left out."""


def _save_attention(ctx: Any, operands: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, max_logits = output
    ctx.save_for_backward(*operands, out, lse)
    ctx.mark_non_differentiable(lse, max_logits)


def _sparse_mla_backward(ctx: Any, dO: Tensor, *_: Tensor) -> Gradients:
    """Gradients of the forward's inputs: q, kv and attn_sink, in the inputs' dtypes."""
    *operands, out, lse = ctx.saved_tensors
    x = SparseMlaOperands(*operands)
    refuse_packed(x.kv)
    dq, dkv, d_sink = torch.ops.flashdsa.mla_bwd.default(
        x.q,
        x.kv,
        dO.contiguous(),
        lse,
        out,
        x.indices,
        x.topk_length,
        x.attn_sink,
        ctx.parameters["sm_scale"],
        ctx.parameters["deterministic"],
        x.kv.dtype,
        ctx.parameters["backward_backend"],
    )
    return {"q": dq, "kv": dkv, "attn_sink": None if x.attn_sink is None else d_sink}


def _save_operands(ctx: Any, operands: Any, output: Any) -> None:
    ctx.save_for_backward(*operands)


def _scores_backward(ctx: Any, d_scores: Tensor) -> Gradients:
    """Return the gradients of q_index, k_index and weights, in their dtypes."""
    x = IndexerScoresOperands(*ctx.saved_tensors)
    dq, dk, d_weights = torch.ops.flashdsa.indexer_bwd.default(
        x.q_index,
        x.k_index,
        x.weights,
        x.indices,
        d_scores.contiguous(),
        x.topk_length,
        ctx.parameters["deterministic"],
        x.k_index.dtype,
        ctx.parameters["backward_backend"],
    )
    return {"q_index": dq, "k_index": dk, "weights": d_weights}


def _kl_backward(ctx: Any, d_kl: Tensor) -> Gradients:
    """Return the gradient of the scores; the target has none."""
    x = IndexerKlOperands(*ctx.saved_tensors)
    backend = ctx.parameters["backward_backend"]
    d_scores = torch.ops.flashdsa.indexer_kl_bwd.default(*x, d_kl.contiguous(), backend)
    return {"scores": d_scores}


class _Gradient(NamedTuple):
    """Functions that differentiate an operation."""

    save: Callable[[Any, Any, Any], None]
    """Keeps what the backward needs: takes the context, the operands and the output."""
    backward: Callable[..., Gradients]
    by: OpSpec
    """The operation that computes it."""


_GRADIENTS = {
    SPARSE_MLA_FWD.operation: _Gradient(_save_attention, _sparse_mla_backward, MLA_BWD),
    INDEXER_SCORES.operation: _Gradient(_save_operands, _scores_backward, INDEXER_BWD),
    INDEXER_KL.operation: _Gradient(_save_operands, _kl_backward, INDEXER_KL_BWD),
}
_BACKWARDS = {
    MLA_BWD.operation: "sparse_mla",
    INDEXER_BWD.operation: "indexer_scores",
    INDEXER_KL_BWD.operation: "indexer_kl",
}
"""Operations that are backwards themselves, and of what."""


def _function(spec: OpSpec, op: torch._ops.OpOverload) -> Any:
    """The operation with its backward, or an error in its place.

    It is a function of one level of torch.func's transforms: the dispatcher has taken the outer
    ones apart when it calls the Autograd kernel.
    """

    def forward(*arguments: Any) -> Any:
        # Recording switches gradients off, of this level by torch.func; an outer one may want them.
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
        ):
            return op(*arguments)

    gradient = _GRADIENTS.get(spec.operation)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if gradient is not None:
            operands, ctx.parameters, _backend = spec.unpack(inputs)
            gradient.save(ctx, operands, output)

    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if gradient is None:
            _no_gradient(spec)
        found = gradient.backward(ctx, *d_outputs)
        of_values = [None for _ in (*spec.parameters, "backend")]
        return (*[found.get(operand.name) for operand in spec.operands], *of_values)

    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
    }
    return type(f"{spec.operation}_function", (_SingleLevelFunction,), members)


def _no_gradient(spec: OpSpec) -> NoReturn:
    of = _BACKWARDS.get(spec.operation)
    if of is None:
        raise UnsupportedError(f"{spec.operation}: no gradient is available")
    raise DoubleBackwardError(
        f"{spec.operation}: no gradient of a gradient is available; the backward of {of} cannot "
        "be differentiated (create_graph=True)"
    )


def _require_backward(spec: OpSpec, arguments: Sequence[Any]) -> None:
    """Raise UnsupportedError where no implementation would serve the call's backward: the forward
    says so, before anything is computed."""
    count = len(spec.operands)
    given, values, backend = arguments[:count], arguments[count:-1], arguments[-1]
    if spec.cache.find(given, values, backend, BACKWARD) is not None:
        return
    operands, parameters, _ = spec.unpack(arguments)
    if not all(x is None or type(x) in (Tensor, Parameter) for x in operands):
        return  # sizes are symbols, or not those of the call
    problem = spec.problem(operands, parameters, spec.check(operands, parameters))
    of_backward = replace(problem, operation=_GRADIENTS[spec.operation].by.operation)
    try:
        registry.select(replace(of_backward, max_logits=False), parameters["backward_backend"])
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{spec.operation}: a gradient is asked for that no implementation computes; without "
            f"one call it under torch.no_grad(). {error}"
        ) from None
    spec.cache.keep(given, values, backend, _nothing, BACKWARD)


def _nothing(_: object) -> None:
    """Stand for a backward that is served."""


def has_tangent(value: object) -> bool:
    """Whether forward-mode AD wants a derivative along `value`."""
    return (
        isinstance(value, Tensor)
        and forward_ad._current_level >= 0
        and forward_ad.unpack_dual(value, level=0).tangent is not None
    )


def refuse_tangents(name: str, values: Iterable[object]) -> None:
    """Raise UnsupportedError where forward-mode AD wants a derivative of `name` along a value."""
    if forward_ad._current_level >= 0 and any(has_tangent(value) for value in values):
        raise UnsupportedError(
            f"{name}: forward-mode AD (torch.func.jvp, jacfwd, torch.autograd.forward_ad) is not "
            "available; reverse mode is, where an operation has a gradient"
        )


def autograd_kernel(spec: OpSpec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the function that the dispatcher calls if gradients are recorded and there are
    outputs."""
    function = _function(spec, op)

    def run(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        refuse_tangents(spec.operation, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if spec.operation in _GRADIENTS:
                _require_backward(spec, arguments)
            with enable_single_level_autograd_function():
                return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return run
