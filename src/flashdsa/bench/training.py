"""Timed parts of the indexer's training: target, scores, KL, its gradient, backward, all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench import cases
from flashdsa.bench.attention import draw_ids
from flashdsa.problem import D_QK, INDEX_HEAD_DIM

INDEX_HEADS = 64
LSE = 8.1
"""Near that of 2,048 standard normal rows, so that the target is of its usual size."""


class TrainingInputs(NamedTuple):
    """Operands; bf16 but for lse, weights and what has a slot."""

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

    def few(self) -> TrainingInputs:
        """The operands of the queries that are judged."""
        some = cases.judged_queries(len(self.q))
        parts = [x if name in ("kv", "k_index") else x[some] for name, x in self._asdict().items()]
        return TrainingInputs(*parts)


def make_inputs(case: cases.Case, device: str, seed: int) -> TrainingInputs:
    """Standard normal; `h` is the attention's in "target" and "all", else the indexer's."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)
    attends = case.options["what"] in ("target", "all")
    heads, index_heads = (case.h, INDEX_HEADS) if attends else (1, case.h)
    return TrainingInputs(
        normal(case.s, heads, D_QK).bfloat16(),
        normal(case.s_kv, D_QK).bfloat16(),
        LSE + 0.1 * normal(case.s, heads),
        normal(case.s, index_heads, INDEX_HEAD_DIM).bfloat16(),
        normal(case.s_kv, INDEX_HEAD_DIM).bfloat16(),
        0.1 * normal(case.s, index_heads),
        draw_ids(case, generator),
        normal(case.s, case.topk),
        normal(case.s, case.topk).exp(),
        torch.full((case.s,), 1 / case.s, device=device),
    )


def make_training(case: cases.Case, device: str, seed: int, backend: str) -> cases.Task:
    """One step of the training, or all. Options: what, deterministic."""
    deterministic = bool(case.options.get("deterministic"))
    return training_task(
        make_inputs(case, device, seed), case.options["what"], backend, deterministic
    )


