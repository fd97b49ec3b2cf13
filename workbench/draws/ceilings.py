"""Ceilings of a draw's work: products or reading, and the time of each on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from flashdsa.bench.cases import Task, products_ceiling, reading_ceiling
from flashdsa.bench.result import OURS
from flashdsa.bench.timer import Times
from workbench.draws.timing import FULL, DrawTimer

MACHINE = 900e12 / 4.5e12
"""Products a byte of device memory, of an H200: more, and products bind."""


def bound(task: Task, q: Tensor, lists: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> Task:
    """The task of an attention whose work is its products; its ceiling is reading instead where
    that takes longer: q, O, and each row that a query names once.

    Args:
        lists: rows or pages, ids (S, slots) and lengths (S,) of each source.
    """
    bytes_read = 2.0 * q.element_size() * q.numel()
    for kv, ids, lengths in lists:
        rows = kv.shape[0] if kv.dim() == 2 else kv.shape[0] * kv.shape[1]
        slots = torch.arange(ids.shape[1], device=ids.device)
        valid = (ids >= 0) & (ids < rows)
        valid &= True if lengths is None else slots < lengths[:, None]
        named = torch.zeros(rows, dtype=torch.bool, device=ids.device)
        named[ids[valid].long()] = True
        bytes_read += float(named.sum()) * kv.shape[-1] * kv.element_size()
    if task.ceiling.unit == "FLOP" and task.work >= MACHINE * bytes_read:
        return task
    return replace(task, work=bytes_read, ceiling=reading_ceiling(q.device.type))


def time_ceilings() -> dict[str, Times]:
    """Hot times of both ceilings on this GPU, by name."""
    found = {}
    for one in (products_ceiling("cuda"), reading_ceiling("cuda")):
        found[one.name] = DrawTimer(FULL, 0, False).in_turns({OURS: one.call}, "hot", 1)[OURS]
    return found
