"""Exact top-k kernels of other libraries: each of scores (rows, width) and lengths.

cuDNN Frontend's are those that `workbench/peers/build_cudnn.py` has compiled, else its own wrapper;
FlashInfer's those of `workbench/peers/build_flashinfer_topk.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

TopK = Callable[[Tensor], Tensor]
"""Scores -> positions (rows, k) int, of rows of these lengths."""
FLASHINFER = ("clusters", "radix", "filtered", "CUB")
NAMES = ("cuDNN Frontend", *(f"FlashInfer {kind}" for kind in FLASHINFER), "torch.topk")


def load_top_k(name: str, lengths: Tensor, width: int, topk: int) -> TopK:
    """One of NAMES for rows of these lengths; what depends on lengths alone is made here.

    Raises:
        ImportError: and whatever else an extension of another torch does.
    """
    if name == "cuDNN Frontend":
        peer = cudnn_function("indexer_top_k_wrapper")
        return lambda scores: peer(scores, lengths, topk, return_val=False)["indices"]
    if name == "torch.topk":
        return _torch_top_k(lengths, width, min(topk, width))
    chosen = import_module("flashinfer_topk").TOP_KS[name.removeprefix("FlashInfer ")]
    return partial(_with_lengths, chosen, lengths, topk)


def _with_lengths(top_k: Callable[..., Tensor], lengths: Tensor, topk: int, x: Tensor) -> Tensor:
    return top_k(x, lengths, topk)


def cudnn_function(name: str) -> Callable[..., Any]:
    """A function of cuDNN Frontend: compiled ahead, else its own wrapper, which needs CuTe DSL.

    Raises:
        ImportError: neither is there, and why.
    """
    reasons = []
    for module in ("cudnn_kernels", "cudnn.deepseek_sparse_attention"):
        try:
            found: Callable[..., Any] = getattr(import_module(module), name)
            return found
        except Exception as error:
            reasons.append(f"{module}: {error}")
    raise ImportError("; ".join(reasons))


def _torch_top_k(lengths: Tensor, width: int, k: int) -> TopK:
    if bool((lengths == width).all()):
        return lambda scores: scores.topk(k).indices
    beyond = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return lambda scores: scores.masked_fill_(beyond, -torch.inf).topk(k).indices
