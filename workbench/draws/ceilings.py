"""Ceilings of a draw's work: products or reading, and the time of each on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import num_rows
from flashdsa.bench.cases import Task, products_ceiling, reading_ceiling
from flashdsa.bench.result import OURS
from flashdsa.bench.timer import Times
from workbench.draws.timing import FULL, DrawTimer
from workbench.draws.two_sources import Source

MACHINE = 900e12 / 4.5e12
"""Products a byte of device memory, of an H200: more, and products bind."""


def bound(task: Task, q: Tensor, sources: Iterable[Source]) -> Task:
    """The task of an attention whose work is its products; its ceiling is reading instead where
    that takes longer: q, O, and each row that a query names once."""
    bytes_read = 2.0 * q.element_size() * q.numel()
    for one in sources:
        rows = num_rows(one.kv)
        valid = one.valid(slice(None)) & (one.ids < rows)
        named = torch.zeros(rows, dtype=torch.bool, device=one.ids.device)
        named[one.ids[valid].long()] = True
        bytes_read += float(named.sum()) * one.kv.shape[-1] * one.kv.element_size()
    if task.ceiling.unit == "FLOP" and task.work >= MACHINE * bytes_read:
        return task
    return replace(task, work=bytes_read, ceiling=reading_ceiling(q.device.type))


def time_ceilings() -> dict[str, Times]:
    """Hot times of both ceilings on this GPU, by name."""
    found = {}
    for one in (products_ceiling("cuda"), reading_ceiling("cuda")):
        found[one.name] = DrawTimer(FULL, 0, False).in_turns({OURS: one.call}, "hot", 1)[OURS]
    return found
