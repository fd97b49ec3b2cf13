"""All-gathers and sums over a group, as functional collectives that compilers and tools see.

The functional ops of torch are called by their raw names, which are the same in every torch that is
supported; the Python wrappers around them were renamed. A group of one rank never communicates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdsa.distributed.channel import lost_rank
from flashdsa.distributed.group import Group

_OPS = torch.ops._c10d_functional


def as_bytes(tensor: Tensor) -> Tensor:
    """fp8 as uint8, which torch fills, gathers and sends; other dtypes as they are."""
    one_byte = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.view(torch.uint8) if one_byte else tensor


def of_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `as_bytes`. A view of another dtype has no gradient: only where it is one."""
    return values if values.dtype == dtype else values.view(dtype)


def start_all_gather(local: Tensor, group: Group) -> Tensor:
    """Every rank's `local` [n, ...] in the order of ranks, [size * n, ...].

    The result may be read once `wait` has returned it.
    """
    if group.size == 1:
        return local
    sent = as_bytes(local).contiguous()
    gathered = _run(group, _OPS.all_gather_into_tensor, sent, group.size, group.name)
    return of_dtype(gathered, local.dtype)


def wait(started: Tensor, group: Group) -> Tensor:
    """The result of a started collective; the current stream waits, not the host."""
    return _run(group, _OPS.wait_tensor, started)


def _run(group: Group, op: Callable[..., Tensor], *arguments: object) -> Tensor:
    """The result of `op`. Where ranks are lost the error names the call; compiled code has torch's
    own, behind the comparison of the ranks."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as failure:
        raise lost_rank(group.call, group.rank, group.size, (), failure) from failure


def all_gather(local: Tensor, group: Group) -> Tensor:
    """`start_all_gather` and `wait`."""
    return local if group.size == 1 else wait(start_all_gather(local, group), group)


def all_to_all(parts: Tensor, group: Group) -> Tensor:
    """Part r of `parts` [size * n, ...] goes to rank r; part r of the result came from there."""
    if group.size == 1:
        return parts
    splits = [parts.shape[0] // group.size] * group.size
    sent = as_bytes(parts).contiguous()
    received = _run(group, _OPS.all_to_all_single, sent, splits, splits, group.name)
    return of_dtype(wait(received, group), parts.dtype)


def reduce_scatter(parts: Tensor, group: Group) -> Tensor:
    """This rank's part [n, ...] of the sum of every rank's `parts` [size * n, ...].

    The library adds in the dtype of `parts` and in its own order.
    """
    if group.size == 1:
        return parts
    parts = parts.contiguous()
    scattered = _run(group, _OPS.reduce_scatter_tensor, parts, "sum", group.size, group.name)
    return wait(scattered, group)


def reduce_scatter_in_order(parts: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Do `reduce_scatter`, added in `dtype` from rank 0 upwards: the same bits whatever the library
    does. `parts` travel in their own dtype."""
    received = all_to_all(parts, group)
    shares = received.unflatten(0, (group.size, len(received) // group.size)).unbind(0)
    total: Tensor = shares[0].to(dtype, copy=True)
    for share in shares[1:]:
        total += share
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are added: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
