"""Training: the language loss through `sparse_mla`, and the indexer's own KL loss; its judgement.

The indexer learns in DeepSeek-V3.2's two stages: first from dense attention over every key that a
query sees, its warm-up, then from the sparse attention over the keys that it has selected. Held-out
text is read by sparse and by dense attention of the same weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from examples.demo.model import Attention, ByteModel, SparseAttention, dense, dense_logits
from examples.demo.v4 import RATIO, CompressedSparseAttention
from flashdsa import attention_target, indexer_kl_loss, indexer_kl_loss_dense, sparse_mla_fwd
from flashdsa.errors import ArgumentValueError

LEARNING_RATE, RISING_STEPS, FINAL_SHARE = 3e-3, 10, 0.1
KL_QUERIES = 32  # that teach the indexer in a step; in the sparse stage on a GPU all do


FORMS = {"v32": SparseAttention, "v4": CompressedSparseAttention}


@dataclass(frozen=True)
class DemoOptions:
    """Choices of a run; the defaults take two minutes on two CPU cores.

    The last `num_queries` positions of a window attend, each to `topk` of the keys before it; keys
    are bytes, or entries of `form` "v4".
    """

    form: str = "v32"
    steps: int = 200
    window: int = 1280
    num_queries: int = 256
    topk: int = 256
    num_heads: int = 4
    seed: int = 0
    eval_every: int = 25
    eval_windows: int = 4
    device: str = "cpu"
    backend: str = "auto"
    picture: Path = Path("out/demo.png")
    indices: Path | None = None

    def __post_init__(self) -> None:
        """Raise ArgumentValueError for sizes with which nothing is selected."""
        if self.form not in FORMS:
            raise ArgumentValueError(f"form: expected {' or '.join(FORMS)}; got {self.form!r}")
        smallest = (self.window - self.num_queries + 1) // self.bytes_of_a_key
        if self.topk >= smallest:
            divided = f" // {self.bytes_of_a_key}" if self.form == "v4" else ""
            raise ArgumentValueError(
                "topk: expected less than the smallest context, window - num_queries + 1"
                f"{divided} = {smallest}, so that queries really select; got {self.topk}"
            )

    @property
    def bytes_of_a_key(self) -> int:
        """Bytes of a context for each key."""
        return RATIO if self.form == "v4" else 1

    @property
    def keys(self) -> str:
        """Name of what the indexer selects."""
        return "entries" if self.form == "v4" else "keys"

    @property
    def dense_attention(self) -> str:
        return "dense attention" + (" to entries" if self.form == "v4" else "")

    @property
    def warm_up_steps(self) -> int:
        """Number of steps in which dense attention teaches the indexer."""
        return -(-self.steps // 2)


def language_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean nats per byte of logits [S, 256]; the last S of tokens [T + 1] were to be predicted."""
    return functional.cross_entropy(logits, tokens[-len(logits) :])


def warm_up_loss(attention: Attention, rows: Tensor) -> Tensor:
    """KL(dense attention || softmax of the index scores) over all visible keys, mean of `rows`."""
    index = attention.q_index[rows], attention.k_index, attention.weights[rows]
    q, kv = attention.q[rows].detach(), attention.kv.detach()
    lse = dense_logits(attention, rows).detach().logsumexp(-1)
    return indexer_kl_loss_dense(*index, q, kv, lse, attention.ends[rows], sm_scale=attention.scale)


def sparse_stage_loss(attention: Attention, rows: Tensor, backend: str) -> Tensor:
    """The same over the selected keys alone."""
    q_index, k_index = attention.q_index[rows].bfloat16(), attention.k_index.bfloat16()
    weights, indices = attention.weights[rows], attention.indices[rows]
    q, kv = attention.q[rows].detach().bfloat16(), attention.kv.detach().bfloat16()
    lists, sink = attention.lists(rows), attention.near and attention.near.sink
    with torch.no_grad():
        _, lse = sparse_mla_fwd(q, kv, indices, **lists, backend=backend)
        target = attention_target(
            q, kv, lse, indices, sm_scale=attention.scale, attn_sink=sink, backend=backend
        )
    index = q_index, k_index, weights, indices
    return indexer_kl_loss(*index, target=target, deterministic=True, backend=backend).mean()


class Trainer:
    """The optimiser and the random windows of a run; each `step` learns from one window."""

    def __init__(self, model: ByteModel, text: Tensor, options: DemoOptions) -> None:
        """Train `model` on text [n] uint8."""
        self.model, self.text, self.options = model, text, options
        self.generator = torch.Generator().manual_seed(options.seed)
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, self._rate)

    def _rate(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.options.steps))
        return min(1.0, (step + 1) / RISING_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)

    def step(self, number: int) -> tuple[float, float]:
        """Select, attend, go back through both losses, update; return the losses."""
        options = self.options
        start = int(torch.randint(len(self.text) - options.window, (), generator=self.generator))
        tokens = self.text[start : start + options.window + 1].long().to(options.device)
        logits, _, attention = self.model(tokens[:-1])
        language = language_loss(logits, tokens)
        rows = torch.randperm(options.num_queries, generator=self.generator).to(options.device)
        if number <= options.warm_up_steps:
            divergence = warm_up_loss(attention, rows[:KL_QUERIES])
        else:
            taught = rows if options.device == "cuda" else rows[:KL_QUERIES]
            divergence = sparse_stage_loss(attention, taught, options.backend)
        self.optimiser.zero_grad()
        (language + divergence).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        return language.item(), divergence.item()


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
