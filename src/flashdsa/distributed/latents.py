"""The kv rows of all ranks: gathered at once, with a gradient, or by a handle that other work
overlaps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.dispatch.checks import require_dtype, require_tensor
from flashdsa.dispatch.dtypes import sum_dtype
from flashdsa.distributed.agree import agreed, agreement
from flashdsa.distributed.collectives import (
    all_gather,
    reduce_scatter_in_order,
    start_all_gather,
    wait,
)
from flashdsa.distributed.group import (
    Group,
    describe,
    group_of,
    process_group,
    require_device_of_group,
)
from flashdsa.errors import ArgumentValueError


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


class GatheredLatents:
    """An all-gather of kv that is under way; `wait` gives the gathered rows."""

    def __init__(self, started: Tensor, group: Group) -> None:
        """Keep what `start_all_gather` returned."""
        self._rows, self._group, self._waiting = started, group, group.size > 1

    def require_rows_of(self, kv: Tensor, dtype: torch.dtype) -> None:
        """Raise unless these are the rows of all ranks in `dtype`, `kv` (S_local, d_qk) being this
        one's."""
        require_dtype("kv_gathered", self._rows, dtype)
        rows, *one = self._rows.shape
        expected = [self._group.size * kv.shape[0], kv.shape[1]]
        if [rows, *(one[1:] if one[:1] == [1] and len(one) == 2 else one)] != expected:
            raise ArgumentValueError(
                f"kv_gathered: expected shape [ranks * S_local, d_qk] = {expected}, as kv_local "
                f"says; got shape {list(self._rows.shape)}"
            )

    def wait(self) -> Tensor:
        """kv of all ranks, [ranks * S_local, d_qk], without a gradient. The host does not wait."""
        if self._waiting:
            self._rows, self._waiting = wait(self._rows, self._group), False
        return self._rows


def gather_latents(
    kv_local: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, async_op: bool = False
) -> Tensor | GatheredLatents:
    """The kv rows of all ranks, one shard after another.

    Args:
        kv_local: (S_local, d_qk), as many rows on every rank; any dtype.
        mesh: a 1-D DeviceMesh or a ProcessGroup.
        async_op: return at once with a handle, for `kv_gathered=` of
            `context_parallel_sparse_mla`, so that other work hides the transfer.

    Returns:
        (ranks * S_local, d_qk), differentiable (gradients of all ranks are added in rank order in
        fp32); with `async_op` a `GatheredLatents`, which has no gradient of its own.

    Raises:
        TypeError, ValueError: wrong arguments, or shapes or dtypes that differ between ranks.
    """
    group = group_of(mesh, "gather_latents")
    if not torch.compiler.is_compiling():
        with agreement(group, kv_local) as facts:
            _check_rows(kv_local, process_group(mesh))
            facts |= {"kv_local": describe(kv_local), "async_op": str(bool(async_op))}
            if not async_op:
                facts["gradient"] = str(torch.is_grad_enabled() and kv_local.requires_grad)
    if async_op:
        local = agreed(kv_local.detach(), {}, "kv_local", "gather_latents", group)
        return GatheredLatents(start_all_gather(local, group), group)
    return all_gather_differentiable(kv_local, group)


def _check_rows(kv_local: Tensor, group: dist.ProcessGroup) -> None:
    require_tensor("kv_local", kv_local)
    if not kv_local.dim():
        raise ArgumentValueError("kv_local: expected shape [S_local, d_qk]; got a single number")
    require_device_of_group("kv_local", kv_local.device, group)
