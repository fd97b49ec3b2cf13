"""Small calls of every Hopper kernel, one a process, for workbench/sanitizers/run.py.

    python workbench/sanitizers/cases.py NAME

Scores are exact in any order of additions (see tests/kernels/indexer/exact_inputs.py), so that the
result must be the CPU backend's; of the fused indexer it says by how many clusters of how many CTAs
a row is ranked, few of them: a sanitizer is a hundred times slower than the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from tests.kernels.indexer.exact_inputs import Inputs

from workbench.sanitizers.backward import Backward
from workbench.sanitizers.decode import Decode, FewHeads
from workbench.sanitizers.forward import Forward
from workbench.sanitizers.index_backward import IndexBackward
from workbench.sanitizers.prefill import Prefill, prefill_by_score
from workbench.sanitizers.training import HeadSums, divergence

DONE = "sanitized case: done"
"""What a case prints last, if its result was right."""
NO_SUCH_PAGE = 1 << 30


@dataclass(frozen=True)
class Fused:
    """A launch of the fused indexer.

    Attributes:
        lengths: tokens of each row. clusters: their number, CTAs of each, clusters of a long row.
        values: as `make_inputs` has them. bad_pages: every third page id is outside the cache.
        next_n: neighbouring rows that share a row of the table. pairs: two of them are scored
            together, over the pages of the second one.
    """

    lengths: tuple[int, ...]
    clusters: tuple[int, int, int]
    num_heads: int = 64
    topk: int = 2048
    by_score: bool = False
    values: str = "random"
    bad_pages: bool = False
    next_n: int = 1
    pairs: bool = False

    def __call__(self) -> None:
        """Launch once, and compare."""
        from flashdsa.jit.loader import load
        from flashdsa.kernels.catalog import INDEXER
        from flashdsa.kernels.indexer.sm90.plan import IndexerPlan, pairs_plan

        scheduled = self.by_score or self.clusters[0] < len(self.lengths)
        plan = IndexerPlan(
            num_heads=self.num_heads,
            topk=self.topk,
            sorted=self.by_score,
            splits=self.clusters[2] > 1 or (scheduled and not self.by_score),
            scheduled=scheduled,
        )
        if self.pairs:
            plan = pairs_plan()
        inputs = self.inputs()
        ids = inputs.output(self.topk).to("cuda")
        launch(load(INDEXER, plan), plan, inputs.to("cuda"), ids, self.clusters)
        require_equal("ids", ids, self.expected(inputs))

    def inputs(self) -> Inputs:
        """On the CPU."""
        from tests.kernels.indexer.exact_inputs import make_inputs

        inputs = make_inputs(list(self.lengths), num_heads=self.num_heads, values=self.values)
        if self.bad_pages:
            inputs.block_table[:, ::3] = -1
            inputs.block_table[:, 1::6] = NO_SUCH_PAGE
        last_of_request = inputs.block_table[self.next_n - 1 :: self.next_n]
        return inputs._replace(block_table=last_of_request.contiguous())

    def expected(self, inputs: Inputs) -> Tensor:
        """The CPU backend's ids; bad page ids are no error here."""
        from flashdsa.ops.registration import custom_op
        from flashdsa.ops.table import DSA_TOPK_INDEXER

        ids = inputs.output(self.topk)
        custom_op(DSA_TOPK_INDEXER)(*inputs, ids, self.by_score, False, False, "cpu")
        return ids


def launch(
    function: Any, plan: Any, inputs: Inputs, ids: Tensor, clusters: tuple[int, int, int]
) -> None:
    """By a function that `compile_indexer` describes. Slots of split rows are not initialised."""
    import torch

    how: tuple[Any, ...] = clusters[:2]
    if plan.splits:
        sizes = plan.split_workspace(clusters[0] * clusters[1])
        slots = torch.empty(sizes.slots, dtype=torch.int32, device=ids.device)
        counters = torch.zeros(sizes.counters, dtype=torch.int32, device=ids.device)
        how = (counters, slots, *clusters)
    function(*inputs, ids, *how)


def dispatched() -> None:
    """The operation as users call it, with clusters of its own choice; rows without scores too."""
    import flashdsa
    from tests.kernels.indexer.exact_inputs import make_inputs

    inputs = make_inputs([0, 1, 65, 2048, 2049])
    expected, ids = inputs.output(2048), inputs.output(2048).to("cuda")
    flashdsa.dsa_topk_indexer(*inputs, expected, backend="cpu")
    flashdsa.dsa_topk_indexer(*inputs.to("cuda"), ids, backend="sm90")
    require_equal("ids", ids, expected)


def logits() -> None:
    """Scores of rows with and without tokens."""
    import flashdsa
    from tests.kernels.indexer.exact_inputs import make_inputs

    inputs = make_inputs([700, 65, 0])
    scores = flashdsa.indexer_logits(*inputs.to("cuda"), 705, backend="sm90")
    require_equal("scores", scores, flashdsa.indexer_logits(*inputs, 705, backend="cpu"))


