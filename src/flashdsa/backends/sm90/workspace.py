"""The indexer's device memory between its CTAs, kept for every stream that has called it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan


class Workspace(NamedTuple):
    """See `launch_indexer`; launches on one stream share it, as they follow each other."""

    rows: int
    arrivals: Tensor
    lists: Tensor
    num_ctas: int


_kept: dict[tuple[int, int, int], Workspace] = {}
_ROWS_AT_LEAST = 1024


def workspace_for(device: int, rows: int, plan: IndexerPlan) -> Workspace:
    """The workspace of the device's current stream, enlarged when `rows` need it.

    While a CUDA graph is captured it is the graph's own, and its counters are cleared by the
    graph: replays on any stream cannot meet another launch's.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        return _allocate(device, rows, plan)
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    key = (device, stream, plan.list_capacity)
    kept = _kept.get(key)
    if kept is None or kept.rows < rows:
        kept = _kept[key] = _allocate(device, max(rows, _ROWS_AT_LEAST), plan)
    return kept


def _allocate(device: int, rows: int, plan: IndexerPlan) -> Workspace:
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return Workspace(
        rows,
        torch.zeros(rows, dtype=torch.int32, device=f"cuda:{device}"),
        torch.empty(
            plan.slots(num_ctas), plan.slot_words, dtype=torch.int32, device=f"cuda:{device}"
        ),
        num_ctas,
    )
