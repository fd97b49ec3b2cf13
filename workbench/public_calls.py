"""A right call of every public operation, of shapes that the CPU and a Hopper GPU serve.

Those that tests or timings want in several forms are made here; the others are recorded from a
check of `flashdsa check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import flashdsa
from flashdsa.ops import PUBLIC
from flashdsa.verify.check_list import OPERATIONS, Check, checks_of


class Sizes(NamedTuple):
    """Queries, keys, heads, index heads, keys of a query, positions of an indexer, pages."""

    s: int
    s_kv: int
    h: int
    h_index: int
    topk: int
    indexer_topk: int
    pages: int


SMALL = Sizes(3, 128, 64, 16, 64, 512, 4)
PREFILL = Sizes(300, 2048, 64, 64, 512, 512, 8)
"""Sizes whose forward is no decode."""
PRETENDED = Sizes(8, 64, 64, 64, 64, 512, 4)
"""The same on a pretended GPU of four SMs: torch's own operations take no time for data."""


class Call(NamedTuple):
    """A public function, its arguments by name, and those that it writes."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    written: tuple[str, ...] = ()

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    @property
    def tensors(self) -> list[str]:
        """Names of the arguments that are tensors."""
        return [name for name, value in self.arguments.items() if isinstance(value, Tensor)]

    def results(self) -> list[Tensor]:
        """The tensors that a call of copies returns, or writes if it returns none."""
        copies = {n: x.clone() if n in self.tensors else x for n, x in self.arguments.items()}
        given = self.function(**copies)
        if isinstance(given, Tensor):
            return [given]
        return list(given or (copies[name] for name in self.written))


_WRITTEN = {
    "sparse_mla_fwd, buffers": ("out", "lse"),
    "bind, sparse_mla_fwd_out": ("out", "lse"),
    "bind, dsa_topk_indexer": ("topk_indices",),
    "dsa_topk_indexer": ("topk_indices",),
    "dsa_topk_indexer, sorted": ("topk_indices",),
    "dsa_topk_prefill": ("topk_indices",),
    "write_index_k_cache": ("cache",),
    "write_kv_cache": ("cache",),
    "write_kv_cache, packed": ("cache",),
    "compress_kv, state": ("state",),
    "compress_kv, cache": ("out",),
    "attention_target": ("accumulate_into",),
    "mla_bwd, added": ("dkv",),
    "mla_bwd, two sources": ("extra_dkv",),
}


Arguments = dict[str, Any]
"""By name; of a bound operation its operands, in order."""


def bind(operation: str, operands: Arguments) -> Callable[..., Any]:
    """A function of all these operands by name, which binds the operation and calls it once."""

    def call(**given: Tensor | None) -> Any:
        values = tuple(given[name] for name in operands)
        return flashdsa.bind(operation, values)(values)

    return call


class _Draw:
    """Random operands of one device and seed."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        drawn = torch.randint(0, below, shape, generator=self.generator)
        return drawn.to(self.device, torch.int32)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def public_calls(device: str, sizes: Sizes = SMALL) -> dict[str, Call]:
    """By what they are called here, which begins with the function's name; tensors are new."""
    return {
        name: Call(_function(name, arguments), arguments, _WRITTEN.get(name, ()))
        for name, arguments in deepcopy(_drawn(device, sizes)).items()
    }


@cache
def _drawn(device: str, sizes: Sizes) -> dict[str, Arguments]:
    """The arguments of every call."""
    draw = _Draw(device, sizes)
    attention = {
        "q": draw.normal(sizes.s, sizes.h, 576, dtype=torch.bfloat16),
        "kv": draw.normal(sizes.s_kv, 576, dtype=torch.bfloat16),
        "indices": draw.integers(sizes.s_kv, sizes.s, sizes.topk),
        "topk_length": draw.integers(sizes.topk, sizes.s) + 1,
        "attn_sink": draw.normal(sizes.h),
    }
    out, lse = flashdsa.sparse_mla_fwd(**attention)
    named = {
        **_attention_calls(attention, out, lse),
        **_training_calls(draw, attention, lse),
        **_indexer_calls(draw),
        **_cache_calls(draw),
        **_entries(draw),
        **_two_sources(draw, attention),
    }
    there = {name.partition(", ")[0] for name in named}
    others = [name for name in OPERATIONS if name in PUBLIC and name not in there]
    return named | {name: _recorded(name, _check_of(name, device)) for name in others}


@cache
def _check_of(operation: str, device: str) -> Check:
    """The check of an operation with most tensors, none of them empty; of these the smallest."""
    of_operation = [x for x in checks_of(0, "auto", device) if x.operation == operation]
    return max(of_operation, key=lambda check: _num_tensors(_recorded(operation, check)))


