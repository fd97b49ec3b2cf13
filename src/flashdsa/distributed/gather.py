"""An all-gather with a gradient: the ordered sum of what every rank gives to a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdsa.distributed.agree import agreed
from flashdsa.distributed.collectives import all_gather, reduce_scatter_in_order, sum_dtype
from flashdsa.distributed.group import Group


class _AllGather(torch.autograd.Function):
    """An all-gather whose gradient is the ordered sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(agreed(local, {}, "local", "all_gather", group), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        total = reduce_scatter_in_order(gradient, ctx.group, sum_dtype(gradient.dtype))
        return total.to(gradient.dtype), None


def all_gather_differentiable(local: Tensor, group: Group) -> Tensor:
    """`all_gather` with a gradient: the shares of all ranks, in their dtype, added in rank order in
    fp32 (fp64 for fp64)."""
    apply: Any = _AllGather.apply
    gathered: Tensor = apply(local, group)
    return gathered
