"""Training: the language-model loss through the sparse op, the indexer by its own KL loss.

The indexer learns as DeepSeek-V3.2's: first from dense attention over every visible key, its
warm-up, then from sparse attention over the keys that it has selected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flashdsa import indexer_kl_loss, indexer_kl_loss_dense, sparse_mla_fwd
from flashdsa.demo.attention import SparseOutput, run_sparse
from flashdsa.demo.indexer import IndexerActivations, LightningIndexer
from flashdsa.demo.model import D_LATENT, SM_SCALE, ByteModel
from flashdsa.demo.options import DemoOptions

# Queries per window and step whose attention teaches the indexer; in the sparse stage on a GPU all.
KL_QUERIES = 32
WARM_UP_STEPS = 10
FINAL_LEARNING_RATE = 0.1  # of the peak, reached at the last step
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step: nats per byte, and nats of the indexer's divergence."""

    language: float
    indexer: float


def sample_windows(
    text: Tensor, batch: int, window: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of text [n] uint8: inputs and next bytes, both [batch, window] int64."""
    starts = torch.randint(len(text) - window, (batch, 1), generator=generator)
    return cut_windows(text, starts, window)


def cut_windows(text: Tensor, starts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The windows that begin at starts [batch, 1], and the byte that follows each position."""
    spans = text[starts + torch.arange(window + 1)].long()  # [batch, window + 1]
    return spans[:, :-1], spans[:, 1:]


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per byte of logits [batch, S, 256] on the last S of targets [batch, T]."""
    wanted = targets[:, -logits.shape[1] :]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def warm_up_loss(output: SparseOutput, rows: Tensor) -> Tensor:
    """KL(dense attention summed over heads || softmax of the index scores), mean over `rows` [n].

    Over every visible key, as in the dense warm-up of DeepSeek-V3.2.
    """
    projections = output.projections
    batch, num_queries = projections.q.shape[:2]
    window = projections.kv.shape[1]
    first = torch.arange(batch, device=rows.device).repeat_interleave(len(rows)) * window
    visible = (rows + window - num_queries + 1).repeat(batch)
    return dense_divergence(
        of_queries(output.index_inputs, rows),
        projections.q[:, rows].flatten(0, 1),
        projections.kv.flatten(0, 1),
        first,
        first + visible,
    ) / len(first)


def sparse_stage_loss(output: SparseOutput, rows: Tensor, backend: str) -> Tensor:
    """The same over the selected keys alone, as in DeepSeek-V3.2's sparse stage; of keys that
    follow each other in reading order."""
    projections = output.projections
    batch, num_queries = projections.q.shape[:2]
    return selected_divergence(
        of_queries(output.index_inputs, rows),
        projections.q[:, rows].flatten(0, 1),
        projections.kv.flatten(0, 1),
        output.indices.unflatten(0, (batch, num_queries))[:, rows].flatten(0, 1),
        backend,
    ) / (batch * len(rows))


def of_queries(index: IndexerActivations, rows: Tensor) -> IndexerActivations:
    """The operands of the queries `rows` of every window, windows one behind the other."""
    return IndexerActivations(
        index.q_index[:, rows].flatten(0, 1),
        index.k_index.flatten(0, 1),
        index.weights[:, rows].flatten(0, 1),
    )


def dense_divergence(
    index: IndexerActivations, q: Tensor, kv: Tensor, first: Tensor, end: Tensor
) -> Tensor:
    """Sum over n queries of the indexer's divergence from dense attention.

    index: q_index [n, 64, 128], k_index [K, 128], weights [n, 64]; q [n, H, 576], kv [K, 576];
    query i sees the keys [first[i], end[i]), both int64 [n].
    """
    with torch.no_grad():
        key = torch.arange(len(kv), device=kv.device)
        hidden = (key < first[:, None]) | (key >= end[:, None])
        logits = torch.einsum("nhd,td->nht", q, kv) * SM_SCALE
        lse = logits.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    return indexer_kl_loss_dense(
        *index,
        q.detach(),
        kv.detach(),
        lse,
        end.int(),
        key_start=first.int(),
        row_weight=torch.ones(len(q), device=q.device),
        sm_scale=SM_SCALE,
    )


def selected_divergence(
    index: IndexerActivations, q: Tensor, kv: Tensor, indices: Tensor, backend: str
) -> Tensor:
    """Sum over n queries of the indexer's divergence from attention over the selected keys.

    index, q, kv: as for `dense_divergence`; indices [n, topk] int32, rows of kv and of k_index.
    """
    q, kv = q.detach().bfloat16(), kv.detach().bfloat16()
    with torch.no_grad():
        _, lse = sparse_mla_fwd(q, kv, indices, d_v=D_LATENT, sm_scale=SM_SCALE, backend=backend)
    return indexer_kl_loss(
        index.q_index.bfloat16(),
        index.k_index.bfloat16(),
        index.weights,
        indices,
        q=q,
        kv=kv,
        lse=lse,
        sm_scale=SM_SCALE,
        deterministic=True,
        backend=backend,
    ).sum()


class Trainer:
    """Owns the optimiser and the random streams; one `step` is one batch of windows."""

    def __init__(
        self, model: ByteModel, indexer: LightningIndexer, text: Tensor, options: DemoOptions
    ) -> None:
        """Train `model` and `indexer` on text [n] uint8."""
        self.model, self.indexer, self.text, self.options = model, indexer, text, options
        self.generator = torch.Generator().manual_seed(options.seed)
        self.steps_taken = 0
        self.parameters = [*model.parameters(), *indexer.parameters()]
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, self._learning_rate)

    def _learning_rate(self, step: int) -> float:
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.options.steps))
        return warm_up * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)

    def step(self) -> StepLosses:
        """Select, attend, go back through both losses, update."""
        options = self.options
        tokens, targets = sample_windows(self.text, options.batch, options.window, self.generator)
        rows = torch.randperm(options.num_queries, generator=self.generator)
        if self.warms_up or options.device == "cpu":
            rows = rows[:KL_QUERIES]
        batch = (one.to(options.device) for one in (tokens, targets, rows))
        language, divergence = self.losses(*batch)
        self.optimiser.zero_grad()
        (language + divergence).backward()
        found = self.share(StepLosses(language.item(), divergence.item()))
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        self.optimiser.step()
        self.schedule.step()
        self.steps_taken += 1
        return found

    @property
    def warms_up(self) -> bool:
        """Whether dense attention teaches the indexer in the next step."""
        return self.steps_taken < self.options.warm_up_steps

    def losses(self, tokens: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The language loss and the indexer's, the latter of the queries named by `rows` [n]."""
        options = self.options
        output = run_sparse(
            self.model,
            self.indexer,
            tokens,
            None,
            num_queries=options.num_queries,
            topk=options.topk,
            backend=options.backend,
        )
        if self.warms_up:
            divergence = warm_up_loss(output, rows)
        else:
            divergence = sparse_stage_loss(output, rows, options.backend)
        return language_loss(output.logits, targets), divergence

    def share(self, losses: StepLosses) -> StepLosses:
        """What other processes add to the gradients and the losses: here, nothing."""
        return losses
