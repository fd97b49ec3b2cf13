"""Launches of the ways that serve the indexer: kernels, clusters, workspaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.indexer.choice import Call, Gpu, Kind, Way, choose, explain, gpu_of
from flashdsa.backends.indexer.tensors import require_dense_ids
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import By, SelectPlan, most_pages
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE

Launch = Callable[..., None]
"""A function of queries, the cache as bytes, weights, lengths, table and ids, called inside
`runner.launching()`. It launches on torch's current stream. It first holds the tensors against what
the kernel was compiled for, and raises one of `REFUSALS`. It takes no cache without pages."""
REFUSALS = (TypeError, ValueError, BufferError)
"""Errors of a launch before anything is launched."""


class Others(NamedTuple):
    """Launches of an architecture that are not of the fused kernel; each binds a `Launch`.

    Attributes:
        ranked: (runner, num_heads, topk, positions, sorted, rows, next_n).
        unscored: (runner, positions), of tables that are no wider than `most_pages(topk)`.
    """

    ranked: Callable[..., Launch]
    unscored: Callable[..., Launch]


class Kernels(NamedTuple):
    """The kernels of an architecture, and a call's choices among them.

    Attributes:
        indexer: the fused kernel. order: the one that sorts lists. others: None: there are none.
        gathers: the block table has a slot for each token.
    """

    indexer: KernelSpec
    order: KernelSpec
    others: Others | None
    num_heads: int
    topk: int
    sorted: bool
    positions: bool
    gathers: bool = False

    def plan(self, kind: Kind) -> SelectPlan | None:
        """The plan that selects; None: no kernel is compiled for it."""
        wanted: dict[str, Any] = {
            "num_heads": self.num_heads,
            "rows": By.CLUSTERS if kind is Kind.SHARED else By.CLUSTER,
        }
        if self.gathers:
            wanted["gathers"] = True
        plans = (p for p in self.indexer.plans if wanted.items() <= vars(p).items())
        return next(plans, None)


class Launches:
    """The launches of calls that differ in the width of the table, which chooses the way.

    A kernel is loaded when the first table needs it.
    """

    def __init__(self, kernels: Kernels, runner: Runner, rows: int, requests: int) -> None:
        """Launch nothing yet.

        Args:
            requests: of the rows, each 1 to 4 neighbouring ones.
        """
        unscored, ranks = -1, kernels.others is not None
        if ranks and not kernels.sorted:
            unscored = most_pages(kernels.topk)
        self.call = Call(rows, requests, unscored, ranks)
        self.gpu: Gpu = gpu_of(runner, kernels.indexer.plans[0])
        self._kernels, self._runner = kernels, runner
        self._page_entries = PAGE_SIZE if kernels.gathers else 1
        self._by_width: dict[int, Launch] = {}
        self._by_way: dict[Way, Launch] = {}

    def of_width(self, width: int) -> Launch:
        """The launch for a table of `width` entries a row."""
        launch = self._by_width.get(width)
        if launch is None:
            pages = width // self._page_entries
            way = choose(self.call, pages, self.gpu)
            self._runner.explain(partial(explain, self.call, pages, self.gpu))
            launch = self._by_way.get(way)
            if launch is None:
                launch = self._by_way[way] = bind_way(way, self.call, self._kernels, self._runner)
            self._by_width[width] = launch
        return launch


def bind_way(way: Way, call: Call, kernels: Kernels, runner: Runner) -> Launch:
    """Load the way's kernels; return its launch."""
    topk, positions, others = kernels.topk, kernels.positions, kernels.others
    if way.kind is Kind.UNSCORED:
        assert others is not None
        return others.unscored(runner, positions)
    if way.kind is Kind.RANKED:
        assert others is not None
        kind = kernels.num_heads, topk, positions, kernels.sorted
        return others.ranked(runner, *kind, call.rows, call.next_n)
    plan = kernels.plan(way.kind)
    assert plan is not None
    function = runner.function(kernels.indexer, plan)
    workspace = _workspace(runner, plan) if plan.splits else tuple
    numbers = int(not positions), way.clusters, way.size
    if not kernels.sorted:
        no_words = runner.empty(0, 0, dtype=torch.int32)
        return partial(_launch, function, no_words, workspace, numbers)
    order = bind_order(runner, kernels.order, topk)
    empty_words = runner.allocator(call.rows, topk, dtype=torch.int32)

    def launch_and_order(*tensors: Tensor) -> None:
        ids = tensors[-1]
        require_dense_ids(ids, call.rows, topk)
        words = empty_words()
        _launch(function, words, workspace, numbers, *tensors)
        order(ids, words)

    return launch_and_order


def bind_order(runner: Runner, spec: KernelSpec, topk: int) -> Callable[..., None]:
    """Load the narrowest kernel for lists of `topk` ids: a function of `launch_order`'s tensors."""
    wide_enough = (plan for plan in spec.plans if plan.width >= topk)
    return runner.function(spec, min(wide_enough, key=attrgetter("width")))


def _launch(
    function: Launch,
    words: Tensor,
    workspace: Callable[[], tuple[Any, ...]],
    numbers: tuple[int, ...],
    *tensors: Tensor,
) -> None:
    """Launch the fused kernel. Its CTAs exchange their best entries in the workspace, if any."""
    function(*tensors, words, *workspace(), *numbers)


def _workspace(runner: Runner, plan: SelectPlan) -> Callable[[], tuple[Any, ...]]:
    """The workspace of a launch: counters, and slots, which follow them; see the runner's."""
    sizes = plan.split_workspace(runner.num_sms)

    def allocate(runner: Runner) -> tuple[Tensor]:
        return (runner.empty(*sizes.slots, dtype=torch.int32),)

    return partial(runner.workspace, plan.slot_words, allocate, sizes.counters)
