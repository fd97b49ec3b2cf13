"""Held-out text: sparse beside dense attention on the same weights, and how good the keys are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.demo.attention import dense
from flashdsa.demo.model import ByteModel
from flashdsa.demo.train import DemoOptions, language_loss


class Evaluation(NamedTuple):
    """One look at the held-out text: losses in nats per byte, and the share of dense attention's
    probability on `topk` keys that are the indexer's, the newest, random, the best possible."""

    step: int
    sparse_loss: float
    dense_loss: float
    indexer: float
    newest: float
    random: float
    best: float
    chosen: Tensor  # [S, T] bool, of the first window
    probability: Tensor  # [S, T] float32: dense attention to keys there, mean over heads
    ends: Tensor  # [S] int32: keys that each query sees
    indices: Tensor  # [windows, S, topk] int32


@torch.no_grad()
def evaluate(model: ByteModel, text: Tensor, options: DemoOptions, step: int) -> Evaluation:
    """Run the same weights sparsely and densely on evenly spaced windows of text [n] uint8."""
    numbers, chosen, probability, indices = [], [], [], []
    starts = torch.linspace(0, len(text) - options.window - 1, options.eval_windows).long()
    for start in starts.tolist():
        tokens = text[start : start + options.window + 1].long().to(options.device)
        logits, hidden, attention = model(tokens[:-1])
        weights, attended = dense(attention)
        weights = weights.mean(dim=1)
        probability.append(weights / weights.sum(dim=1, keepdim=True))
        mask = torch.zeros_like(probability[-1], dtype=torch.bool)
        chosen.append(mask.scatter(1, attention.indices.long(), True))
        indices.append(attention.indices.cpu())
        losses = (language_loss(x, tokens) for x in (logits, model.read_out(hidden, attended)))
        shares = captured(chosen[-1], probability[-1], attention.ends, options.topk)
        numbers.append(torch.stack([*losses, *shares]))
    means = torch.stack(numbers).mean(dim=0).tolist()
    tensors = chosen[0].cpu(), probability[0].cpu(), attention.ends.cpu(), torch.stack(indices)
    return Evaluation._make((step, *means, *tensors))


def captured(chosen: Tensor, probability: Tensor, ends: Tensor, topk: int) -> tuple[Tensor, ...]:
    """Mean probability on the keys that are chosen, the newest, random, and the best; query s sees
    `ends[s]` keys."""
    key, end = torch.arange(chosen.shape[1], device=chosen.device), ends[:, None]
    newest = (key < end) & (key >= end - topk)
    return (
        (probability * chosen).sum(dim=1).mean(),
        (probability * newest).sum(dim=1).mean(),
        (topk / end).mean(),
        probability.topk(topk).values.sum(dim=1).mean(),
    )
