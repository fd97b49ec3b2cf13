"""Held-out text: sparse beside dense attention on the same weights, and how good the keys are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.demo.model import D_LATENT, ByteModel, dense_logits
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
    probability: Tensor  # [S, T] float32: dense attention there, mean over heads
    indices: Tensor  # [windows, S, topk] int32


@torch.no_grad()
def evaluate(model: ByteModel, text: Tensor, options: DemoOptions, step: int) -> Evaluation:
    """Run the same weights sparsely and densely on evenly spaced windows of text [n] uint8."""
    numbers, chosen, probability, indices = [], [], [], []
    starts = torch.linspace(0, len(text) - options.window - 1, options.eval_windows).long()
    for start in starts.tolist():
        tokens = text[start : start + options.window + 1].long().to(options.device)
        logits, hidden, attention = model(tokens[:-1])
        rows = torch.arange(options.num_queries, device=tokens.device)
        weights = dense_logits(attention, rows).softmax(-1)  # [S, H, T]
        attended = torch.einsum("sht,tc->shc", weights, attention.kv[:, :D_LATENT])
        probability.append(weights.mean(dim=1))
        mask = torch.zeros_like(probability[-1], dtype=torch.bool)
        chosen.append(mask.scatter(1, attention.indices.long(), True))
        indices.append(attention.indices.cpu())
        losses = (language_loss(x, tokens) for x in (logits, model.read_out(hidden, attended)))
        shares = captured(chosen[-1], probability[-1], options.topk)
        numbers.append(torch.stack([*losses, *shares]))
    means = torch.stack(numbers).mean(dim=0).tolist()
    tensors = chosen[0].cpu(), probability[0].cpu(), torch.stack(indices)
    return Evaluation._make((step, *means, *tensors))


def captured(chosen: Tensor, probability: Tensor, topk: int) -> tuple[Tensor, ...]:
    """Mean probability on the keys that are chosen, the newest, random, and the best."""
    num_queries, window = chosen.shape
    key = torch.arange(window, device=chosen.device)
    query = key[-num_queries:, None]
    newest = (key <= query) & (key > query - topk)
    return (
        (probability * chosen).sum(dim=1).mean(),
        (probability * newest).sum(dim=1).mean(),
        (topk / (query + 1)).mean(),
        probability.topk(topk).values.sum(dim=1).mean(),
    )
