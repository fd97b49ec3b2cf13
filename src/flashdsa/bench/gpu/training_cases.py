"""What `bench indexer_training` times on a GPU: target, scores, divergence, backward, all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench.gpu.forward_cases import CORRELATED, RANDOM, ForwardCase, draw_ids
from flashdsa.problem import D_QK, INDEX_HEAD_DIM

INDEX_HEADS = 64
JUDGED_QUERIES = 3
TARGET_FLOP = 2 * D_QK
SCORES_FLOP = 2 * INDEX_HEAD_DIM
LSE = 8.1
"""Near that of 2,048 standard normal rows, so that the target is of the size that it has."""


@dataclass(frozen=True)
class TrainingCase:
    """One call, or a step of several, to time.

    Attributes:
        what: a name in `STEPS`. heads: of the attention, or of the indexer where only it is there.
        ids: as of a `ForwardCase`. deterministic: of the backward.
    """

    name: str
    what: str
    heads: int = INDEX_HEADS
    ids: str = CORRELATED
    queries: int = 4096
    topk: int = 2048
    deterministic: bool = False

    @property
    def of_slots(self) -> ForwardCase:
        """Whose ids it has."""
        return ForwardCase(self.name, self.heads, self.ids, self.queries, self.topk)

    def quick(self) -> TrainingCase:
        """The same, cut down to what takes no time."""
        return replace(self, queries=min(self.queries, 256), topk=min(self.topk, 256))


TRAINING_CASES = (
    TrainingCase("target, H=128, random", "target", 128, RANDOM),
    TrainingCase("target, H=128, correlated", "target", 128),
    TrainingCase("target, H=64, correlated", "target", 64),
    TrainingCase("target, H=16, correlated", "target", 16),
    TrainingCase("scores, random", "scores", ids=RANDOM),
    TrainingCase("scores, correlated", "scores"),
    TrainingCase("scores, 32 heads, correlated", "scores", 32),
    TrainingCase("divergence", "divergence"),
    TrainingCase("its gradient", "gradient"),
    TrainingCase("backward, random", "backward", ids=RANDOM),
    TrainingCase("backward, correlated", "backward"),
    TrainingCase("backward, correlated, deterministic", "backward", deterministic=True),
    TrainingCase("all, H=128, correlated", "all", 128),
)


class TrainingInputs(NamedTuple):
    """Operands of a case, on the device; bf16 but for lse, weights and what has a slot."""

    case: TrainingCase
    q: Tensor  # (S, H, 576)
    kv: Tensor  # (S_kv, 576)
    lse: Tensor  # (S, H)
    q_index: Tensor  # (S, H_I, 128)
    k_index: Tensor  # (S_kv, 128)
    weights: Tensor  # (S, H_I)
    indices: Tensor  # (S, topk)
    scores: Tensor  # (S, topk), any
    target: Tensor  # (S, topk), any that are positive
    grad_kl: Tensor  # (S,)


def make_training_inputs(case: TrainingCase, device: str, seed: int = 0) -> TrainingInputs:
    """Standard normal; the same seed gives the same values on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    keys, rows = case.of_slots.num_keys, case.queries
    attends = case.what in ("target", "all")
    heads = case.heads if attends else 1
    index_heads = INDEX_HEADS if attends else case.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    indices = draw_ids(case.of_slots, generator, device)
    return TrainingInputs(
        case,
        normal(rows, heads, D_QK).bfloat16(),
        normal(keys, D_QK).bfloat16(),
        LSE + 0.1 * normal(rows, heads),
        normal(rows, index_heads, INDEX_HEAD_DIM).bfloat16(),
        normal(keys, INDEX_HEAD_DIM).bfloat16(),
        0.1 * normal(rows, index_heads),
        indices,
        normal(rows, case.topk),
        normal(rows, case.topk).exp(),
        torch.full((rows,), 1 / rows, device=device),
    )


class Judged(NamedTuple):
    """A result against float64: `error` of its norm, at most `limit`."""

    name: str
    error: float
    limit: float


class Step(NamedTuple):
    """A call and its judge.

    Attributes:
        run: (inputs, backend) -> results. judge: (inputs, results) -> errors.
        flop: products that a slot asks for, by the case.
    """

    run: Callable[[TrainingInputs, str], Any]
    judge: Callable[[TrainingInputs, Any], list[Judged]]
    flop: Callable[[TrainingCase], float]


