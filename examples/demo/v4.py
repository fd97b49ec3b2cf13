"""DeepSeek-V4's layer for the demo: a window of bytes and compressed entries in one softmax.

Every query attends to the last 128 bytes and to `topk` entries, each of which pools the keys of
eight bytes. The indexer scores entries, not bytes: its keys are pooled alike. Keys are values too,
so their rotation reaches the output, which is turned back by the query's position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.demo import model
from flashdsa import compress_kv, rotate_tail

RATIO = 4
"""Bytes of an entry's own window; it also pools those of the window before."""
Tables = tuple[Tensor, Tensor]


class Compressor(nn.Module):
    """Pools keys into entries, `compress_kv` with learned gates."""

    def __init__(self, columns: int, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.w_kv, self.w_gate = (
            model.weight(model.D_KEY, 2 * columns),
            model.weight(model.D_KEY, 2 * columns),
        )
        self.ape = nn.Parameter(torch.zeros(RATIO, 2 * columns))
        self.norm = nn.Parameter(torch.ones(columns))

    def forward(self, key_input: Tensor, rotation: Tables) -> Tensor:
        """key_input [T, D_KEY] -> entries [T // RATIO, columns] bf16."""
        entries = compress_kv(
            (key_input @ self.w_kv).bfloat16(),
            (key_input @ self.w_gate).bfloat16(),
            self.ape,
            ratio=RATIO,
            overlap=True,
            norm_weight=self.norm,
            rotation=rotation,
            backend=self.backend,
        )
        assert entries is not None
        return entries


class EntryIndexer(nn.Module):
    """The lightning indexer over entries. Its inputs are detached."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.w_q = model.weight(model.D_MODEL, model.INDEX_HEADS, model.D_INDEX)
        self.w_weights = model.weight(model.D_MODEL, model.INDEX_HEADS)
        self.compressor = Compressor(model.D_INDEX, backend)

    def forward(
        self, hidden: Tensor, key_input: Tensor, own: Tensor, rotation: Tables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [S, D_MODEL] at positions own [S], key_input [T, D_KEY] -> q_index, k_index
        [T // RATIO, 128] and weights."""
        hidden, key_input = hidden.detach(), key_input.detach()
        q = rotate_tail(torch.einsum("sd,dhk->shk", hidden, self.w_q), own, rotation)
        k = self.compressor(key_input, rotation).float()
        return q, k, hidden @ self.w_weights * (model.INDEX_HEADS * model.D_INDEX) ** -0.5


class CompressedSparseAttention(nn.Module):
    """Attention to a window of bytes and to the entries that the indexer selects."""

    def __init__(self, num_heads: int, topk: int, backend: str) -> None:
        """Create float32 weights; `backend` serves the operations."""
        super().__init__()
        self.topk, self.backend = topk, backend
        self.indexer = EntryIndexer(backend)
        self.compressor = Compressor(model.D_LATENT, backend)
        self.w_kv = model.weight(model.D_KEY, model.D_LATENT)
        # Queries and entries start as keys do, so equal contexts attract from the first step on.
        self.compressor.w_kv.data = self.w_kv.detach().repeat(1, 2)
        w_q = self.w_kv.detach()[: model.D_MODEL, None].repeat(1, num_heads, 1)
        self.w_q = nn.Parameter(
            w_q + 0.5 * model.weight(model.D_MODEL, num_heads, model.D_LATENT).detach()
        )
        self.sink = nn.Parameter(torch.zeros(num_heads))

    def forward(self, hidden: Tensor, key_input: Tensor, num_queries: int) -> model.Attention:
        """hidden [T, D_MODEL], key_input [T, D_KEY]; the last `num_queries` positions attend."""
        positions = torch.arange(len(hidden), device=hidden.device, dtype=torch.int32)
        rotation, own = rotation_of(positions), positions[-num_queries:]
        window = rotate_tail(model.normalise(key_input @ self.w_kv), positions, rotation)
        entries = self.compressor(key_input, rotation).float()
        hidden = hidden[-num_queries:]
        q = model.normalise(torch.einsum("sd,dhc->shc", hidden, self.w_q))
        q = rotate_tail(q, own, rotation)

        q_index, k_index, weights = self.indexer(hidden, key_input, own, rotation)
        ends = (own + 1) // RATIO  # entries whose bytes are all there
        indices = model.select(q_index, k_index, weights, ends, self.topk, self.backend)
        near = model.Near(window, own, self.sink, rotation)
        tensors = q, entries, q_index, k_index, weights, ends, indices
        return model.attend(tensors, model.D_LATENT**-0.5, near, self.backend)


def rotation_of(positions: Tensor) -> Tables:
    """Cosines and sines [T, 32] of the last 64 columns."""
    frequency = 10_000.0 ** (
        -torch.arange(0, model.D_ROPE, 2, device=positions.device) / model.D_ROPE
    )
    angle = positions[:, None] * frequency
    return angle.cos(), angle.sin()
