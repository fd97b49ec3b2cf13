"""Decoding of a trained model from fp8 pages, with CUDA graphs, sparse and dense."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import flashdsa
from examples.dense_to_sparse.looks import read
from examples.dense_to_sparse.model import VALUE, Attended, Attention, blocks

PAGE, PACKED, INDEX_BYTES = 64, 656, 132
FORMS = ("sparse", "dense", "expanded")
"""Attention over selected fp8 rows; over all rows, of bf16; PyTorch's, over keys and values of all
heads."""


class Caches(NamedTuple):
    """A layer's rows and index keys, in pages; or expanded keys and values."""

    kv: Tensor  # [pages, 64, 656] uint8; dense: [rows, 576]; expanded: keys [B, H, context, 192]
    indexed: Tensor  # [pages, 64, 1, 132] uint8; dense: empty; expanded: values like keys


class Server:
    """B users, each with the same prompt; a step gives every user the next token."""

    def __init__(
        self, model: Any, prompt: Tensor, users: int, room: int, form: str, *,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        """Fill the caches from the prompt [S]; `room` more tokens have a place."""
        self.model, self.users, self.form, self.invariant = model, users, form, batch_invariant
        device = model.device
        self.pages = -(-(len(prompt) + room) // PAGE)
        logits, attended = read(model, prompt, sparse=form == "sparse")
        table = torch.arange(users * self.pages, device=device, dtype=torch.int32)
        self.table = table.view(users, self.pages)
        self.caches = [
            self._filled(layer.self_attn, seen)
            for layer, seen in zip(blocks(model), attended, strict=True)
        ]
        self.lengths = torch.full((users,), len(prompt), device=device, dtype=torch.int32)
        self.tokens = logits[-1].argmax().expand(users).clone()

    def _filled(self, layer: Attention, seen: Attended) -> Caches:
        count, device = len(seen.kv), seen.kv.device
        if self.form == "expanded":
            k, v = layer.expand(seen.kv)
            shape = self.users, layer.num_heads, self.pages * PAGE, k.shape[-1]
            made = Caches(k.new_zeros(shape), k.new_zeros(shape))
            for cache, x in zip(made, (k, v), strict=True):
                cache[:, :, :count] = x.transpose(0, 1)
            return made
        pages = self.users * self.pages
        if self.form == "dense":
            kv = seen.kv.new_zeros(pages * PAGE, seen.kv.shape[1], dtype=torch.bfloat16)
            made = Caches(kv, kv[:0])
        else:
            kv = torch.zeros(pages, PAGE, PACKED, dtype=torch.uint8, device=device)
            index = torch.zeros(pages, PAGE, 1, INDEX_BYTES, dtype=torch.uint8, device=device)
            made = Caches(kv, index)
        at = torch.arange(count, device=device)
        for user in range(self.users):
            self._write(seen, user * self.pages * PAGE + at, made)
        return made

    def _write(self, seen: Attended, slots: Tensor, cache: Caches) -> None:
        if self.form == "dense":
            cache.kv[slots] = seen.kv.bfloat16()
            return
        flashdsa.write_kv_cache(seen.kv.bfloat16(), slots, cache.kv)
        flashdsa.write_index_k_cache(seen.indexed[1].bfloat16(), slots, cache.indexed)

    @torch.no_grad()
    def step(self) -> None:
        """Write `tokens` to the caches, and choose the next ones."""
        at, model = self.lengths.clone(), self.model
        self.lengths += 1
        cast = torch.autocast(at.device.type, torch.bfloat16, enabled=at.is_cuda)
        with cast:
            x = model.model.embed_tokens(self.tokens)
            cos, sin = model.model.rotary_emb(x.float(), at[None])
            for layer, cache in zip(blocks(model), self.caches, strict=True):
                attention = layer.self_attn
                seen = attention.project(layer.input_layernorm(x), (cos[0], sin[0]))
                decode = self._attend_expanded if self.form == "expanded" else self._attend
                x = x + decode(attention, seen, cache, at)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            self.tokens.copy_(model.lm_head(model.model.norm(x)).argmax(dim=-1))

    def _attend(self, layer: Attention, seen: Attended, cache: Caches, at: Tensor) -> Tensor:
        starts = self.table[:, 0] * PAGE
        self._write(seen, starts + at, cache)
        indices: Tensor | tuple[Tensor, Tensor] = (starts, starts + self.lengths)
        slots = None
        if self.form == "sparse":
            indices = self._select(layer, seen, cache)
            slots = self.lengths.clamp(max=layer.indexer.index_topk)
        out, _ = flashdsa.sparse_mla_fwd(
            layer.absorb(seen.q).bfloat16(), cache.kv, indices, sm_scale=layer.scaling,
            topk_length=slots, batch_invariant=self.invariant,
        )  # fmt: skip
        attended: Tensor = layer.o_proj(layer.values(out))
        return attended

    def _select(self, layer: Attention, seen: Attended, cache: Caches) -> Tensor:
        q, _, weights = seen.indexed
        q_fp8, folded = flashdsa.quantize_index_q(q.bfloat16(), weights.float())
        shape = self.users, layer.indexer.index_topk
        ids = torch.empty(shape, dtype=torch.int32, device=q.device)
        flashdsa.dsa_topk_indexer(q_fp8, cache.indexed, folded, self.lengths, self.table, ids)
        return ids

    def _attend_expanded(
        self, layer: Attention, seen: Attended, cache: Caches, at: Tensor
    ) -> Tensor:
        user = torch.arange(self.users, device=at.device)
        for place, x in zip(cache, layer.expand(seen.kv), strict=True):
            place[user, :, at] = x
        q, key = seen.q.to(cache.kv.dtype), torch.arange(self.pages * PAGE, device=at.device)
        mask = (key <= at[:, None])[:, None, None]
        out = functional.scaled_dot_product_attention(
            q[:, :, None], *cache, attn_mask=mask, scale=layer.scaling
        )
        values: Tensor = layer.o_proj(out[:, :, 0, :VALUE].flatten(1))
        return values


def generate(server: Server, count: int) -> tuple[Tensor, float]:
    """Tokens [B, count] and seconds a step; on a GPU steps are replays of a graph."""
    said, step = [], server.step
    if server.tokens.is_cuda:
        said.append(server.tokens.clone())
        step()  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            server.step()
        step = graph.replay
    began = time.perf_counter()
    while len(said) < count:
        said.append(server.tokens.clone())
        step()
    if server.tokens.is_cuda:
        torch.cuda.synchronize()
    return torch.stack(said, dim=1), (time.perf_counter() - began) / max(1, count - 1)
