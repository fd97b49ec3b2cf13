"""The peers: DeepGEMM's paged logits, then a top-k of cuDNN Frontend, FlashInfer or torch. All are
optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flashdsa.bench.gpu.inputs import BenchInputs
from flashdsa.problem import INDEX_HEAD_DIM, NUM_INDEX_HEADS, PAGE_SIZE

LOGITS = "DeepGEMM logits"
CUDNN_PAIR = "DeepGEMM + cuDNN Frontend"
FLASHINFER = ("clusters", "radix", "filtered")
"""Its exact top-k kernels."""
FLASHINFER_PAIRS = tuple(f"DeepGEMM + FlashInfer {kind}" for kind in FLASHINFER)
TORCH_PAIR = "DeepGEMM + torch.topk"
PAIRS = (CUDNN_PAIR, *FLASHINFER_PAIRS, TORCH_PAIR)
CUDNN_TOP_K = "cuDNN Frontend top-k"
FLASHINFER_TOP_KS = tuple(f"FlashInfer {kind} top-k" for kind in FLASHINFER)
TORCH_TOP_K = "torch.topk"
TOP_KS = (CUDNN_TOP_K, *FLASHINFER_TOP_KS, TORCH_TOP_K)
"""Alone, of scores that lie in device memory: logits and one of these are the pair timed apart."""
CONTENDERS = (LOGITS, *TOP_KS, *PAIRS)
_LOGITS_ALIGNMENT = 256
"""DeepGEMM pads its rows to this; other widths would be copied by the top-k that follows."""


@dataclass(frozen=True)
class Peers:
    """What could be imported; `missing` says why the rest could not."""

    deep_gemm: Any = None
    cudnn_top_k: Callable[..., Any] | None = None
    flashinfer_top_ks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def calls(self, inputs: BenchInputs) -> dict[str, Callable[[], Tensor]]:
        """Each contender on these operands; it returns scores or positions (B, topk)."""
        if self.deep_gemm is None:
            return {}
        logits = self._logits_call(inputs)
        lengths, topk = inputs.seq_lens, inputs.ids.shape[1]
        scores = logits()
        calls: dict[str, Callable[[], Tensor]] = {LOGITS: logits}
        top_k = self.cudnn_top_k
        if top_k is not None:
            calls[CUDNN_TOP_K] = lambda: top_k(scores, lengths, topk, return_val=False)["indices"]
            calls[CUDNN_PAIR] = lambda: top_k(logits(), lengths, topk, return_val=False)["indices"]
        names = zip(FLASHINFER, FLASHINFER_TOP_KS, FLASHINFER_PAIRS, strict=True)
        for kind, alone, pair in names:
            chosen = self.flashinfer_top_ks.get(kind)
            if chosen is not None:
                calls[alone] = partial(chosen, scores, lengths, topk)
                calls[pair] = partial(_of_logits, chosen, logits, lengths, topk)
        width = scores.shape[1]
        k = min(topk, width)
        if set(inputs.case.lengths) == {width}:
            calls[TORCH_TOP_K] = lambda: scores.topk(k).indices
            calls[TORCH_PAIR] = lambda: logits().topk(k).indices
        else:
            beyond = torch.arange(width, device=lengths.device) >= lengths[:, None]
            masked = scores.masked_fill(beyond, -torch.inf)
            calls[TORCH_TOP_K] = lambda: masked.topk(k).indices
            calls[TORCH_PAIR] = lambda: logits().masked_fill_(beyond, -torch.inf).topk(k).indices
        return calls

    def _logits_call(self, inputs: BenchInputs) -> Callable[[], Tensor]:
        gemm = self.deep_gemm
        requests, next_n = len(inputs.block_table), inputs.case.next_n
        q = inputs.q.view(requests, next_n, NUM_INDEX_HEADS, INDEX_HEAD_DIM)
        lengths = inputs.seq_lens.view(requests, next_n)
        longest = max(inputs.case.lengths)
        width = -(-longest // _LOGITS_ALIGNMENT) * _LOGITS_ALIGNMENT

        def logits() -> Tensor:
            # Counted: ours looks at the lengths in each call, too.
            plan = gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, gemm.get_num_sms())
            scores: Tensor = gemm.fp8_paged_mqa_logits(
                q,
                inputs.cache,
                inputs.weights,
                lengths,
                inputs.block_table,
                plan,
                width,
                clean_logits=False,
            )
            return scores

        return logits


def _of_logits(
    top_k: Callable[..., Tensor], logits: Callable[[], Tensor], lengths: Tensor, topk: int
) -> Tensor:
    return top_k(logits(), lengths, topk)


def load_peers() -> Peers:
    """Import what is installed. Imports of peers fail in many ways; each becomes a reason.

    cuDNN Frontend's top-k is the one that workbench/peers/build_cudnn_topk.py has compiled.
    """
    missing: dict[str, str] = {}
    deep_gemm, top_k, flashinfer = None, None, {}
    try:
        deep_gemm = import_module("deep_gemm")
    except Exception as error:
        missing |= dict.fromkeys(CONTENDERS, f"deep_gemm: {in_a_line(error)}")
    reasons = []
    for module in ("cudnn_topk", "cudnn.deepseek_sparse_attention"):
        try:
            top_k = import_module(module).indexer_top_k_wrapper
            break
        except Exception as error:
            reasons.append(f"{module}: {in_a_line(error)}")
    else:
        for name in (CUDNN_TOP_K, CUDNN_PAIR):
            missing.setdefault(name, "; ".join(reasons))
    try:
        flashinfer = import_module("flashinfer_topk").TOP_KS
    except Exception as error:
        for name in (*FLASHINFER_TOP_KS, *FLASHINFER_PAIRS):
            missing.setdefault(name, f"flashinfer_topk: {in_a_line(error)}")
    return Peers(deep_gemm, top_k, flashinfer, missing)


def in_a_line(error: Exception) -> str:
    """Type and message of an error, as a reason for a row."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
