"""The fused indexer on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as once
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.indexer.clusters import (
    Clusters,
    clusters_at_once,
    clusters_for,
    clusters_of,
)
from flashdsa.backends.indexer.pairs_or_rows import MOST_CTAS_OF_A_PAIR, with_pairs
from flashdsa.backends.indexer.row_splits import RowSplits, Table
from flashdsa.backends.indexer.tensors import (
    as_read,
    slots_of_tokens,
    values_are_checked,
)
from flashdsa.backends.indexer.two_launches import with_scores_apart
from flashdsa.backends.memory import written_apart
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import By, SelectPlan
from flashdsa.kernels.indexer.sizes import MOST_DEALT
from flashdsa.kernels.indexer.sm90.unscored.plan import UnscoredPlan, most_pages
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands

UNEVEN_PAGES = {1: 88, 2: 176, 3: 264, 4: 256, 5: 320, 6: 384, 7: 448, 8: 704}
"""Pages of the longest row that a table has room for, by the CTAs of a cluster, from which it may
pay that the lengths decide who gets which row."""
UNEVEN_OF_FEW, UNEVEN_OF_MANY = 72, 352
"""The same of larger clusters, a CTA, and of clusters of two, of which each has several rows."""
REFUSALS = (TypeError, ValueError, BufferError)
"""Errors of a compiled function before it launches, for tensors that it was not compiled for."""
LEAST_SHARING = 3
"""CTAs of a cluster from which clusters share long rows, where lengths decide. Smaller ones can
merge too little: there the CTAs of a long row select alone."""
SHARING, KEPT_SIZES = 8, (6, 7)
"""CTAs of the clusters that share rows in place of larger ones, which are too few to be given out,
and of smaller ones: a long row gets more CTAs. Clusters of `KEPT_SIZES` share rows themselves: rows
of equal lengths, a few more than the clusters of eight, would take two rounds."""
MANY_SHARING, MANY_ROWS = 4, 0.9
"""The same in place of clusters of two, of which each has several rows: up to so many rows for each
SM."""


def bind(
    spec: KernelSpec,
    unscored: KernelSpec | None,
    runner: Runner,
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    table_page_size: int,
    check: bool,
) -> Callable[[Sequence[Any]], None]:
    """Write each row's best token ids into `topk_indices`, on the current stream.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        spec: the architecture's kernel. unscored: its kernel for tables in which no row has more
            than `topk` tokens, unless they are `sorted`; None: it has none.
        positions: an id is the token's position in its row, not its slot.
        table_page_size: tokens that an entry of the block table names; the table of 2 to 32 is
            spelt out as slots, 4 bytes a token beside the 132 that are read of each.
        check: with FLASHDSA_CHECK=1 bad lengths and page ids are errors, which waits for the
            device (and is left out while a CUDA graph is captured); otherwise lengths are clamped
            and tokens of bad pages are never emitted.
    """
    q_index_fp8, cache, _, seq_lens, block_table, topk_indices = operands[:6]
    rows, signed = seq_lens.numel(), cache.dtype is torch.int8
    gathers = table_page_size < PAGE_SIZE
    read = partial(as_read, gathers)
    in_place = all(map(is_, operands[:6], read(*operands[:6])))
    if rows and cache.numel():
        num_heads, topk = q_index_fp8.shape[1], topk_indices.shape[1]
        requests = block_table.shape[0]
        function, *numbers = choose_launch(
            spec, runner, num_heads, topk, sorted, positions, rows, requests, gathers
        )
    else:
        function, numbers, unscored = _write_none, [], None
    narrow = -1
    if unscored is not None and not sorted:
        # The calls' tables may have any width, so the kernel is loaded where one needs it.
        narrow = most_pages(topk_indices.shape[1])
        load_unscored = once(partial(runner.function, unscored, UnscoredPlan(positions)))

    def launch(
        q_index_fp8: Tensor,
        cache: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        pages = cache.view(torch.uint8) if signed else cache
        if 1 < table_page_size < PAGE_SIZE:
            block_table = slots_of_tokens(block_table, table_page_size, cache.shape[0])
        if block_table.shape[1] <= narrow:
            load_unscored()(seq_lens, block_table, topk_indices, cache.shape[0])
        else:
            function(q_index_fp8, pages, weights, seq_lens, block_table, topk_indices, *numbers)

    def serve(given: Sequence[Any]) -> None:
        tensors = given[:6] if in_place else read(*given[:6])
        try:
            launch(*tensors)
        except REFUSALS:  # nothing was launched
            launch(*read(*tensors))

    run = written_apart(serve, operands, "topk_indices")
    if not check or not Settings.from_environment().check:
        return runner.on_device(run)

    def serve_checked(given: Sequence[Any]) -> None:
        _, cache, _, seq_lens, block_table = given[:5]
        if values_are_checked():
            values = seq_lens.cpu(), block_table.cpu()
            check_values(*values, cache.shape[0], table_page_size)
        run(given)

    return runner.on_device(serve_checked)


def _write_none(*operands: Tensor) -> None:
    """Write -1 for a call without pages or without rows."""
    operands[-1].fill_(-1)


class Launch(NamedTuple):
    """Launch of a number of rows: `function` takes the operation's tensors and the numbers.

    It launches on the tensors' device and torch's current stream of that device. It first holds
    them against what the kernel was compiled for and raises one of `REFUSALS`. It does not take
    a cache without pages.
    """

    function: Callable[..., Any]
    num_clusters: int
    cluster_size: int


def choose_launch(
    spec: KernelSpec,
    runner: Runner,
    num_heads: int,
    topk: int,
    sorted: bool,
    positions: bool,
    rows: int,
    requests: int = 0,
    gathers: bool = False,
) -> Launch:
    """Choose the launch of calls of these sizes, at least one row; compile or load the kernel.

    Args:
        topk: at most what the widest of the spec's kernels writes.
        requests: of the rows, each 1 to 4 neighbouring ones; 0: as many as rows.
        gathers: the table has a slot for each token.
    """
    kinds = num_heads, positions, gathers
    widths = [x.topk for x in spec.plans if (x.num_heads, x.positions, x.gathers) == kinds]
    if topk not in widths:
        width = min(width for width in widths if width > topk)
        wide = choose_launch(
            spec, runner, num_heads, width, True, positions, rows, requests, gathers
        )
        function = partial(_launch_wide, wide.function, runner, rows, topk, width)
        return wide._replace(function=function)
    # Sorting takes so long that one kernel serves all batches.
    plan = replace(
        spec.plans[0],
        num_heads=num_heads,
        topk=topk,
        sorted=sorted,
        positions=positions,
        **({"gathers": True} if gathers else {}),
    )
    together = rows in (2 * requests, 4 * requests)
    pairs = _in_pairs(spec, plan) if together else None
    if pairs is None:
        return _choose(spec, runner, plan, rows)
    launch = _choose_pairs(spec, runner, pairs, rows // 2)
    if launch is None:
        launch = _choose(spec, runner, plan, rows)
        either = with_pairs(runner, spec, pairs, launch.function, rows)
        launch = launch._replace(function=either)
    sizes = num_heads, topk, positions, rows
    return launch._replace(function=with_scores_apart(runner, launch.function, *sizes))


def _launch_wide(
    function: Callable[..., Any],
    runner: Runner,
    rows: int,
    topk: int,
    width: int,
    *arguments: Any,
) -> None:
    """Write the best `topk` by a kernel that writes the best `width`, in the order of their scores.

    Args:
        arguments: of `Launch.function`.

    Raises:
        ValueError: the ids are not what calls of these sizes have; nothing is launched.
    """
    *operands, topk_indices, number, size = arguments
    if topk_indices.shape != (rows, topk) or not topk_indices.is_contiguous():
        raise ValueError(f"topk_indices: expected shape {[rows, topk]}, without gaps")
    ids = runner.empty(rows, width, dtype=torch.int32)
    function(*operands, ids, number, size)
    topk_indices.copy_(ids[:, :topk])


def _in_pairs(spec: KernelSpec, plan: SelectPlan) -> SelectPlan | None:
    """The plan that scores two rows of a request together; None: no kernel does it."""
    choices = plan.num_heads, plan.topk, plan.sorted, plan.positions
    found: SelectPlan
    for found in spec.plans:
        same = choices == (found.num_heads, found.topk, found.sorted, found.positions)
        if found.rows is By.PAIRS and same:
            return found
    return None


def _choose_pairs(
    spec: KernelSpec, runner: Runner, pairs: SelectPlan, num_pairs: int
) -> Launch | None:
    """Choose the launch of rows in pairs; None: they are so few that more than two CTAs would share
    one."""
    clusters = clusters_for(runner, pairs, num_pairs)
    if clusters.size > MOST_CTAS_OF_A_PAIR:
        return None
    launch = RowSplits(runner, spec, Table(0, pairs)).launch
    return Launch(launch, clusters_at_once(runner, pairs)[clusters.size], clusters.size)


def _choose(spec: KernelSpec, runner: Runner, plan: SelectPlan, rows: int) -> Launch:
    clusters = clusters_for(runner, spec.plans[0], rows)
    if plan.sorted:
        clusters = clusters.without_splits()
        return Launch(runner.function(spec, plan), clusters.number, clusters.size)
    if clusters.num_splits > 1 and rows <= MOST_DEALT:
        dealt = Table(plan.sharing.split_pages, replace(plan, rows=By.CLUSTERS))
        few = RowSplits(runner, spec, Table(0, plan), dealt)
        return Launch(few.launch, clusters_at_once(runner, plan)[clusters.size], clusters.size)
    number = clusters_at_once(runner, plan)[clusters.size]
    many = RowSplits(runner, spec, *_tables(runner, plan, clusters, rows))
    return Launch(many.launch, number, clusters.size)


def _tables(runner: Runner, plan: SelectPlan, clusters: Clusters, rows: int) -> list[Table]:
    """The kernels of batches in which the lengths decide, where the table is wide enough for that.

    Args:
        clusters: for every row one, if they are enough.
    """
    alone, shared = replace(plan, rows=By.CTAS), replace(plan, rows=By.CLUSTERS, by_lengths=True)
    size, several = clusters.size, rows > clusters.number
    narrow = Table(0, alone if several else plan)
    least = UNEVEN_PAGES.get(size, UNEVEN_OF_FEW * size)
    if not several and size < LEAST_SHARING:
        return [narrow, Table(least, alone)]
    sharing = SHARING
    if several and size < MANY_SHARING:
        sharing, least = MANY_SHARING, UNEVEN_OF_MANY
    others = None if size in KEPT_SIZES else clusters_of(runner, plan, sharing)
    if several and (others is None or rows > MANY_ROWS * clusters_at_once(runner, plan)[1]):
        return [narrow]
    return [narrow, Table(least, shared, others)]
