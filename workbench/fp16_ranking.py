"""Ranking by fp16 scores: which of the indexer's sets change, and what time it could save.

Scores are the CPU backend's, of fp8 queries and keys. fp16 has 11 significant bits, so tokens share
a score at the cut-off, and ties go to the smallest position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import flashdsa

HEADS, DIM = 64, 128
TOPICS = 32
OUTLIERS = (3, 17, 64, 101)
"""Columns in which every key is large."""


class Change(NamedTuple):
    """Sets by fp16 scores beside those by fp32 scores.

    Attributes:
        sets: share of rows whose set differs. ids: mean ids of a row that are lost.
        most: the largest number of them. tied: mean tokens that share the cut-off's fp16 score,
            without those that share its fp32 score.
        loss: largest sum of lost scores, over the sum of the right ones.
    """

    sets: float
    ids: float
    most: int
    tied: float
    loss: float


def normal(rows: int, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries (rows, H, 128) and keys (tokens, 128) that know nothing of each other."""
    return (torch.randn(rows, HEADS, DIM, generator=draw), torch.randn(tokens, DIM, generator=draw))


def correlated(rows: int, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys that drift: neighbours correlate by 0.98. Queries resemble the newest key."""
    steps = torch.randn(tokens, DIM, generator=draw) * (1 - 0.98**2) ** 0.5
    keys, key = torch.empty(tokens, DIM), torch.randn(DIM, generator=draw)
    for token, step in enumerate(steps):
        key = keys[token] = 0.98 * key + step
    q = keys[-1] + torch.randn(rows, HEADS, DIM, generator=draw)
    return q, keys


def topics(rows: int, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys of a few topics in runs, with columns in which all are large; a query has a topic."""
    centres = torch.randn(TOPICS, DIM, generator=draw)
    of_run = torch.randint(TOPICS, (tokens // 50 + 1,), generator=draw)
    of_token = of_run.repeat_interleave(50)[:tokens]
    keys = centres[of_token] + 0.5 * torch.randn(tokens, DIM, generator=draw)
    keys[:, list(OUTLIERS)] += 6.0
    wanted = centres[torch.randint(TOPICS, (rows, 1), generator=draw)]
    return wanted + 0.7 * torch.randn(rows, HEADS, DIM, generator=draw), keys


KINDS = {"random": normal, "correlated": correlated, "topics": topics}


def scores_of(kind: str, rows: int, tokens: int, seed: int = 0) -> Tensor:
    """The indexer's scores (rows, tokens) of a kind of queries and keys."""
    draw = torch.Generator().manual_seed(seed)
    q, keys = KINDS[kind](rows, tokens, draw)
    weights = torch.rand(rows, HEADS, generator=draw) * (HEADS * DIM) ** -0.5
    cache = torch.zeros(-(-tokens // 64), 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, torch.arange(tokens), cache, backend="cpu")
    q8, folded = flashdsa.quantize_index_q(q, weights, backend="cpu")
    table = torch.arange(len(cache), dtype=torch.int32).repeat(rows, 1)
    lengths = torch.full((rows,), tokens, dtype=torch.int32)
    return flashdsa.indexer_logits(q8, cache, folded, lengths, table, tokens, backend="cpu")


def compare(scores: Tensor, topk: int) -> Change:
    """Rank by fp16 scores, and by the scores as they are.

    Each row is first scaled by a power of two so that its largest magnitude is near fp16's largest,
    which is the best that fp16 can do.

    Args:
        scores: (rows, tokens) fp32, finite.
    """
    rows, tokens = scores.shape
    largest = scores.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    half = torch.ldexp(scores, 15 - largest.log2().ceil().int()).half().float()
    lengths = torch.full((rows,), tokens, dtype=torch.int32)
    exact, rounded = (
        flashdsa.topk_indices(x, lengths, topk, backend="cpu").long() for x in (scores, half)
    )
    chosen = torch.zeros(2, rows, tokens, dtype=torch.bool)
    chosen[0].scatter_(1, exact, True)
    chosen[1].scatter_(1, rounded, True)
    lost = (chosen[0] & ~chosen[1]).sum(1)
    sums = [(scores.double() * x).sum(1) for x in chosen]
    ties = [
        (x == x.gather(1, best).amin(1, keepdim=True)).sum(1)
        for x, best in ((scores, exact), (half, rounded))
    ]
    return Change(
        sets=float((lost > 0).double().mean()),
        ids=float(lost.double().mean()),
        most=int(lost.max()),
        tied=float((ties[1] - ties[0] + 1).double().mean()),
        loss=float(((sums[0] - sums[1]) / sums[0]).max()),
    )


class Saving(NamedTuple):
    """The most that faster ranking can save of a shape's predicted time on a B200.

    Attributes:
        time: seconds, best case. ranking: seconds of it after the last score.
        saved: share of the time if half of the ranking took none.
    """

    shape: str
    time: float
    ranking: float
    saved: float


def savings() -> list[Saving]:
    """Savings of the model's shapes."""
    from workbench.model.indexer_sm100 import predict_all
    from workbench.model.machine import B200

    found = []
    for name, predicted in predict_all(B200).items():
        ranking = predicted.shape.ranking / B200["clock"]
        found.append(Saving(name, predicted.low, ranking, ranking / 2 / predicted.low))
    return found
