"""Device memory by which teams of clusters share long rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan


class Workspace(NamedTuple):
    """See `launch_indexer`; in the form that costs TVM-FFI the least."""

    arrivals: Any
    slots: Any


def allocate(device: int, plan: IndexerPlan, num_ctas: int) -> Workspace:
    """For launches of up to so many CTAs that follow each other."""
    import tvm_ffi

    where = f"cuda:{device}"
    arrivals = torch.zeros(num_ctas, dtype=torch.int32, device=where)  # no more rows than CTAs
    slots = torch.empty(num_ctas, plan.slot_words, dtype=torch.int32, device=where)
    return Workspace(tvm_ffi.from_dlpack(arrivals), tvm_ffi.from_dlpack(slots))
