"""The peers' operations as formulas in float64, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    q: Tensor,
    kv: Tensor,
    rows: Sequence[Sequence[int]],
    scale: float,
    *,
    d_v: int = 512,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O (S, H, d_v) and lse (S, H), +inf for an empty row; `rows[s]` are the keys of query s."""
    out = torch.zeros(*q.shape[:2], d_v, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.inf, dtype=torch.float64)
    for s, keys in enumerate(rows):
        if not keys:
            continue
        chosen = kv[list(keys)].double()
        logits = scale * q[s].double() @ chosen.T
        lse[s] = torch.logsumexp(logits, dim=1)
        total = lse[s] if sink is None else torch.logaddexp(lse[s], sink.double())
        out[s] = (logits - total[:, None]).exp() @ chosen[:, :d_v]
    return out, lse


def largest_logits(q: Tensor, kv: Tensor, rows: Sequence[Sequence[int]], scale: float) -> Tensor:
    """(S, H), -inf for an empty row."""
    largest = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for s, keys in enumerate(rows):
        if keys:
            largest[s] = (scale * q[s].double() @ kv[list(keys)].double().T).amax(1)
    return largest


def index_scores(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """(S, n) of q (S, H, 128), keys (n, 128), scales (n,), weights (S, H)."""
    dots = torch.einsum("shd,nd->shn", q.double(), keys.double())
    return torch.einsum("shn,sh->sn", dots.relu(), weights.double()) * scales.double()


def assert_close(got: Tensor, expected: Tensor, limit: float) -> None:
    """Relative in the norm, with infinities in the same places."""
    finite = expected.isfinite()
    assert got.shape == expected.shape
    assert torch.equal(got.double()[~finite], expected.double()[~finite])
    difference = (got.double() - expected.double())[finite].norm()
    assert difference <= limit * expected.double()[finite].norm()
