"""A small right call of every public operation, of shapes that the CPU and a Hopper GPU serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdsa

S, S_KV, H, H_INDEX, TOPK, INDEXER_TOPK, PAGES = 3, 128, 64, 16, 64, 512, 4


class Call(NamedTuple):
    """A public function and its arguments by name."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    @property
    def tensors(self) -> list[str]:
        """Names of the arguments that are tensors."""
        return [name for name, value in self.arguments.items() if isinstance(value, Tensor)]


def bound(operation: str) -> Callable[..., Any]:
    """The operation bound and called once; its operands by name, in order."""

    def call(**operands: Tensor | None) -> Any:
        given = tuple(operands.values())
        return flashdsa.bind(operation, given)(given)

    return call


def public_calls(device: str) -> dict[str, Call]:
    """By what they are called here, which begins with the function's name."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def integers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator).to(device, torch.int32)

    bf16 = torch.bfloat16
    attention = {
        "q": normal(S, H, 576, dtype=bf16),
        "kv": normal(S_KV, 576, dtype=bf16),
        "indices": integers(S_KV, S, TOPK),
        "topk_length": integers(TOPK, S),
        "attn_sink": normal(H),
    }
    out, lse = flashdsa.sparse_mla_fwd(**attention)
    rows = {"q": attention["q"], "kv": attention["kv"], "indices": attention["indices"]}
    packed = {**rows, "kv": flashdsa.quantize_kv(attention["kv"])}
    optional = {name: attention[name] for name in ("topk_length", "attn_sink")}
    buffers = {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}
    trained = {
        "q_index": normal(S, H_INDEX, 128, dtype=bf16),
        "k_index": normal(S_KV, 128, dtype=bf16),
        "weights": normal(S, H_INDEX),
        "indices": attention["indices"],
    }
    target = {"q": attention["q"], "kv": attention["kv"], "lse": lse}
    dense = {name: trained[name] for name in ("q_index", "k_index", "weights")}
    dense |= {"q": attention["q"], "k": attention["kv"], "lse": lse}
    scores = {"scores": normal(S, TOPK), "target": normal(S, TOPK).abs()}
    cache = torch.zeros(PAGES, 64, 1, 132, dtype=torch.uint8, device=device)
    q_fp8, folded = flashdsa.quantize_index_q(normal(S, H, 128), normal(S, H))
    k_fp8, k_scale = flashdsa.quantize_index_k(normal(S_KV, 128))
    indexer = {
        "q_index_fp8": q_fp8,
        "k_index_cache_fp8": cache,
        "weights": folded,
        "seq_lens": integers(64 * PAGES, S),
        "block_table": integers(PAGES, S, PAGES),
    }
    ids = torch.empty(S, INDEXER_TOPK, dtype=torch.int32, device=device)
    prefill = {
        "q_index": q_fp8,
        "k_index": k_fp8,
        "weights": folded,
        "starts": torch.zeros(S, dtype=torch.int32, device=device),
        "ends": integers(S_KV, S),
        "k_scale": k_scale,
    }
    slots = torch.tensor([2, -1, 70], dtype=torch.int32, device=device)
    read = torch.tensor([2, 0, 70], dtype=torch.int32, device=device)
    kv_cache = torch.zeros(2, 64, 576, dtype=bf16, device=device)
    bytes_cache = torch.zeros(2, 64, 656, dtype=torch.uint8, device=device)
    latents = normal(S, 576)
    offsets = torch.tensor([0, 1, S], dtype=torch.int32, device=device)
    f = flashdsa
    named: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "sparse_mla_fwd": (f.sparse_mla_fwd, attention),
        "sparse_mla_fwd, packed": (f.sparse_mla_fwd, packed),
        "sparse_mla_fwd, int64": (
            f.sparse_mla_fwd,
            {**rows, "indices": rows["indices"].long()},
        ),
        "sparse_mla_fwd, buffers": (f.sparse_mla_fwd, {**rows, **buffers}),
        "bind, buffers": (
            bound("sparse_mla_fwd_out"),
            {**rows, **buffers, "max_logits": None, **optional},
        ),
        "sparse_mla": (f.sparse_mla, attention),
        "mla_bwd": (f.mla_bwd, {**attention, "dO": out, "lse": lse, "O": out}),
        "lse_to_base2": (f.lse_to_base2, {"lse": lse}),
        "lse_from_base2": (f.lse_from_base2, {"lse": lse}),
        "lse_for_merge": (f.lse_for_merge, {"lse": lse}),
        "merge_attention": (
            f.merge_attention,
            {"outs": torch.stack([out, out]), "lses": torch.stack([lse, lse])},
        ),
        "attention_target": (
            f.attention_target,
            {**attention, "lse": lse, "accumulate_into": normal(S, TOPK)},
        ),
        "indexer_scores": (f.indexer_scores, trained),
        "indexer_bwd": (f.indexer_bwd, {**trained, "grad_scores": normal(S, TOPK)}),
        "indexer_kl": (f.indexer_kl, scores),
        "indexer_kl_bwd": (f.indexer_kl_bwd, {**scores, "grad_kl": normal(S)}),
        "indexer_kl_loss": (f.indexer_kl_loss, {**trained, **target}),
        "indexer_kl_loss_dense": (
            f.indexer_kl_loss_dense,
            {**dense, "key_end": integers(S_KV, S)},
        ),
        "dsa_topk_indexer": (f.dsa_topk_indexer, {**indexer, "topk_indices": ids}),
        "dsa_topk_indexer, sorted": (
            f.dsa_topk_indexer,
            {**indexer, "topk_indices": ids, "sorted": True},
        ),
        "bind": (bound("dsa_topk_indexer"), {**indexer, "topk_indices": ids}),
        "indexer_logits": (f.indexer_logits, {**indexer, "max_len": 64 * PAGES}),
        "topk_indices": (
            f.topk_indices,
            {"scores": normal(S, 700), "lengths": integers(700, S), "topk": INDEXER_TOPK},
        ),
        "dsa_topk_prefill": (f.dsa_topk_prefill, {**prefill, "topk_indices": ids}),
        "prefill_logits": (f.prefill_logits, prefill),
        "causal_ranges": (
            f.causal_ranges,
            {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone(), "num_queries": S},
        ),
        "quantize_index_k": (f.quantize_index_k, {"k": normal(S_KV, 128)}),
        "quantize_index_q": (
            f.quantize_index_q,
            {"q": normal(S, H, 128), "weights": normal(S, H)},
        ),
        "fake_quantize_index": (f.fake_quantize_index, {"x": normal(S, 128)}),
        "write_index_k_cache": (
            f.write_index_k_cache,
            {"k": normal(S, 128), "slots": slots, "cache": cache.clone()},
        ),
        "read_index_k_cache": (f.read_index_k_cache, {"cache": cache, "slots": read}),
        "quantize_kv": (f.quantize_kv, {"kv": latents}),
        "write_kv_cache": (f.write_kv_cache, {"kv": latents, "slots": slots, "cache": kv_cache}),
        "write_kv_cache, packed": (
            f.write_kv_cache,
            {"kv": latents, "slots": slots, "cache": bytes_cache},
        ),
        "read_kv_cache": (f.read_kv_cache, {"cache": kv_cache, "slots": read}),
        "read_kv_cache, packed": (f.read_kv_cache, {"cache": bytes_cache, "slots": read}),
    }
    return {name: Call(function, arguments) for name, (function, arguments) in named.items()}
