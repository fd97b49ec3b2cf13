"""Small calls of the kernels that train the indexer, for workbench/sanitizers/run.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass

CTAS = 2
"""So few that each has several queries."""


@dataclass(frozen=True)
class HeadSums:
    """The target and the scores of a few queries, judged against float64.

    Attributes:
        heads: of the attention. index_heads: of the indexer. queries: S. topk: slots of each.
    """

    heads: int = 128
    index_heads: int = 64
    queries: int = 5
    topk: int = 150

    def __call__(self) -> None:
        """Launch each once, and judge."""
        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.backends.sm90.attention_target import attention_target
        from flashdsa.backends.sm90.indexer_scores import indexer_scores
        from flashdsa.operands import AttentionTargetOperands, IndexerScoresOperands
        from flashdsa.verify import judge_indexer_training as judge
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_sparse_mla import forward_results

        class FewCtas(Gpu):
            """A GPU of so few SMs."""

            num_sms = CTAS

        attention = SparseMlaCase(
            "sanitized",
            self.queries,
            90,
            self.heads,
            self.topk,
            invalid=True,
            topk_length=True,
            attn_sink="finite",
        )
        case = IndexerTrainingCase(attention, index_heads=self.index_heads)
        inputs = make_indexer_training_inputs(case, 0, "cuda")
        x, runner = inputs.attention, FewCtas(0)
        _, lse = forward_results(x)
        of_slots = (inputs.indices, x.topk_length)
        attended = AttentionTargetOperands(x.q, x.kv, lse, *of_slots, x.attn_sink)
        target = attention_target(runner, attended, sm_scale=576**-0.5)
        of_index = inputs.q_index, inputs.k_index, inputs.weights
        scores = indexer_scores(runner, IndexerScoresOperands(*of_index, *of_slots))
        wrong = failures(
            [
                judge.judge_target(inputs, lse, target, "sm90"),
                judge.judge_index_scores(inputs, scores),
            ]
        )
        if wrong:
            sys.exit("; ".join(map(str, wrong)))


def divergence() -> None:
    """`indexer_kl` and its gradient, judged against float64."""
    from flashdsa.verify import judge_indexer_training as judge
    from flashdsa.verify.cases import (
        IndexerTrainingCase,
        SparseMlaCase,
        make_indexer_training_inputs,
    )
    from flashdsa.verify.compare import failures

    attention = SparseMlaCase("sanitized", 19, 90, 8, 300, invalid=True, empty_rows=True)
    inputs = make_indexer_training_inputs(IndexerTrainingCase(attention), 0, "cuda")
    wrong = failures([*judge.check_kl(inputs, "sm90"), *judge.check_kl_backward(inputs, "sm90")])
    if wrong:
        sys.exit("; ".join(map(str, wrong)))