def _recorded(operation: str, check: Check) -> Arguments:
    """Arguments of the operation in the first call of it that the check makes."""
    found: list[Arguments] = []
    function = getattr(flashdsa, operation)

    def record(*args: Any, **options: Any) -> Any:
        given = signature(function).bind(*args, **options)
        given.apply_defaults()
        found.append({k: x for k, x in given.arguments.items() if x is not None and k != "backend"})
        return function(*args, **options)

    with patch.object(flashdsa, operation, record):
        check.call()
    first = found[0].items()
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in first}


def _num_tensors(arguments: Arguments) -> int:
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    return len(tensors) if all(x.numel() for x in tensors) else 0


def _function(name: str, arguments: Arguments) -> Callable[..., Any]:
    """Return the public function that a name begins with; of "bind, x" operation x, bound."""
    public, _, rest = name.partition(", ")
    return bind(rest, arguments) if public == "bind" else getattr(flashdsa, public)


def _attention_calls(attention: Arguments, out: Tensor, lse: Tensor) -> dict[str, Arguments]:
    q, kv, indices = (attention[name] for name in ("q", "kv", "indices"))
    rows = {"q": q, "kv": kv, "indices": indices}
    backward = {**attention, "dO": out.clone(), "lse": lse, "O": out}
    buffers = {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}
    optional = {name: attention[name] for name in ("topk_length", "attn_sink")}
    return {
        "sparse_mla_fwd": attention,
        "sparse_mla_fwd, rows": rows,
        "sparse_mla_fwd, packed": {**rows, "kv": flashdsa.quantize_kv(kv)},
        "sparse_mla_fwd, 16 heads": {**rows, "q": q[:, :16]},
        "sparse_mla_fwd, decode": {**rows, "q": q[:3], "indices": indices[:3]},
        "sparse_mla_fwd, int64": {**rows, "indices": indices.long()},
        "sparse_mla_fwd, buffers": {**rows, **buffers},
        "bind, sparse_mla_fwd_out": {**rows, **buffers, "max_logits": None, **optional},
        "sparse_mla": attention,
        "mla_bwd": backward,
        "mla_bwd, deterministic": {**backward, "deterministic": True},
        "mla_bwd, added": {**backward, "dkv": torch.zeros_like(kv, dtype=torch.float32)},
        "lse_to_base2": {"lse": lse},
        "lse_from_base2": {"lse": lse},
        "lse_for_merge": {"lse": lse},
        "merge_attention": {"outs": torch.stack([out, out]), "lses": torch.stack([lse, lse])},
    }


def _two_sources(draw: _Draw, attention: Arguments) -> dict[str, Arguments]:
    """Blocks of rows, and ids of a second source."""
    sizes = draw.sizes
    arguments = {
        **attention,
        "extra_kv": draw.normal(sizes.s_kv, 576, dtype=torch.bfloat16),
        "extra_indices": draw.integers(sizes.s_kv, sizes.s, sizes.topk),
        "extra_topk_length": draw.integers(sizes.topk, sizes.s) + 1,
        "index_block": 4,
    }
    out, lse = flashdsa.sparse_mla_fwd(**arguments)
    return {
        "sparse_mla_fwd, two sources": arguments,
        "sparse_mla, two sources": arguments,
        "mla_bwd, two sources": {
            **arguments,
            "extra_dkv": draw.zeros(sizes.s_kv, 576, dtype=torch.float32),
            "dO": out.clone(),
            "lse": lse,
            "O": out,
        },
    }


def _entries(draw: _Draw) -> dict[str, Arguments]:
    """Windows of 4 that overlap, of three sequences; tokens of decode."""
    tokens, d, sequences = 64, 128, 3

    def bf16(*shape: int) -> Tensor:
        return draw.normal(*shape, dtype=torch.bfloat16)

    angles = draw.normal(tokens + 8, 16)
    common = {
        "kv": bf16(tokens, 2 * d),
        "gate": bf16(tokens, 2 * d),
        "ape": draw.normal(4, 2 * d),
        "ratio": 4,
        "overlap": True,
        "eps": 1e-6,
        "norm_weight": draw.normal(d),
        "rotation": (angles.cos(), angles.sin()),
    }
    offsets = torch.tensor([0, 30, 31, tokens], dtype=torch.int32, device=draw.device)
    decode = {
        "state": bf16(sequences, 8, 2, 2 * d),
        "seen": torch.tensor([3, 0, 8], dtype=torch.int32, device=draw.device),
    }
    return {
        "compress_kv": {**common, "cu_seqlens": offsets},
        "compress_kv, state": {**common, "cu_seqlens": offsets, **decode},
        "compress_kv, cache": {
            **common,
            "cu_seqlens": offsets,
            "out": draw.zeros(2, 64, 1, 132, dtype=torch.uint8),
            "slots": torch.arange(tokens, device=draw.device),
        },
    }


