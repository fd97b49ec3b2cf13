"""DeepSeek-V4 and V4.1 in vLLM: their layers call two functions of FlashMLA by name.

    FLASHDSA_VLLM_V4=1 vllm serve ...

vLLM chooses these models' attention by itself, so no name of a backend stands for ours; the layers
of its FlashMLA backend, the default on Hopper, call the functions of this module instead. Index and
compression stay vLLM's.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.integrations.vllm import KNOWN, LOGGER, installed_version, say_untried
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.settings import VLLM_V4

MODULES = tuple(f"vllm.models.deepseek_{model}.nvidia.flashmla" for model in ("v4", "v41"))
FORMATS = {528: "v41_interleaved"}
"""Formats of the window's packed rows that their bytes do not tell. vLLM has rows of 528 bytes, and
of 288 beside them, on compute capability 10.x, where FlashMLA's are interleaved."""


def install() -> None:
    """Replace the functions that the layers call.

    Raises:
        UnsupportedError: this vLLM's functions have not these parameters, or kernels are missing.
    """
    from vllm.platforms import current_platform

    say_untried()
    here = current_platform.get_device_capability()  # by NVML, which begins no CUDA context
    if here is not None:
        start.require_kernels_of((here.major, here.minor))
    for module in map(import_module, MODULES):
        for own in (flash_mla_with_kvcache, flash_mla_sparse_fwd):
            theirs = getattr(module, own.__name__)
            wanted = [name for name in inspect.signature(own).parameters if name != "others"]
            known = inspect.signature(theirs).parameters
            missing = [name for name in wanted if name not in known]
            if theirs is not own and missing:
                raise UnsupportedError(
                    f"{VLLM_V4}: {module.__name__}.{own.__name__} of vLLM {installed_version()} "
                    f"has no parameter {', '.join(missing)}; {KNOWN} has"
                )
            setattr(module, own.__name__, own)
    served = (("attention of DeepSeek-V4 and V4.1", "flashdsa"),)
    start.say(LOGGER, start.described(served, "vLLM's: index, compression, caches"))


def flash_mla_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    out: Tensor,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Decode from the window's cache and, of a layer with one, the compressed cache.

    Args:
        q: (T, 1, H, 512) bf16. k_cache, extra_k_cache: (pages, page_size, 1, bytes), packed rows;
            pages may lie apart.
        indices, extra_indices_in_kvcache: (T, 1, n) int32, rows of all pages.
        topk_length, extra_topk_length: (T,) int32, slots in use.
        out: (T, 1, H, 512) bf16, written.
        others: not used: of the dense path, or FlashMLA's schedule.

    Returns:
        `out`, and None for lse, which the layers do not read.
    """
    extra, extra_kv = extra_indices_in_kvcache, extra_k_cache
    sparse_mla_fwd(
        q.squeeze(1),
        k_cache.view(torch.uint8),
        indices.squeeze(1),
        sm_scale=softmax_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        extra_kv=None if extra_kv is None else extra_kv.view(torch.uint8),
        extra_indices=None if extra is None else extra.squeeze(1),
        extra_topk_length=extra_topk_length,
        out=out.squeeze(1),
        kv_format=FORMATS.get(k_cache.shape[-1]),
    )
    return out, None


def flash_mla_sparse_fwd(
    *,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    out: Tensor,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None, None]:
    """Prompts, over bf16 rows that vLLM has unpacked.

    Args:
        q: (T, H, 512). kv: (N, 1, 512). indices: (T, 1, n) int32. topk_length: (T,).
        out: (T, H, 512), written; heads may lie apart.

    Returns:
        `out`, and None for the largest logits and lse, which the layers do not read.
    """
    found = out if out.is_contiguous() else out.new_empty(out.shape)
    sparse_mla_fwd(
        q, kv, indices, sm_scale=sm_scale, topk_length=topk_length, attn_sink=attn_sink, out=found
    )
    if found is not out:
        out.copy_(found)
    return out, None, None
