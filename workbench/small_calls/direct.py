"""Calls of one kernel past the operation: with clusters or inputs that no user's call chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.indexer.launch import bind_order
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.indexer import bind_scored_and_ranked
from flashdsa.dispatch.registration import custom_op
from flashdsa.kernels.catalog import INDEXER, INDEXER_ORDER, INDEXER_ORDER_SM100, INDEXER_SM100
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm100 import plan as sm100
from flashdsa.ops.indexer import DSA_TOPK_INDEXER, TopkIndexerOperands
from flashdsa.verify.compare import Comparison, compare_exact
from workbench.small_calls.call import BLACKWELL, HOPPER, SEED

if TYPE_CHECKING:
    from tests.kernels.indexer.inputs import Inputs

INDEXERS = {spec.arch: spec for spec in (INDEXER, INDEXER_SM100)}
ORDERS = {spec.arch: spec for spec in (INDEXER_ORDER, INDEXER_ORDER_SM100)}
NO_SUCH_PAGE = 1 << 30
INVALID, NAN = 0x7FFFFFFE, 0x7FFFFFFF
"""Words of lists, as kernels/indexer/select/sort_keys.py, which needs CuTe DSL, has them."""


def launch_indexer(
    runner: Runner,
    plan: SelectPlan,
    operands: TopkIndexerOperands,
    clusters: tuple[int, int],
    *,
    sorted: bool = False,
    positions: bool = False,
) -> tuple[Tensor, ...]:
    """Launch any plan's fused indexer once; the counters and slots of rows that are split, if any.

    Args:
        clusters: how many, and CTAs of each. sorted: the best come first, by another launch.
        positions: ids are not slots of the cache.
    """
    workspace: tuple[Tensor, ...] = ()
    if plan.splits:
        sizes = plan.split_workspace(clusters[0] * clusters[1])
        counters = torch.zeros(sizes.counters, dtype=torch.int32, device=operands.seq_lens.device)
        workspace = counters, runner.empty(*sizes.slots, dtype=torch.int32)
    q, cache, *others = operands[:6]
    ids, arch = operands.topk_indices, plan.arch.name
    words = runner.empty(*(ids.shape if sorted else (0, 0)), dtype=torch.int32)
    function = runner.function(INDEXERS[arch], plan)
    numbers = int(not positions), *clusters
    with runner.launching():
        function(q, cache.view(torch.uint8), *others, words, *workspace, *numbers)
        if sorted:
            bind_order(runner, ORDERS[arch], ids.shape[1])(ids, words)
    return workspace


@dataclass(frozen=True)
class Ranked:
    """The fused indexer on scores that are exact in any order of additions; see `Small`.

    Attributes:
        name: as the others'. lengths: tokens of each row. topk: ids of each. sorted:
            the best come first, by another launch.
        clusters: their number, and CTAs of each.
        plan: choices of its plan; more than a catalog's plan has: emulated only.
        values: as `make_inputs` of tests/kernels/indexer/inputs.py has them.
        bad_pages: every third page id is outside the cache. next_n: neighbouring rows that share a
            row of the table, which is the last one's.
    """

    name: str
    lengths: tuple[int, ...]
    clusters: tuple[int, int]
    plan: Mapping[str, Any] = field(default_factory=dict)
    values: str = "random"
    bad_pages: bool = False
    next_n: int = 1
    topk: int = 2048
    sorted: bool = False
    backend: str = HOPPER
    sms: int = 0

    @property
    def emulated_only(self) -> bool:
        """Whether it is compiled ahead for these choices."""
        return self.backend == BLACKWELL or self.kernel_plan not in INDEXER.plans

    @property
    def kernel_plan(self) -> SelectPlan:
        if self.backend == BLACKWELL:
            return sm100.IndexerPlan(**self.plan)
        return IndexerPlan(**self.plan)

    def inputs(self) -> Inputs:
        """Return inputs on the CPU; a request has the pages of its longest row."""
        from tests.kernels.indexer.inputs import make_inputs

        heads = self.kernel_plan.num_heads
        inputs = make_inputs(list(self.lengths), num_heads=heads, values=self.values, seed=SEED)
        if self.bad_pages:
            inputs.block_table[:, ::3] = -1
            inputs.block_table[:, 1::6] = NO_SUCH_PAGE
        requests = torch.tensor(self.lengths).view(-1, self.next_n)
        rows = torch.arange(0, len(self.lengths), self.next_n)
        longest = rows + self.next_n - 1 - requests.flip(1).argmax(1)
        return inputs._replace(block_table=inputs.block_table[longest].contiguous())

    def launch(self, runner: Runner) -> Tensor:
        inputs = self.inputs()
        if (device := getattr(runner, "device", None)) is not None:
            inputs = inputs.to(device)
        operands = TopkIndexerOperands(*inputs, inputs.output(self.topk))
        self.launch_on(runner, operands)
        return operands.topk_indices

    def launch_on(self, runner: Runner, operands: TopkIndexerOperands) -> None:
        launch_indexer(runner, self.kernel_plan, operands, self.clusters, sorted=self.sorted)

    def judge(self, runner: Runner) -> list[Comparison]:
        """They are the CPU backend's; bad page ids are no error here."""
        inputs, plan = self.inputs(), self.kernel_plan
        expected = inputs.output(self.topk)
        custom_op(DSA_TOPK_INDEXER)(
            *inputs, expected, None, self.sorted, False, plan.entry_tokens, 1, False, "cpu"
        )
        return [compare_exact("ids", self.launch(runner).cpu(), expected)]