def _training_calls(draw: _Draw, attention: Arguments, lse: Tensor) -> dict[str, Arguments]:
    s, s_kv, _, h_index, topk, *_ = draw.sizes
    q, kv, indices = (attention[name] for name in ("q", "kv", "indices"))
    index = {
        "q_index": draw.normal(s, h_index, 128, dtype=torch.bfloat16),
        "k_index": draw.normal(s_kv, 128, dtype=torch.bfloat16),
        "weights": draw.normal(s, h_index),
    }
    trained = {**index, "indices": indices}
    backward = {**trained, "grad_scores": draw.normal(s, topk)}
    scores = {"scores": draw.normal(s, topk), "target": draw.normal(s, topk).abs()}
    ends = draw.integers(s_kv, s)
    return {
        "attention_target": {**attention, "lse": lse, "accumulate_into": draw.normal(s, topk)},
        "indexer_scores": trained,
        "indexer_bwd": backward,
        "indexer_bwd, deterministic": {**backward, "deterministic": True},
        "indexer_kl": scores,
        "indexer_kl_bwd": {**scores, "grad_kl": draw.normal(s)},
        "indexer_kl_loss": {**trained, "q": q, "kv": kv, "lse": lse},
        "indexer_kl_loss_dense": {**index, "q": q, "k": kv, "lse": lse, "key_end": ends},
    }


def _indexer_calls(draw: _Draw) -> dict[str, Arguments]:
    s, s_kv, h, _, _, topk, pages = draw.sizes
    quantized: Arguments = {"q": draw.normal(s, h, 128), "weights": draw.normal(s, h)}
    q_fp8, folded = flashdsa.quantize_index_q(**quantized)
    keys = draw.normal(s_kv, 128)
    k_fp8, k_scale = flashdsa.quantize_index_k(keys)
    paged = {
        "q_index_fp8": q_fp8,
        "k_index_cache_fp8": draw.zeros(pages, 64, 1, 132, dtype=torch.uint8),
        "weights": folded,
        "seq_lens": draw.integers(64 * pages, s),
        "block_table": draw.integers(pages, s, pages),
    }
    prefill = {
        "q_index": q_fp8,
        "k_index": k_fp8,
        "weights": folded,
        "starts": draw.zeros(s, dtype=torch.int32),
        "ends": draw.integers(s_kv, s),
        "k_scale": k_scale,
    }
    ids = {"topk_indices": draw.zeros(s, topk, dtype=torch.int32)}
    offsets = torch.tensor([0, 1, s], dtype=torch.int32, device=draw.device)
    ranges = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone(), "num_queries": s}
    scores = {"scores": draw.normal(s, 700), "lengths": draw.integers(700, s)}
    return {
        "dsa_topk_indexer": {**paged, **ids},
        "dsa_topk_indexer, sorted": {**paged, **ids, "sorted": True},
        "bind, dsa_topk_indexer": {**paged, **ids},
        "indexer_logits": {**paged, "max_len": 64 * pages},
        "topk_indices": {**scores, "topk": topk},
        "dsa_topk_prefill": {**prefill, **ids},
        "prefill_logits": prefill,
        "causal_ranges": ranges,
        "causal_ranges, entries": {**ranges, "ratio": 4},
        "expand_blocks": {
            "indices": draw.integers(s_kv, s, topk),
            "block": 4,
            "positions": draw.integers(s_kv, s),
        },
        "quantize_index_k": {"k": keys},
        "quantize_index_q": quantized,
        "fake_quantize_index": {"x": draw.normal(s, 128)},
    }


def _cache_calls(draw: _Draw) -> dict[str, Arguments]:
    s, pages = draw.sizes.s, draw.sizes.pages
    read = torch.randperm(64 * pages, generator=draw.generator)[:s].to(draw.device, torch.int32)
    slots = read.clone()
    slots[1] = -1
    index_k_cache = draw.zeros(pages, 64, 1, 132, dtype=torch.uint8)
    cache = draw.zeros(pages, 64, 576, dtype=torch.bfloat16)
    packed = draw.zeros(pages, 64, 656, dtype=torch.uint8)
    latents = draw.normal(s, 576)
    return {
        "write_index_k_cache": {"k": draw.normal(s, 128), "slots": slots, "cache": index_k_cache},
        "read_index_k_cache": {"cache": index_k_cache, "slots": read},
        "quantize_kv": {"kv": latents},
        "write_kv_cache": {"kv": latents, "slots": slots, "cache": cache},
        "write_kv_cache, packed": {"kv": latents, "slots": slots, "cache": packed},
        "read_kv_cache": {"cache": cache, "slots": read},
        "read_kv_cache, packed": {"cache": packed, "slots": read},
    }
