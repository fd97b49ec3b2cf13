"""False peers: functions of other libraries by ours on the CPU, with what the benches rely on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.adapters import flash_mla
from flashdsa.bench import cases, timer
from workbench.peers.cudnn_module import filled_up


def ranked(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, scale: Any, width: Any
) -> Tensor:
    """Scores of each query's range, from its first key on where a width is given; else anything."""
    dots = torch.einsum("shd,td->sht", q.float(), k.float()).relu()
    scores = torch.einsum("sht,sh->st", dots, weights) * scale
    begins = starts if width else torch.zeros_like(starts)
    keys = begins[:, None] + torch.arange(width or len(k))
    seen = (keys >= starts[:, None]) & (keys < ends[:, None])
    return scores.gather(1, keys.clamp(max=len(k) - 1)).where(seen, 1e9)


class FalseDeepGemm:
    """DeepGEMM's functions on the CPU, with what the benches rely on."""

    def get_num_sms(self) -> int:
        return 1

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page: int, sms: int) -> str:
        assert lengths.dim() == 2 and page == 64
        return "plan"

    def fp8_paged_mqa_logits(self, *arguments: Any, clean_logits: bool) -> Tensor:
        q, cache, weights, lengths, table, plan, width = arguments
        assert plan == "plan" and not clean_logits and width % 256 == 0
        assert q.shape[:2] == lengths.shape and len(table) == len(lengths)
        table = table.repeat_interleave(lengths.shape[1], dim=0)
        rows = q.flatten(0, 1), cache, weights, lengths.flatten(), table
        scores = flashdsa.indexer_logits(*rows, width)
        return scores.masked_fill(scores == -torch.inf, 1e9)  # what is beyond a row is anything

    def fp8_mqa_logits(
        self, q: Tensor, keys: Any, weights: Tensor, *range_: Any, **more: Any
    ) -> Tensor:
        (k, scale), (starts, ends) = keys, range_
        assert q.shape[1] >= 32 and len(k) % 256 == 0 and not more.pop("clean_logits")
        return ranked(q, k, weights, starts, ends, scale, more.get("max_seqlen_k"))


class FalseFlashMla:
    """FlashMLA's two functions, by ours; heads are padded to 64 as its kernels want."""

    def flash_mla_sparse_fwd(
        self, q: Tensor, kv: Tensor, indices: Tensor, scale: float, **more: Any
    ) -> Any:
        assert q.shape[1] % 64 == 0 and indices.shape[2] % 128 == 0 and more.pop("use_legacy")
        return flashdsa.sparse_mla_fwd(q, kv[:, 0], indices[:, 0], sm_scale=scale, **more)

    def get_mla_metadata(self) -> tuple[str, None]:
        return "plan", None

    def flash_mla_with_kvcache(
        self, q: Tensor, cache: Tensor, *rest: Any, use_legacy: bool, **more: Any
    ) -> Any:
        lists = [rest[-1], more.get("extra_indices_in_kvcache", rest[-1])]
        assert q.shape[2] % 64 == 0 and use_legacy and rest[3] == "plan"
        assert not any(ids.shape[2] % 64 for ids in lists)
        assert cache.shape[-1] == 584 or "topk_length" not in more or more["topk_length"] is None
        return flash_mla.flash_mla_with_kvcache(q, cache, *rest, **more)


def cudnn_top_k(scores: Tensor, lengths: Tensor, k: int, return_val: bool) -> dict[str, Tensor]:
    assert not return_val
    return {"indices": flashdsa.topk_indices(scores.contiguous(), lengths, k)}


def cudnn_backward(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, sink: Tensor, ids: Tensor,
    topk_length: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    options: dict[str, Any] = {"topk_length": topk_length, "attn_sink": sink}
    dq, dkv, _ = flashdsa.mla_bwd(q, kv, dout, lse, out, ids, **options)
    return {"dq": dq, "dkv": dkv}


class FalseCudnn:
    """The module that `workbench/peers/build_cudnn.py` makes."""

    indexer_top_k_wrapper = staticmethod(cudnn_top_k)
    sparse_attention_backward_wrapper = staticmethod(cudnn_backward)
    filled_up = staticmethod(filled_up)

    def logits_behind(self, q: Tensor, k: Tensor, weights: Tensor, keys: int) -> Tensor:
        assert len(k) % 8 == 0
        ends = torch.arange(keys - len(q), keys) + 1
        return ranked(q, k, weights, torch.zeros_like(ends), ends, 1.0, None)

    def packed_logits(self, q: Tensor, k: Tensor, weights: Tensor, ends: Any, width: int) -> Tensor:
        assert width % 8 == 0 and ends[0] == 0 and ends[-1] == len(q)
        starts, behind = flashdsa.causal_ranges(ends)
        return ranked(q, k, weights, starts, behind, 1.0, width)

    def score_recompute(
        self, name: str, q: Tensor, k: Tensor, by_head: Tensor, slots: Tensor, lengths: Tensor
    ) -> Tensor:
        assert slots.shape[1] % 128 == 0 and by_head.shape == (q.shape[1], -(-len(q) // 8) * 8)
        rows = by_head.T[: len(q)].contiguous(), slots
        if name == "target":
            found = flashdsa.attention_target(q, k, *rows, topk_length=lengths)
            return found / found.sum(1, keepdim=True)
        return flashdsa.indexer_scores(q, k, *rows, topk_length=lengths).softmax(1)

    def indexer_backward(self, q: Tensor, k: Tensor, w: Tensor, slots: Tensor, grad: Tensor) -> Any:
        assert q.shape[1] == 64 and slots.shape == grad.shape
        return flashdsa.indexer_bwd(q, k, w, slots, grad)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is there, and nothing takes long."""
    monkeypatch.setattr(timer, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setitem(cases.READ_BYTES, "cpu", 1 << 20)
    top_ks = dict.fromkeys(("clusters", "radix", "filtered", "CUB"), flashdsa.topk_indices)
    for name, module in {
        "deep_gemm": FalseDeepGemm(),
        "flash_mla": FalseFlashMla(),
        "cudnn_kernels": FalseCudnn(),
        "flashinfer_topk": SimpleNamespace(TOP_KS=top_ks, forget=lambda: None),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
