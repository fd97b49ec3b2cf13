"""The fused indexer on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.sm90.clusters import Clusters, clusters_for, without_teams
from flashdsa.backends.sm90.workspace import Workspace, allocate
from flashdsa.errors import UnsupportedError
from flashdsa.jit.functions import indexer_function
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.settings import checks_values

COPY_ALIGNMENT = 16
"""Bytes, of the addresses that TMA and bulk copies read from."""


def topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    sorted: bool,
    check: bool,
) -> None:
    """Write each row's best token ids into `topk_indices`, on the current stream.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        check: with FLASHDSA_CHECK=1 bad lengths and page ids are errors, which waits for the
            device (and is left out while a CUDA graph is captured); otherwise lengths are clamped
            and tokens of bad pages are never emitted.
    """
    require_layout(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
    prepared = prepare(q_index_fp8.device, q_index_fp8.shape[1], topk_indices.shape[1], sorted)
    prepared.checked(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices, check
    )


def require_layout(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """What the kernel takes beyond the operation's own checks: aligned addresses, and no gaps but
    between the rows of `block_table`.

    Raises:
        UnsupportedError: names the argument.
    """
    tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
    if all([_takes(x, x is block_table) for x in tensors]) and not (
        (q_index_fp8.data_ptr() | k_index_cache_fp8.data_ptr() | weights.data_ptr())
        % COPY_ALIGNMENT
    ):
        return
    names = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table")
    for name, tensor in zip((*names, "topk_indices"), tensors, strict=True):
        if not _takes(tensor, tensor is block_table):
            raise UnsupportedError(
                f"{name}: the Hopper kernel takes contiguous tensors only; "
                f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if name in names[:3] and tensor.data_ptr() % COPY_ALIGNMENT:
            raise UnsupportedError(
                f"{name}: the Hopper kernel needs addresses aligned to {COPY_ALIGNMENT} bytes; "
                f"got {tensor.data_ptr():#x}"
            )


def _takes(tensor: Tensor, rows_apart: bool) -> bool:
    return tensor.is_contiguous() or (rows_apart and tensor.stride(-1) == 1)


class Prepared(NamedTuple):
    """Calls of fixed sizes on one device, of tensors without gaps.

    Attributes:
        launch: the operation's six tensors, unchecked.
        checked: the same and `check`, see `topk_indexer`; addresses are checked too.
    """

    launch: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    checked: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], None]


@lru_cache
def prepare(device: torch.device, num_heads: int, topk: int, sorted: bool = False) -> Prepared:
    """Compile or load the kernel of these sizes, and ask the device how many clusters it runs.

    Teams of clusters share rows through a workspace. Launches on one stream share it, as they
    follow each other; while a CUDA graph is captured it is the launch's own, and its counters are
    cleared by the graph: replays on any stream cannot meet another launch's.

    NOTE: a launch has 6 us of host time, of which TVM-FFI takes most: hence few attributes, no
    calls, and a dictionary of what was chosen for a number of rows.
    """
    plan = IndexerPlan(num_heads=num_heads, topk=topk, sorted=sorted)
    function = indexer_function(plan)
    index: int = torch.cuda.current_device() if device.index is None else device.index
    several_devices = torch.cuda.device_count() > 1
    current_device = torch.cuda.current_device
    is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    uint8 = torch.uint8
    num_ctas = torch.cuda.get_device_properties(index).multi_processor_count
    known: dict[int, Clusters] = {}
    chosen = known.get
    clusters_for(index, 1)
    untouched = allocate(index, plan, 1)
    by_stream: dict[int, Workspace] = {}
    kept = by_stream.get

    def launch(
        q_index_fp8: Tensor,
        k_index_cache_fp8: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        if k_index_cache_fp8.dtype is not uint8:
            k_index_cache_fp8 = k_index_cache_fp8.view(uint8)
        if several_devices and current_device() != index:
            with torch.cuda.device(index):
                launch(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
            return
        rows = seq_lens.numel()
        clusters = chosen(rows)
        if clusters is None or not k_index_cache_fp8.numel():
            if not rows or not k_index_cache_fp8.numel():
                topk_indices.fill_(-1)
                return
            clusters = clusters_for(index, rows)
            clusters = known[rows] = without_teams(clusters) if sorted else clusters
        num_clusters, cluster_size, teams = clusters
        workspace = untouched
        if teams > 1:
            capturing = is_capturing()
            own = None if capturing else kept(current_stream(index))
            if own is None:
                own = allocate(index, plan, num_ctas)
                if not capturing:
                    by_stream[current_stream(index)] = own
            workspace = own
        function(
            q_index_fp8,
            k_index_cache_fp8,
            weights,
            seq_lens,
            block_table,
            topk_indices,
            workspace[0],
            workspace[1],
            num_clusters,
            cluster_size,
            teams,
        )

    def checked(
        q_index_fp8: Tensor,
        k_index_cache_fp8: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
        check: bool,
    ) -> None:
        addresses = q_index_fp8.data_ptr() | k_index_cache_fp8.data_ptr() | weights.data_ptr()
        if addresses % COPY_ALIGNMENT:
            require_layout(
                q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
            )
        if check and checks_values() and not is_capturing():
            check_values(seq_lens.cpu(), block_table.cpu(), k_index_cache_fp8.shape[0])
        launch(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)

    return Prepared(launch, checked)
