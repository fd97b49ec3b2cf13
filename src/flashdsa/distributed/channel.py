"""Small messages among the ranks of a group, over the CPU: no GPU waits for them."""

from __future__ import annotations

import atexit
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from flashdsa.distributed.group import serves
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