def judged_queries(case: TrainingCase) -> list[int]:
    """The first, a middle and the last one."""
    last = case.queries - 1
    return sorted({0, last // 2, last})[:JUDGED_QUERIES]


def off(found: Tensor, expected: Tensor) -> float:
    """The error's norm over the result's."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm())


def run_target(x: TrainingInputs, backend: str) -> Tensor:
    """P."""
    return flashdsa.attention_target(x.q, x.kv, x.lse, x.indices, backend=backend)


def judge_target(x: TrainingInputs, found: Tensor) -> list[Judged]:
    """Exponentials of fp32 products."""
    some = judged_queries(x.case)
    expected = reference.attention_target(x.q[some], x.kv, x.lse[some], x.indices[some])
    return [Judged("target", off(found[some], expected), 1e-4)]


def run_scores(x: TrainingInputs, backend: str) -> Tensor:
    """I."""
    return flashdsa.indexer_scores(x.q_index, x.k_index, x.weights, x.indices, backend=backend)


def judge_scores(x: TrainingInputs, found: Tensor) -> list[Judged]:
    """Sums of fp32 products."""
    some = judged_queries(x.case)
    of_queries = x.q_index[some], x.k_index, x.weights[some], x.indices[some]
    return [Judged("scores", off(found[some], reference.indexer_scores(*of_queries)), 1e-5)]


def run_divergence(x: TrainingInputs, backend: str) -> Tensor:
    """KL."""
    return flashdsa.indexer_kl(x.scores, x.target, backend=backend)


def judge_divergence(x: TrainingInputs, found: Tensor) -> list[Judged]:
    """Sums of differences of logarithms."""
    some = judged_queries(x.case)
    expected, _ = reference.indexer_kl(x.scores[some], x.target[some])
    return [Judged("KL", off(found[some], expected), 1e-5)]


def run_gradient(x: TrainingInputs, backend: str) -> Tensor:
    """The gradient of the scores."""
    return flashdsa.indexer_kl_bwd(x.scores, x.target, x.grad_kl, backend=backend)


def judge_gradient(x: TrainingInputs, found: Tensor) -> list[Judged]:
    """Differences of probabilities."""
    some = judged_queries(x.case)
    expected = reference.indexer_kl_bwd(x.scores[some], x.target[some], x.grad_kl[some])
    return [Judged("its gradient", off(found[some], expected), 1e-5)]


def run_backward(x: TrainingInputs, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """dq_index, dk_index, d_weights."""
    return _backward(x, x.scores, backend)


def _backward(
    x: TrainingInputs, grad_scores: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    operands = x.q_index, x.k_index, x.weights, x.indices, grad_scores
    return flashdsa.indexer_bwd(*operands, deterministic=x.case.deterministic, backend=backend)


def judge_backward(x: TrainingInputs, found: tuple[Tensor, Tensor, Tensor]) -> list[Judged]:
    """dQ and dW of some queries; of dK that sum dK K = sum w dW, with random gradients to 1 %."""
    some = judged_queries(x.case)
    of_queries = x.q_index[some], x.k_index, x.weights[some], x.indices[some], x.scores[some]
    expected = reference.indexer_bwd(*of_queries)
    dq, dk, dw = found
    names = (("dQ", dq, expected.dq_index, 5e-3), ("dW", dw, expected.d_weights, 1e-5))
    judged = [Judged(name, off(got[some], right), limit) for name, got, right, limit in names]
    of_weights = x.weights.double() * dw.double()
    apart = (dk.double() * x.k_index.double()).sum() - of_weights.sum()
    return [*judged, Judged("dK", float(apart.abs() / of_weights.norm()), 1e-2)]


def run_all(x: TrainingInputs, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """A training step's: target, scores, the gradient of their divergence, the backward."""
    target, scores = run_target(x, backend), run_scores(x, backend)
    grad_scores = flashdsa.indexer_kl_bwd(scores, target, x.grad_kl, backend=backend)
    return _backward(x, grad_scores, backend)


STEPS = {
    "target": Step(run_target, judge_target, lambda case: case.heads * TARGET_FLOP),
    "scores": Step(run_scores, judge_scores, lambda case: case.heads * SCORES_FLOP),
    "divergence": Step(run_divergence, judge_divergence, lambda _: 0),
    "gradient": Step(run_gradient, judge_gradient, lambda _: 0),
    "backward": Step(run_backward, judge_backward, lambda case: 3 * case.heads * SCORES_FLOP),
    "all": Step(
        run_all,
        lambda *_: [],
        lambda case: case.heads * TARGET_FLOP + 4 * INDEX_HEADS * SCORES_FLOP,
    ),
}
"""By a case's `what`. What "all" consists of is judged case by case."""