def topk() -> None:
    """Of given scores, in both orders; a row is longer than one CTA's list."""
    import torch

    import flashdsa

    scores = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([20_000, 5_000], dtype=torch.int32)
    for by_score in (False, True):
        expected = flashdsa.topk_indices(scores, lengths, 512, sorted=by_score, backend="cpu")
        found = flashdsa.topk_indices(
            scores.to("cuda"), lengths.to("cuda"), 512, sorted=by_score, backend="sm90"
        )
        require_equal("positions", found, expected)


def cache() -> None:
    """Keys of both types quantised, and written by slots of both types; some are padding."""
    import torch

    import flashdsa

    draw = torch.Generator().manual_seed(0)
    for dtype, slot_type in ((torch.bfloat16, torch.int64), (torch.float32, torch.int32)):
        k = torch.randn(200, 128, generator=draw).to(dtype)
        for name, got, expected in zip(
            ("fp8", "scale"),
            flashdsa.quantize_index_k(k.to("cuda"), backend="sm90"),
            flashdsa.quantize_index_k(k, backend="cpu"),
            strict=True,
        ):
            require_equal(name, got.view(torch.uint8), expected.view(torch.uint8))
        slots = torch.randperm(5 * 64, generator=draw)[:200].to(slot_type)
        slots[::7] = -1
        pages = torch.zeros(5, 64, 1, 132, dtype=torch.uint8)
        written = pages.to("cuda")
        flashdsa.write_index_k_cache(k.to("cuda"), slots.to("cuda"), written, backend="sm90")
        flashdsa.write_index_k_cache(k, slots, pages, backend="cpu")
        require_equal("cache", written, pages)


CASES: dict[str, Callable[[], None]] = {
    "clusters of 16": Fused((9000,), (1, 16, 1)),
    "clusters of 2": Fused((2100, 9000, 3000), (2, 2, 1)),
    "clusters of 1": Fused((2100, 4000), (2, 1, 1)),
    "halved clusters": Fused((1300,) * 5, (1, 4, 1), num_heads=16, topk=512),
    "row splits": Fused((66_000,), (2, 16, 2)),
    "ragged": Fused((66_000, 2049, 2100, 3000, 2600), (4, 2, 1)),
    "requests": Fused((2100, 2101, 9000, 9001), (2, 2, 1), next_n=2),
    "pairs": Fused((2100, 2101, 66_000, 66_001, 2500, 9000), (4, 2, 1), next_n=2, pairs=True),
    "compaction": Fused((9000,), (1, 1, 1)),
    "sorted": Fused((3000, 100), (1, 2, 1), by_score=True),
    "16 heads": Fused((1400, 600), (1, 2, 1), num_heads=16, topk=512),
    "plateau": Fused((2500,), (1, 3, 1), values="two"),
    "bad pages": Fused((4000, 300), (1, 2, 1), bad_pages=True),
    "dispatched": dispatched,
    "logits": logits,
    "top-k of scores": topk,
    "index-K cache": cache,
    "forward": Forward(),
    "forward of 2": Forward(queries=11, topk=140, group=2),
    "grouped forward": Forward(queries=19, topk=140, group=4),
    "forward of 8": Forward(queries=35, topk=140, group=8),
    "forward, maxima": Forward(max_logits=True),
    "forward of 2, maxima": Forward(queries=11, topk=140, group=2, max_logits=True),
    "forward of 4, maxima": Forward(queries=19, topk=140, group=4, max_logits=True),
    "forward of 8, maxima": Forward(queries=35, topk=140, group=8, max_logits=True),
    "backward": Backward(),
    "backward, alike": Backward(queries=4, alike=True),
    "backward, 16 heads": Backward(16, 9),
    "backward, 8 heads": Backward(8, 17, 70),
    "ordered backward": Backward(16, 41, 20, ordered=True),
    "ordered, 128 heads": Backward(queries=5, ordered=True),
    "ordered, alike": Backward(queries=11, topk=40, alike=True, ordered=True),
    "index backward": IndexBackward(),
    "index backward, alike": IndexBackward(queries=13, alike=True),
    "index backward, 16 heads": IndexBackward(16, 33, 60),
    "ordered index backward": IndexBackward(32, 7, 60, ordered=True),
    "shared keys": Prefill(),
    "shared keys, segments": Prefill(keys=12400, num_heads=16),
    "shared keys, plateaus": Prefill(plateaus=True),
    "shared keys, bf16": Prefill(dtype="bfloat16", num_heads=32),
    "shared keys, by score": prefill_by_score,
    "decode": Decode(),
    "decode alone": Decode(cluster_size=1),
    "packed decode": Decode("ue8m0"),
    "packed decode of 16": Decode("ue8m0", 16, topk=130),
    "decode of 16 heads": FewHeads(),
    "decode of 16 heads, alone": FewHeads(cluster_size=1, topk=1300),
    "decode of 32 heads": FewHeads("fp32", num_heads=27),
    "target and scores": HeadSums(),
    "target and scores of few heads": HeadSums(heads=20, index_heads=16),
    "target of 64": HeadSums(heads=64, index_heads=32, queries=4),
    "divergence": divergence,
}
"""By name."""


def require_equal(what: str, got: Tensor, expected: Tensor) -> None:
    """Exit with 1, saying so, where they differ."""
    import torch

    if not torch.equal(got.cpu(), expected):
        sys.exit(f"{what}: not the CPU backend's")


if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print(DONE)
