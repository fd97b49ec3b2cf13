"""Looks at a checkpoint: held-out loss, needles, what the indexer captures, neighbours, speed."""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from examples.dense_to_sparse.model import SM_SCALE, Attended, Attention, ByteModel
from examples.dense_to_sparse.text import windows

KEY, ANSWER = 16, 8  # letters that a needle is asked by, and digits to be said
NEEDLE = KEY + ANSWER + len(" = \n")  # bytes; nearer ones would overlap
GROUPS = (2, 4, 8)  # neighbouring queries whose lists kernels may join


def run(model: ByteModel, tokens: Tensor, *, sparse: bool) -> tuple[Tensor, list[Attended]]:
    """Logits [S, 256] fp32 and the layers' tensors, without gradients."""
    device = model.lm_head.weight.device
    cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.no_grad(), cast:
        logits, attended = model(tokens.to(device), sparse=sparse)
    return logits.float(), attended


def held_out_loss(model: ByteModel, text: Tensor, context: int, count: int, sparse: bool) -> float:
    """Mean nats a byte over windows of held-out text."""
    return _mean_loss(lambda x: run(model, x, sparse=sparse)[0], text, context, count)


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


def needle_recall(
    model: ByteModel, text: Tensor, context: int, distance: int, count: int, sparse: bool
) -> float:
    """Share of digits that are said again `distance` bytes after they were first seen."""
    right = 0
    for number, tokens in enumerate(windows(text, context, 54321, 0, count)):
        draw = random.Random(number)
        key = "".join(draw.choices(string.ascii_lowercase, k=KEY))
        answer = "".join(draw.choices(string.digits, k=ANSWER))
        needle = torch.tensor(list(f"{key} = {answer}\n".encode()))
        first = context - distance - len(needle)
        tokens[first : first + len(needle)] = needle
        tokens[context - len(needle) : context] = needle
        logits, _ = run(model, tokens[:context], sparse=sparse)
        said = logits[-ANSWER - 2 : -2].argmax(dim=-1).cpu()
        right += int((said == needle[-ANSWER - 1 : -1]).sum())
    return right / (count * ANSWER)


def selection(model: ByteModel, text: Tensor, context: int, rows: int) -> dict[str, Any]:
    """By layer: the share of the attention's probability on the selected keys, on as many newest
    ones and on the best; rows of a list that the next query has, too, and rows of groups' unions
    as multiples of a list. The lists are returned as well."""
    (tokens,) = windows(text, context, 777, 0, 1)
    _, attended = run(model, tokens[:-1], sparse=True)
    found: dict[str, Any] = {"captured": [], "newest": [], "best": [], "next": [], "unions": []}
    for layer, seen in zip(model.blocks, attended, strict=True):
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
    found["lists"] = torch.stack([x.indices for x in attended if x.indices is not None]).cpu()
    return found


@torch.no_grad()
def probabilities(layer: Attention, seen: Attended, rows: Tensor) -> Tensor:
    """Dense attention of some queries, mean over the heads, [rows, S]."""
    q, kv = layer.absorb(seen.q[rows].float()), seen.kv.float()
    key = torch.arange(len(kv), device=rows.device)
    total = torch.zeros(len(rows), len(kv), device=rows.device)
    for head in range(q.shape[1]):
        logits = (q[:, head] @ kv.T * SM_SCALE).masked_fill(key > rows[:, None], -torch.inf)
        total += logits.softmax(-1) / q.shape[1]
    return total


def _union(indices: Tensor, first: Tensor, count: int) -> float:
    """Mean number of rows that `count` neighbours from `first` on have together."""
    lists = indices[(first[:, None] + torch.arange(count, device=first.device)).flatten()]
    rows = lists.view(len(first), -1).sort(dim=1).values
    fresh = functional.pad(rows[:, 1:] != rows[:, :-1], (1, 0), value=True) & (rows >= 0)
    return float(fresh.sum(1).float().mean())


def training_speed(model: ByteModel, context: int, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens a second forward and backward, and the peak of memory, dense and sparse."""
    device = model.lm_head.weight.device
    tokens = torch.randint(256, (context,), device=device)
    found = {}
    for sparse in (False, True):
        times = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats + 1):
            began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, _ = model(tokens, sparse=sparse)
                functional.cross_entropy(logits.float(), tokens).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        name = "sparse" if sparse else "dense"
        found[name] = {"tokens_s": context / min(times[1:]), "peak_gib": memory}
    return found
