"""Gradients: the backward of `sparse_mla_fwd`, and errors where an operation has none.

An operation's Autograd kernel is written here instead of by `torch.library.register_autograd`: that
one gives torch.func.grad an error about its own insides, and forward-mode AD tangents of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from flashdsa.errors import DoubleBackwardError, UnsupportedError
from flashdsa.operands import SparseMlaOperands
from flashdsa.ops.rules import refuse_packed
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.table import MLA_BWD, SPARSE_MLA_FWD
from flashdsa.problem import Operation


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    operands, ctx.parameters, _backend = SPARSE_MLA_FWD.unpack(inputs)
    ctx.save_for_backward(*operands, *output)
    _, lse = output
    ctx.mark_non_differentiable(lse)


def _sparse_mla_backward(ctx: Any, dO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
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
    gradients = {"q": dq, "kv": dkv, "attn_sink": None if x.attn_sink is None else d_sink}
    of_values = [None for _ in (*SPARSE_MLA_FWD.parameters, "backend")]
    return (*[gradients.get(operand.name) for operand in SPARSE_MLA_FWD.operands], *of_values)


def _no_double_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise DoubleBackwardError(
        "mla_bwd: no gradient of a gradient is available; the backward of sparse_mla cannot be "
        "differentiated (create_graph=True)"
    )


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

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if spec is SPARSE_MLA_FWD:
            _save_for_backward(ctx, inputs, output)

    def no_backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UnsupportedError(f"{spec.operation}: no gradient is available")

    backwards: dict[Operation, Callable[..., Any]] = {
        SPARSE_MLA_FWD.operation: _sparse_mla_backward,
        MLA_BWD.operation: _no_double_backward,
    }
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backwards.get(spec.operation, no_backward)),
    }
    return type(f"{spec.operation}_function", (_SingleLevelFunction,), members)


def has_tangent(value: object) -> bool:
    """Whether forward-mode AD wants a derivative along `value`."""
    return (
        isinstance(value, Tensor)
        and forward_ad._current_level >= 0
        and forward_ad.unpack_dual(value, level=0).tangent is not None
    )


def autograd_kernel(spec: OpSpec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What the dispatcher calls where gradients are recorded, for an operation with outputs."""
    function = _function(spec, op)

    def run(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        if any(has_tangent(value) for value in arguments):
            raise UnsupportedError(
                f"{spec.operation}: forward-mode AD (torch.func.jvp, jacfwd, "
                "torch.autograd.forward_ad) is not available; reverse mode is, where an "
                "operation has a gradient"
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            with enable_single_level_autograd_function():
                return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return run
