"""The fused indexer on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.sm90.clusters import clusters_for, without_teams
from flashdsa.backends.sm90.device import values_are_checked
from flashdsa.backends.sm90.workspace import Workspace, allocate
from flashdsa.errors import UnsupportedError
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.operands import TopkIndexerOperands


def topk_indexer(operands: TopkIndexerOperands, *, sorted: bool, check: bool) -> None:
    """Write each row's best token ids into `topk_indices`, on the current stream.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        check: with FLASHDSA_CHECK=1 bad lengths and page ids are errors, which waits for the
            device (and is left out while a CUDA graph is captured); otherwise lengths are clamped
            and tokens of bad pages are never emitted.
    """
    require_layout(*operands)
    if check and values_are_checked():
        from flashdsa.backends.cpu.indexer import check_values

        num_pages = operands.k_index_cache_fp8.shape[0]
        check_values(operands.seq_lens.cpu(), operands.block_table.cpu(), num_pages)
    queries = operands.q_index_fp8
    prepared = prepare(queries.device, queries.shape[1], operands.topk_indices.shape[1], sorted)
    prepared.launch(*operands)


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
        % BULK_ALIGNMENT
    ):
        return
    names = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table")
    for name, tensor in zip((*names, "topk_indices"), tensors, strict=True):
        if not _takes(tensor, tensor is block_table):
            raise UnsupportedError(
                f"{name}: the Hopper kernel takes contiguous tensors only; "
                f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if name in names[:3] and tensor.data_ptr() % BULK_ALIGNMENT:
            raise UnsupportedError(
                f"{name}: the Hopper kernel needs addresses aligned to {BULK_ALIGNMENT} bytes; "
                f"got {tensor.data_ptr():#x}"
            )


def _takes(tensor: Tensor, rows_apart: bool) -> bool:
    return tensor.is_contiguous() or (rows_apart and tensor.stride(-1) == 1)


class Ready(NamedTuple):
    """How so many rows are launched: `function` takes the operation's tensors and the numbers.

    It launches on the tensors' device and torch's current stream there. Before, it holds them
    against what the kernel was compiled for (see `launch_again` in ops/indexer_launch.py) and
    raises. A cache without pages is not for it.
    """

    function: Callable[..., Any]
    num_clusters: int
    cluster_size: int


class Prepared:
    """Calls of fixed sizes on one device; see `prepare`."""

    def __init__(self, device: int, plan: IndexerPlan) -> None:
        """Compile or load the plan's kernel."""
        self._device, self._plan = device, plan
        self._function = load(INDEXER, plan)
        self._dealt: Callable[..., Any] | None = None
        self._teams: Teams | None = None

    def launch(
        self,
        q_index_fp8: Tensor,
        k_index_cache_fp8: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        """The operation; its tensors are unchecked."""
        if not seq_lens.numel() or not k_index_cache_fp8.numel():
            topk_indices.fill_(-1)
            return
        cache = k_index_cache_fp8.view(torch.uint8)
        function, *numbers = self.ready(seq_lens.numel())
        with torch.cuda.device(self._device):  # the function's first call loads the kernel
            function(q_index_fp8, cache, weights, seq_lens, block_table, topk_indices, *numbers)

    def ready(self, rows: int) -> Ready:
        """How `rows` rows are launched; at least one."""
        clusters = clusters_for(self._device, rows)
        if clusters.number < rows and not self._plan.dealt:
            if self._dealt is None:
                self._dealt = load(INDEXER, replace(self._plan, dealt=True))
            return Ready(self._dealt, clusters.number, clusters.size)
        if clusters.teams == 1 or self._plan.sorted:
            clusters = without_teams(clusters)
            return Ready(self._function, clusters.number, clusters.size)
        if self._teams is None:
            self._teams = Teams(self._device, self._plan, self._function)
        return Ready(self._teams.launch, clusters.number, clusters.size)


@lru_cache
def prepare(device: torch.device, num_heads: int, topk: int, sorted: bool = False) -> Prepared:
    """The calls of these sizes, on this device or with no index on the current one."""
    index = torch.cuda.current_device() if device.index is None else device.index
    # Sorting takes so long that one kernel serves all batches.
    return Prepared(index, IndexerPlan(num_heads, topk, sorted=sorted, dealt=sorted))


class Teams:
    """Launches of a few rows, the long ones of which several clusters share.

    They do so through a workspace. Launches on one stream share it, as they follow each other;
    while a CUDA graph is captured it is the launch's own, and its counters are cleared by the
    graph: replays on any stream cannot meet another launch's.
    """

    def __init__(self, device: int, plan: IndexerPlan, alone: Callable[..., Any]) -> None:
        """Load nothing yet; `alone` is the kernel without teams."""
        self._device, self._alone = device, alone
        self._plan = IndexerPlan(plan.num_heads, plan.topk, teams=True)
        self._team_pages = self._plan.team_pages
        self._function: Callable[..., Any] | None = None
        self._by_stream: dict[int, Workspace] = {}

    def launch(
        self,
        q_index_fp8: Tensor,
        k_index_cache_fp8: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
        num_clusters: int,
        cluster_size: int,
    ) -> None:
        """As `Ready.function`. No row is longer than the table is wide: narrow ones need none."""
        tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
        rows = seq_lens.numel()
        if block_table.numel() < rows * self._team_pages:
            self._alone(*tensors, rows, cluster_size)
            return
        if self._function is None:
            self._function = load(INDEXER, self._plan)
        workspace = self._workspace()
        self._function(*tensors, *workspace, num_clusters, cluster_size, num_clusters // rows)

    def _workspace(self) -> Workspace:
        """Of the device's current stream, or of the launch that is captured there."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self._workspace()
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._new_workspace()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        kept = self._by_stream.get(stream)
        if kept is None:
            kept = self._by_stream[stream] = self._new_workspace()
        return kept

    def _new_workspace(self) -> Workspace:
        properties = torch.cuda.get_device_properties(self._device)
        return allocate(self._device, self._plan, properties.multi_processor_count)
