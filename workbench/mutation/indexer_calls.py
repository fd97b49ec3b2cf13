"""Calls of the indexer, and of what trains it, whose kernels workbench/mutation/kernels.py breaks.

As those in mutation_calls.py, each runs on ptxemu in the place of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.mutation.calls import HOPPER, KEYS

if TYPE_CHECKING:
    from torch import Tensor

    from flashdsa.kernels.indexer.sm90.plan import IndexerPlan


@dataclass(frozen=True)
class Prefill:
    """`dsa_topk_prefill` on Hopper: `queries` in a causal row of `keys`.

    Attributes:
        plateaus: most keys are equal. wide: not 0: the first 128 keys' scores are so many times as
            large, so that all others fall into fewer bins of the window, of 4,096 into a few.

    Of a query 1,024 keys are ranked at a time, and 350 scores of earlier ones are kept, so that
    short rows have several segments and fill the log.
    """

    queries: int = 9
    keys: int = 700
    topk: int = 300
    num_heads: int = 64
    dtype: str = "float8_e4m3fn"
    plateaus: bool = False
    wide: int = 0
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        from dataclasses import replace

        import torch

        from flashdsa.backends.emulated.runner import sm90
        from flashdsa.backends.sm90.prefill import launch, plan_of
        from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK
        from flashdsa.operands import TopkPrefillOperands
        from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs

        case = PrefillCase(
            "prefill", causal(self.queries, self.keys), self.topk, self.num_heads,
            getattr(torch, self.dtype), plateaus=self.plateaus,
        )  # fmt: skip
        x = make_prefill_inputs(case, 0)
        if self.wide:
            (x.k_index if x.k_scale is None else x.k_scale)[:128] *= self.wide
        operands = TopkPrefillOperands(
            x.q_index, x.k_index, x.weights, x.ends, x.output_buffer(), x.starts, x.k_scale
        )
        plan = plan_of(operands.inputs)
        plan = replace(plan, segment_keys=CHUNK, log_keys=350)
        launch(sm90(torch.device("cpu")), plan, operands)


@dataclass(frozen=True)
class PrefillOrder:
    """The lists of `dsa_topk_prefill(sorted=True)` on Hopper: one that is full, a third, none.

    Attributes:
        close: scores that the sorted words' bits do not tell apart.
    """

    topk: int = 300
    close: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        import torch

        from flashdsa.backends.emulated.runner import sm90
        from flashdsa.kernels.catalog import PREFILL_ORDER
        from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan
        from flashdsa.kernels.indexer.sm90.prefill.entries import INVALID

        draw = torch.Generator().manual_seed(0)
        scores = torch.randn(3, self.topk, generator=draw)
        if self.close:
            steps = torch.randint(0, 4000, scores.shape, generator=draw)
            scores = 1 + steps * torch.finfo(torch.float32).eps
            scores[:, :2] = torch.tensor([1e9, -1e9])
        counts = torch.tensor([self.topk, self.topk // 3, 0])
        valid = torch.arange(self.topk) < counts[:, None]
        rows = torch.where(valid, torch.arange(3 * self.topk).view(3, -1) * 5, -1).int()
        words = torch.where(valid, scores.view(torch.int32), INVALID).int()
        runner = sm90(torch.device("cpu"))
        function = runner.function(PREFILL_ORDER, OrderPlan(512))
        with runner.launching():
            function(rows, words)


@dataclass(frozen=True)
class HeadSums:
    """`attention_target`, or with `scores` `indexer_scores`, on Hopper."""

    num_heads: int = 20
    queries: int = 3
    topk: int = 330
    scores: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        import flashdsa
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )
        from flashdsa.verify.judge_sparse_mla import forward_results

        heads = 8 if self.scores else self.num_heads
        case = SparseMlaCase(
            "sums", self.queries, KEYS, heads, self.topk, invalid=True, topk_length=True
        )
        index_heads = self.num_heads if self.scores else 16
        x = make_indexer_training_inputs(IndexerTrainingCase(case, index_heads=index_heads), 0)
        y = x.attention
        if self.scores:
            flashdsa.indexer_scores(*x.operands, topk_length=y.topk_length, backend=HOPPER)
        else:
            _, lse = forward_results(y)
            flashdsa.attention_target(
                y.q, y.kv, lse, x.indices, topk_length=y.topk_length, backend=HOPPER
            )


@dataclass(frozen=True)
class IndexBackward:
    """`indexer_bwd` on Hopper.

    Attributes:
        alike: queries name the same keys, so that the larger groups are chosen.
        ordered: the deterministic form. repeated: slots name few keys, many times.
    """

    num_heads: int = 64
    queries: int = 5
    topk: int = 100
    alike: bool = False
    ordered: bool = False
    repeated: bool = False
    sms: int = 1
    keys: int = 260

    def __call__(self) -> None:
        """Launch lists, gradients and, in order, their sum."""
        import flashdsa
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )

        case = SparseMlaCase(
            "index", self.queries, self.keys, 8, self.topk, invalid=True, duplicates=self.repeated
        )
        x = make_indexer_training_inputs(IndexerTrainingCase(case, index_heads=self.num_heads), 0)
        if self.alike:
            x.indices.copy_(x.indices[:1].expand_as(x.indices).clone())
        flashdsa.indexer_bwd(*x.operands, x.grad_scores, deterministic=self.ordered, backend=HOPPER)


@dataclass(frozen=True)
class FusedIndexer:
    """`dsa_topk_indexer` on Hopper with 16 heads and topk 512.

    Lists are so small that short rows compact them, and selecting counts for so little that rows of
    this length are split.

    Attributes:
        lengths: of the rows. clusters: how many, CTAs of each. values: as `make_inputs` has them.
        rows_of_one: as many more rows of a token. bad_page: one of the first row is none of the
            cache.
    """

    lengths: tuple[int, ...]
    clusters: tuple[int, int] = (1, 1)
    values: str = "random"
    rows_of_one: int = 0
    bad_page: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        import torch

        from flashdsa.backends.emulated.runner import sm90
        from flashdsa.kernels.catalog import INDEXER
        from tests.kernels.indexer.exact_inputs import make_inputs

        plan = self.plan()
        lengths = [*self.lengths, *(1 for _ in range(self.rows_of_one))]
        q, cache, *others = make_inputs(lengths, num_heads=16, values=self.values)
        others[-1] = self.tables(others[-1])
        if self.bad_page:
            others[-1][0, 2] = -1
        runner = sm90(torch.device("cpu"))
        sizes = plan.split_workspace(self.clusters[0] * self.clusters[1])
        counters = torch.zeros(sizes.counters, dtype=torch.int32)
        slots = runner.empty(*sizes.slots, dtype=torch.int32)
        ids = runner.empty(len(lengths), plan.topk, dtype=torch.int32)
        function = runner.function(INDEXER, plan)
        with runner.launching():
            how = counters, slots, *self.clusters, 1
            function(q, cache.view(torch.uint8), *others, ids, *how)

    def plan(self) -> IndexerPlan:
        """See above."""
        from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

        return IndexerPlan(
            num_heads=16, topk=512, splits=True, scheduled=True, list_capacity=2048,
            first_fill_pages=10, fill_step_pages=2, select_pages=1, merge_pages=3,
            settling_ctas=2, settling_pages=15, count_polls=100_000,
        )  # fmt: skip

    def tables(self, of_rows: Tensor) -> Tensor:
        """The block tables of the requests: each row is one."""
        return of_rows


@dataclass(frozen=True)
class PairsIndexer(FusedIndexer):
    """Two neighbouring rows are a request, and are scored together."""

    def plan(self) -> IndexerPlan:
        """See above."""
        from flashdsa.kernels.indexer.sm90.plan import pairs_plan

        return pairs_plan(
            num_heads=16, topk=512, list_capacity=2048, first_fill_pages=10, fill_step_pages=2,
            select_pages=1, merge_pages=3, settling_ctas=2, settling_pages=15, count_polls=100_000,
        )  # fmt: skip

    def tables(self, of_rows: Tensor) -> Tensor:
        """Of each pair that of the longer row."""
        rows = [
            row + (self.lengths[row + 1] > self.lengths[row])
            for row in range(0, len(self.lengths), 2)
        ]
        return of_rows[rows].contiguous()
