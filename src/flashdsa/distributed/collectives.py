"""All-gathers and sums over a group, as functional collectives that compilers and tools see.

The functional ops of torch are called by their raw names, which are the same in every torch that is
supported; the Python wrappers around them were renamed. A group of one rank never communicates.
Small messages go over the CPU (`exchange`): no GPU waits for them.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from flashdsa.distributed.group import Group, serves
from flashdsa.errors import RankError, UnsupportedError

CPU = torch.device("cpu")
TAG = 0x0D5A
"""Tag of these messages; a program's own have others."""
_own: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""Connections made here, of groups that have none for the CPU (NCCL alone).

INVARIANT: a group is in it on every rank or on none, since all ranks make a group's first exchange
together. The key is the group itself: one that is made again, under its old name, starts anew.
"""
# Connections that outlive the interpreter end the process by std::terminate, now and then.
atexit.register(_own.clear)


def exchange(mine: Tensor, group: dist.ProcessGroup, call: str) -> Tensor:
    """mine [n] of the CPU -> [ranks, n], in the order of ranks; the same n and dtype everywhere.

    From each rank to each, and not as a collective: so it is known which rank does not answer.

    Raises:
        RankError: other ranks died, or do not come in the group's timeout.
    """
    here, size = group.rank(), group.size()
    others = [rank for rank in range(size) if rank != here]
    rows = mine.repeat(size, 1)
    sent, received = {}, {}
    rank = None
    try:
        backend = _cpu_backend(group)
        for rank in others:
            received[rank] = backend.recv([rows[rank]], rank, TAG)
            sent[rank] = backend.send([mine], rank, TAG)
        for rank in others:
            received[rank].wait()
            del received[rank]
        for rank in others:
            sent[rank].wait()
    except UnsupportedError:
        raise
    except RuntimeError as failure:
        silent = [] if rank is None else [rank]
        if rank in received and "Timed out" in str(failure):
            silent = [other for other, work in received.items() if not _has_come(work)]
        raise lost_rank(call, here, size, silent, failure) from failure
    return rows


def _has_come(received: Any) -> bool:
    """Whether the message is there, now that the timeout is over."""
    try:
        received.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def lost_rank(
    call: str, rank: int, size: int, silent: Sequence[int], failure: Exception
) -> RankError:
    """The error of `rank` of `size`: `silent`, the ranks that do not answer, as far as known."""
    silent = silent or ([1 - rank] if size == 2 else [])
    who = ranks_text(silent) if silent else "another rank"
    why = re.sub(r"^\[\S+\] ", "", str(failure).partition("\n")[0])
    return RankError(f"{call}: no answer from {who} (this is rank {rank} of {size}): {why}")


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _cpu_backend(group: dist.ProcessGroup) -> Any:
    """The group's own backend for the CPU, or one beside it, of gloo, over the group's store."""
    if serves(group, "cpu"):
        return group._get_backend(CPU)
    if group not in _own:
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "mesh: expected a group with a backend for the CPU, since this torch has no gloo; "
                f"got {dist.get_backend(group)} alone"
            )
        store = PrefixStore("flashdsa", group.get_group_store())
        _own[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), _timeout(group))
    return _own[group]


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long the group's own collectives wait."""
    options = group._get_backend(group._device_types[0]).options
    timeout: timedelta = options._timeout
    return timeout


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