@dataclass(frozen=True)
class InTwoLaunches(Ranked):
    """The same by two launches, of all scores and of their ranking.

    Attributes:
        clusters: as the runner's device and the rows say.
    """

    clusters: tuple[int, int] = (0, 0)
    next_n: int = 2
    sms: int = 2

    def launch_on(self, runner: Runner, operands: TopkIndexerOperands) -> None:
        plan, rows = self.kernel_plan, len(self.lengths)
        how = plan.num_heads, self.topk, False, self.sorted, rows, self.next_n
        serve = bind_scored_and_ranked(runner, *how)
        q, cache, *others = operands[:6]
        with runner.launching():
            serve(q, cache.view(torch.uint8), *others)


@dataclass(frozen=True)
class Order:
    """Lists put in the order of their scores: one is full, one has a third, one nothing.

    Attributes:
        topk: entries of a list. pattern: of the scores: "random"; "plateaus"; "close": the sorted
            words' bits do not tell them apart; "nan".
    """

    topk: int
    pattern: str = "random"
    backend: str = HOPPER
    sms: int = 1
    emulated_only: bool = False

    @property
    def name(self) -> str:
        return f"{self.topk}, {self.pattern}"

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, rows, and which entries are there, (3, topk) each."""
        draw = torch.Generator().manual_seed(SEED)
        scores = torch.randn(3, self.topk, generator=draw)
        if self.pattern == "plateaus":
            scores = (scores * 2).round() + 0.0
        if self.pattern == "close":
            # Neighbours of 1.0, which the distance from a far one to the best cannot tell apart.
            steps = torch.randint(0, 4000, scores.shape, generator=draw)
            scores = 1 + steps * torch.finfo(torch.float32).eps
            scores[:, :2] = torch.tensor([1e9, -1e9])
        if self.pattern == "nan":
            scores[:, ::7] = torch.nan
        counts = torch.tensor([self.topk, self.topk // 3, 0])
        valid = torch.arange(self.topk) < counts[:, None]
        rows = torch.arange(3 * self.topk, dtype=torch.int32).view(3, -1) * 5
        return scores, torch.where(valid, rows, -1), valid

    def launch(self, runner: Runner) -> Tensor:
        """The rows in their order."""
        scores, rows, valid = self.lists()
        words = torch.where(scores.isnan(), NAN, scores.view(torch.int32))
        words = torch.where(valid, words, INVALID).int()
        device = getattr(runner, "device", "cpu")
        rows, words = rows.to(device), words.to(device)
        function = bind_order(runner, INDEXER_ORDER, self.topk)
        with runner.launching():
            function(rows, words)
        return rows

    def judge(self, runner: Runner) -> list[Comparison]:
        """Require the rows of a stable sort, NaN last."""
        scores, rows, valid = self.lists()
        best = scores.nan_to_num(nan=-torch.inf).masked_fill(~valid, -torch.inf)
        order = best.sort(descending=True, stable=True).indices
        return [compare_exact("rows", self.launch(runner).cpu(), rows.gather(1, order))]
