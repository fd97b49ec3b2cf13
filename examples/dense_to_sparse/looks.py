"""Looks at a checkpoint: held-out loss, what the indexer captures, neighbours, speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from examples.dense_to_sparse.model import Attended, Attention, blocks, run
from examples.dense_to_sparse.text import windows

GROUPS = (2, 4, 8)  # neighbouring queries whose lists kernels may join
RECALL = 0.9
"""Share of what the best keys capture that each layer's indexer must capture to pass."""


def read(model: Any, tokens: Tensor, *, sparse: bool) -> tuple[Tensor, list[Attended]]:
    """Logits [S, vocabulary] fp32 and the layers' tensors, without gradients."""
    kind = model.device.type
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        logits, attended = run(model, tokens.to(model.device), sparse=sparse)
    return logits.float(), attended


def held_out_loss(model: Any, text: Tensor, context: int, count: int, sparse: bool) -> float:
    """Mean nats a token over windows of held-out text."""
    return _mean_loss(lambda x: read(model, x, sparse=sparse)[0], text, context, count)


@torch.no_grad()
def loss_in_transformers(theirs: Any, text: Tensor, context: int, count: int) -> float:
    """The same of a model of transformers."""

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = theirs(tokens[None].to(theirs.device), use_cache=False).logits[0].float()
        return found

    return _mean_loss(logits, text, context, count)


def _mean_loss(
    logits_of: Callable[[Tensor], Tensor], text: Tensor, context: int, count: int
) -> float:
    losses = []
    for tokens in windows(text, context, 12345, 0, count):
        logits = logits_of(tokens[:-1])
        losses.append(functional.cross_entropy(logits, tokens[1:].to(logits.device)).item())
    return sum(losses) / len(losses)


def selection(model: Any, text: Tensor, context: int, rows: int) -> dict[str, Any]:
    """By layer: the share of the attention's probability on the selected keys, on as many newest
    ones and on the best, and the first as a share of the last: the indexer's recall; rows of a list
    that the next query has, too, and rows of groups' unions as multiples of a list. The lists are
    returned as well."""
    (tokens,) = windows(text, context, 777, 0, 1)
    _, attended = read(model, tokens[:-1], sparse=True)
    found: dict[str, Any] = {"captured": [], "newest": [], "best": [], "next": [], "unions": []}
    for layer, seen in zip(blocks(model), attended, strict=True):
        some = torch.linspace(context // 2, context - 1, rows).long().to(seen.q.device)
        probability = probabilities(layer.self_attn, seen, some)
        indices = seen.indices
        assert indices is not None
        topk = indices.shape[1]
        key = torch.arange(context, device=some.device)
        newest = (key <= some[:, None]) & (key > some[:, None] - topk)
        picked = torch.zeros_like(newest).scatter(1, indices[some].long(), True)
        found["captured"].append((probability * picked).sum(1).mean().item())
        found["newest"].append((probability * newest).sum(1).mean().item())
        found["best"].append(probability.topk(topk).values.sum(1).mean().item())
        counts = [_union(indices, some - some % n, n) / topk for n in GROUPS]
        found["next"].append(2 - counts[0])
        found["unions"].append(counts)
    pairs = zip(found["captured"], found["best"], strict=True)
    found["recall"] = [captured / best for captured, best in pairs]
    found["lists"] = torch.stack([x.indices for x in attended if x.indices is not None]).cpu()
    return found


@torch.no_grad()
def probabilities(layer: Attention, seen: Attended, rows: Tensor) -> Tensor:
    """Dense attention of some queries, mean over the heads, [rows, S]."""
    q, kv = layer.absorb(seen.q[rows].float()), seen.kv.float()
    key = torch.arange(len(kv), device=rows.device)
    total = torch.zeros(len(rows), len(kv), device=rows.device)
    for head in range(q.shape[1]):
        logits = (q[:, head] @ kv.T * layer.scaling).masked_fill(key > rows[:, None], -torch.inf)
        total += logits.softmax(-1) / q.shape[1]
    return total


def _union(indices: Tensor, first: Tensor, count: int) -> float:
    """Mean number of rows that `count` neighbours from `first` on have together."""
    lists = indices[(first[:, None] + torch.arange(count, device=first.device)).flatten()]
    rows = lists.view(len(first), -1).sort(dim=1).values
    fresh = functional.pad(rows[:, 1:] != rows[:, :-1], (1, 0), value=True) & (rows >= 0)
    return float(fresh.sum(1).float().mean())


def training_speed(model: Any, context: int, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens a second forward and backward, and the peak of memory, dense and sparse."""
    device = model.device
    tokens = torch.randint(256, (context,), device=device)
    found = {}
    for sparse in (False, True):
        times = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats + 1):
            began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, _ = run(model, tokens, sparse=sparse)
                functional.cross_entropy(logits.float(), tokens).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        name = "sparse" if sparse else "dense"
        found[name] = {"tokens_s": context / min(times[1:]), "peak_gib": memory}
    return found
