"""Small messages among the ranks of a group, over the CPU: no GPU waits for them."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from flashdsa.distributed.group import serves
from flashdsa.errors import UnsupportedError

CPU = torch.device("cpu")
_own: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""Connections made here, of groups that have none for the CPU (NCCL alone).

INVARIANT: a group is in it on every rank or on none, since all ranks make a group's first exchange
together. The key is the group itself: one that is made again, under its old name, starts anew.
"""
# Connections that outlive the interpreter end the process by std::terminate, now and then.
atexit.register(_own.clear)


def exchange(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """mine [n] of the CPU -> [ranks, n], in the order of ranks; the same n and dtype everywhere."""
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    _cpu_backend(group).allgather([rows], [mine]).wait()
    return torch.stack(rows)


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
