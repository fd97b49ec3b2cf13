"""The demo's training on several processes: each holds a part of every window's tokens.

Weights are the same everywhere, batches too; a process computes hidden states, queries and keys of
its own tokens only. Gradients of the weights are added over the processes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from flashdsa import quantize_index_q
from flashdsa.demo.indexer import IndexerActivations, LightningIndexer
from flashdsa.demo.model import D_LATENT, LOCAL_BYTES, SM_SCALE, ByteModel, normalise
from flashdsa.demo.options import DemoOptions
from flashdsa.demo.text import load_corpus
from flashdsa.demo.train import StepLosses, Trainer, dense_divergence, selected_divergence
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
)


class LocalRows(NamedTuple):
    """What one process computes of a batch; N local rows, S of them queries."""

    hidden: Tensor  # [1, S, D_MODEL]
    q: Tensor  # [1, S, H, D_QK]
    kv: Tensor  # [1, N, D_QK]
    q_index: Tensor  # [1, S, 64, 128]
    k_index: Tensor  # [1, N, 128]
    weights: Tensor  # [1, S, 64]
    rows: Tensor  # [S] int64, the local row of each query


class ContextParallelTrainer(Trainer):
    """A `Trainer` whose batch is spread over a mesh; every process takes the same steps."""

    def __init__(
        self,
        model: ByteModel,
        indexer: LightningIndexer,
        text: Tensor,
        options: DemoOptions,
        mesh: DeviceMesh,
    ) -> None:
        """Train `model` and `indexer`, the same on every process, on text [n] uint8."""
        super().__init__(model, indexer, text, options)
        self.mesh = mesh
        bounds = range(0, (options.batch + 1) * options.window, options.window)
        # Dealt out by pages: the last positions of a window, which alone ask, lie on all processes.
        self.layout = SequenceLayout.packed(bounds, mesh)

    def losses(self, tokens: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """This process's part of both losses; the sums over processes are those of `Trainer`."""
        options, layout = self.options, self.layout
        local = self._project(tokens)
        indices = self._select(local)
        flat = context_parallel_sparse_mla(
            local.q[0].bfloat16(),
            local.kv[0].bfloat16(),
            indices,
            self.mesh,
            d_v=D_LATENT,
            sm_scale=SM_SCALE,
            deterministic=True,
            backend=options.backend,
        )
        logits = self.model.read_out(local.hidden, flat[None])[0]
        asked = layout.positions[local.rows]
        total = options.batch * options.num_queries
        language = functional.cross_entropy(logits, targets.flatten()[asked], reduction="sum")
        return language / total, self._indexer_loss(local, indices, rows)

    def share(self, losses: StepLosses) -> StepLosses:
        """Add gradients and losses over the processes."""
        group = self.mesh.get_group()
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        parts = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(parts, group=group)
        for one, part in zip(gradients, parts.split([g.numel() for g in gradients]), strict=True):
            one.copy_(part.view_as(one))
        found = torch.tensor([losses.language, losses.indexer], dtype=torch.float64)
        dist.all_reduce(found, group=group)
        return StepLosses(*found.tolist())

    def _project(self, tokens: Tensor) -> LocalRows:
        """Hidden states, queries and keys of the local rows; tokens [batch, T] are those of all.

        A row needs the bytes before it, which may lie on another process: bytes are on all.
        """
        model, layout = self.model, self.layout
        position = (layout.seq_lens - 1).clamp_min(0).long()  # [N], in the window
        first = layout.positions.clamp_min(0) - position
        back = torch.arange(LOCAL_BYTES + 1)
        source = position[:, None] - back  # [N, LOCAL_BYTES + 1], the newest byte first
        token = tokens.flatten()[first[:, None] + source.clamp_min(0)]
        embedded = functional.embedding(token, model.embed) * (source >= 0)[..., None]
        hidden = normalise(embedded[:, :-1].flatten(1) @ model.mix)  # [N, D_MODEL]
        before = normalise(embedded[:, 1:].flatten(1) @ model.mix) * (position > 0)[:, None]
        key_input = torch.cat([before, embedded[:, 0]], dim=-1)[None]
        asks = layout.seq_lens > self.options.window - self.options.num_queries
        rows = asks.nonzero().flatten()
        of_queries = hidden[rows][None]
        index = self.indexer.project_at(of_queries, position[rows], key_input, position)
        return LocalRows(
            of_queries,
            model.queries(of_queries, position[rows]),
            model.keys(hidden[None], key_input, position),
            *index,
            rows,
        )

    @torch.no_grad()
    def _select(self, local: LocalRows) -> Tensor:
        """Rows [S, topk] int32 of the gathered kv that the indexer chooses."""
        q8, weights = quantize_index_q(local.q_index[0].bfloat16(), local.weights[0])
        return context_parallel_topk_indexer(
            q8,
            local.k_index[0].bfloat16(),
            weights,
            self.mesh,
            layout=self.layout,
            topk=self.options.topk,
            query_rows=local.rows,
            backend=self.options.backend,
        )

    def _indexer_loss(self, local: LocalRows, indices: Tensor, rows: Tensor) -> Tensor:
        """This process's part of the indexer's loss, of those of the queries `rows` it holds.

        Args:
            indices: [S, topk] int32, gathered rows.
        """
        options, layout = self.options, self.layout
        seen = layout.seq_lens[local.rows].long()
        wanted = torch.isin(seen - 1, rows + options.window - options.num_queries)
        index = IndexerActivations(
            local.q_index[0, wanted],
            layout.unshard(local.k_index[0]),
            local.weights[0, wanted],
        )
        q, kv = local.q[0, wanted], layout.unshard(local.kv[0])
        if self.warms_up:
            first = layout.documents[local.rows[wanted]] * options.window
            total = dense_divergence(index, q, kv, first, first + seen[wanted])
        else:
            tokens = layout.token_of(indices[wanted])
            total = selected_divergence(index, q, kv, tokens, options.backend)
        return total / (options.batch * len(rows))


def train_along(options: DemoOptions, mesh: DeviceMesh) -> None:
    """Take the steps of a demo that another process of the mesh reports on."""
    text = load_corpus().train
    trainer = make_trainer(*untrained(options), text, options, mesh)
    for _ in range(options.steps):
        trainer.step()


def untrained(options: DemoOptions) -> tuple[ByteModel, LightningIndexer]:
    """Model and indexer from the seed; the global random state of torch is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model, indexer = ByteModel(options.num_heads), LightningIndexer()
    return model.to(options.device), indexer.to(options.device)


def make_trainer(
    model: ByteModel,
    indexer: LightningIndexer,
    text: Tensor,
    options: DemoOptions,
    mesh: DeviceMesh | None,
) -> Trainer:
    """Of one process, or of all processes of `mesh`."""
    if mesh is None:
        return Trainer(model, indexer, text, options)
    return ContextParallelTrainer(model, indexer, text, options, mesh)
