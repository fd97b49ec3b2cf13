"""Checks of what trains the indexer."""

from __future__ import annotations

from functools import cache, partial

import flashdsa
from flashdsa.verify import calls, judge_composed
from flashdsa.verify import check_cases as cases
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.check_list import Check, each
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)


def _call_target(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with an lse of zeros."""
    q = inputs.attention.q
    lse = q.new_zeros(q.shape[:2], dtype=inputs.grad_scores.dtype)
    return calls.attention_target(inputs, lse, backend)


def _call_kl(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with arbitrary scores and target."""
    scores = inputs.grad_scores
    return flashdsa.indexer_kl(scores, scores.abs(), backend=backend)


def _call_kl_backward(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with arbitrary scores, target and gradient."""
    scores = inputs.grad_scores
    return calls.indexer_kl_bwd(scores, scores.abs(), scores[:, 0].contiguous(), backend)


def _call_kl_loss(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with an lse of zeros."""
    q = inputs.attention.q
    lse = q.new_zeros(q.shape[:2], dtype=inputs.grad_scores.dtype)
    return calls.indexer_kl_loss(inputs, lse, backend)


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """Each operation on the cases of training; `indexer_bwd` on its own, too."""
    make = cache(partial(make_indexer_training_inputs, seed=seed, device=device))
    runs = (
        ("attention_target", _call_target, judge.check_target),
        ("indexer_scores", calls.indexer_scores, judge.check_index_scores),
        ("indexer_bwd", calls.indexer_bwd, judge.check_index_backward),
        ("indexer_kl", _call_kl, judge.check_kl),
        ("indexer_kl_bwd", _call_kl_backward, judge.check_kl_backward),
        ("indexer_kl_loss", _call_kl_loss, judge_composed.check_kl_loss),
    )
    checks = each(runs, cases.TRAINING, make, backend, _work)
    for case in cases.INDEX_BACKWARD:
        call, check = (
            partial(one, deterministic=case.deterministic)
            for one in (calls.indexer_bwd, judge.check_index_backward)
        )
        checks += each([("indexer_bwd", call, check)], [case.training], make, backend, _work)
    return checks


def _work(case: IndexerTrainingCase) -> int:
    return case.attention.num_queries * case.attention.topk