def training_task(
    x: TrainingInputs, what: str, backend: str, deterministic: bool = False
) -> cases.Task:
    """The call on some inputs, and how it is judged."""

    def target() -> Tensor:
        return flashdsa.attention_target(x.q, x.kv, x.lse, x.indices, backend=backend)

    def scores() -> Tensor:
        return flashdsa.indexer_scores(x.q_index, x.k_index, x.weights, x.indices, backend=backend)

    def gradient(of: Tensor, to: Tensor) -> Tensor:
        return flashdsa.indexer_kl_bwd(of, to, x.grad_kl, backend=backend)

    def backward(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        operands = x.q_index, x.k_index, x.weights, x.indices, grad
        return flashdsa.indexer_bwd(*operands, deterministic=deterministic, backend=backend)

    calls: dict[str, Callable[[], Any]] = {
        "target": target,
        "scores": scores,
        "divergence": lambda: flashdsa.indexer_kl(x.scores, x.target, backend=backend),
        "gradient": lambda: gradient(x.scores, x.target),
        "backward": lambda: backward(x.scores),
        "all": lambda: backward(gradient(scores(), target())),
    }
    of_index = 2 * INDEX_HEAD_DIM * x.q_index.shape[1]
    of_target = 2 * D_QK * x.q.shape[1]
    a_slot = {
        "target": of_target,
        "scores": of_index,
        "backward": 3 * of_index,
        "all": of_target + 4 * of_index,
    }.get(what)
    slots, device = x.indices.numel(), x.indices.device.type
    ceiling = cases.products_ceiling(device) if a_slot else cases.reading_ceiling(device)
    # Divergence and gradient read scores and target, and write one number a query or a slot.
    work = slots * (a_slot or (12 if what == "gradient" else 8))
    return cases.Task(calls[what], partial(judge_training, what, x), float(work), ceiling, x)


def judge_training(what: str, x: TrainingInputs, found: Any) -> cases.Verdict:
    """Results of a few queries; those of "all" are finite: its parts are judged one by one."""
    few, some = x.few(), cases.judged_queries(len(x.q))
    if what == "all":
        finite = all(bool(one.isfinite().all()) for one in found)
        return cases.Verdict({}, [] if finite else ["a gradient is not finite"])
    if what == "backward":
        return _judge_backward(x, few, some, found)
    kl = partial(reference.indexer_kl_bwd, few.scores, few.target, few.grad_kl)
    index = few.q_index, few.k_index, few.weights, few.indices
    expected: dict[str, tuple[Callable[[], Tensor], float]] = {
        "target": (lambda: reference.attention_target(few.q, few.kv, few.lse, few.indices), 1e-4),
        "scores": (lambda: reference.indexer_scores(*index), 1e-5),
        "divergence": (lambda: reference.indexer_kl(few.scores, few.target)[0], 1e-5),
        "gradient": (kl, 1e-5),
    }
    right, limit = expected[what]
    ours, theirs = found[some], right()
    same = bool((ours.isneginf() == theirs.isneginf()).all())  # slots that name no row
    ours, theirs = (one.masked_fill(theirs.isneginf(), 0) for one in (ours, theirs))
    return cases.judge_errors({what: (cases.norm_error(ours, theirs) if same else math.nan, limit)})


def _judge_backward(
    x: TrainingInputs, few: TrainingInputs, some: list[int], found: tuple[Tensor, Tensor, Tensor]
) -> cases.Verdict:
    """dQ and dW of a few queries, and dK of a few rows from all queries that name them."""
    index = few.q_index, few.k_index, few.weights, few.indices, few.scores
    expected, (dq, dk, dw) = reference.indexer_bwd(*index), found
    named = [row for row in few.indices[:, 0].tolist() if row >= 0]
    of_rows = [0.0, *(cases.norm_error(dk[row], dk_row(x, row)) for row in named)]
    return cases.judge_errors(
        {
            "dQ": (cases.norm_error(dq[some], expected.dq_index), 5e-3),
            "dW": (cases.norm_error(dw[some], expected.d_weights), 1e-5),
            "dK": (cases.worst(of_rows), 1e-2),
        }
    )


def dk_row(x: TrainingInputs, row: int) -> Tensor:
    """A row of dK in float64, from the gradient `x.scores`; slots that name it twice add up."""
    named = x.indices == row
    naming = named.any(1).nonzero()[:, 0]
    grad = (x.scores.double() * named)[naming].sum(1, keepdim=True)
    q = x.q_index[naming].double()
    passed = grad * x.weights[naming].double() * (q @ x.k_index[row].double() > 0)
    d_row: Tensor = torch.einsum("sh,shd->d", passed, q)
    return d_row


def _case(
    name: str, what: str, h: int = INDEX_HEADS, ids: str = "correlated", **more: Any
) -> cases.Case:
    keys = 8192 if ids == "random" else 32768
    return cases.Case(4096, keys, h, options={"what": what, "ids": ids} | more, name=name)


TRAINING_CASES = (
    _case("target, H=128, random", "target", 128, "random"),
    _case("target, H=128, correlated", "target", 128),
    _case("target, H=64, correlated", "target", 64),
    _case("target, H=16, correlated", "target", 16),
    _case("scores, random", "scores", ids="random"),
    _case("scores, correlated", "scores"),
    _case("scores, 32 heads, correlated", "scores", 32),
    _case("divergence", "divergence"),
    _case("its gradient", "gradient"),
    _case("backward, random", "backward", ids="random"),
    _case("backward, correlated", "backward"),
    _case("backward, correlated, deterministic", "backward", deterministic=True),
    _case("all, H=128, correlated", "all", 128),
)
_CPU = tuple(
    cases.Case(4, 1024, 16, 256, options={"what": what}, name=what)
    for what in ("target", "scores", "divergence", "gradient", "backward", "all")
)
OPERATIONS = (
    cases.Operation("indexer_training", make_training, {"cpu": _CPU, "cuda": TRAINING_CASES}),
)
