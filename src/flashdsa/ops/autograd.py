"""Gradients: the backward of `sparse_mla_fwd`, and errors where an operation has none."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flashdsa.errors import DoubleBackwardError, UnsupportedError
from flashdsa.operands import SparseMlaOperands
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.table import MLA_BWD, SPARSE_MLA_FWD


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    operands, ctx.parameters, ctx.backend = SPARSE_MLA_FWD.unpack(inputs)
    ctx.save_for_backward(*operands, *output)
    _, lse = output
    ctx.mark_non_differentiable(lse)


def _sparse_mla_backward(ctx: Any, dO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's inputs: q, kv and attn_sink, in the inputs' dtypes."""
    *operands, out, lse = ctx.saved_tensors
    x = SparseMlaOperands(*operands)
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
        ctx.backend,
    )
    gradients = {"q": dq, "kv": dkv, "attn_sink": None if x.attn_sink is None else d_sink}
    of_values = [None for _ in (*SPARSE_MLA_FWD.parameters, "backend")]
    return (*[gradients.get(operand.name) for operand in SPARSE_MLA_FWD.operands], *of_values)


def _no_double_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise DoubleBackwardError(
        "mla_bwd: no gradient of a gradient is available; the backward of sparse_mla cannot be "
        "differentiated (create_graph=True)"
    )


def register_gradients(spec: OpSpec, library: torch.library.Library) -> None:
    """Give a defined operation that returns tensors its backward, or the error in its place."""
    name = f"flashdsa::{spec.operation}"

    def no_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UnsupportedError(f"{spec.operation}: no gradient is available")

    if spec is SPARSE_MLA_FWD:
        torch.library.register_autograd(
            name, _sparse_mla_backward, setup_context=_save_for_backward, lib=library
        )
    elif spec.outputs:
        backward = _no_double_backward if spec is MLA_BWD else no_gradient
        torch.library.register_autograd(name, backward, lib=library)
