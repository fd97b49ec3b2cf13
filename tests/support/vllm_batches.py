"""vLLM's names of backends, keys of its index cache, and what its indexer is to choose."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.support.stubs import stub


def stub_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process's enum of backends in vLLM's place: names are added once."""

    class AttentionBackendEnum(Enum):
        THEIRS = "theirs"

    def register_backend(name: str, path: str) -> None:
        assert name not in known._member_map_, f"Backend {name} already exists"
        member = object.__new__(known)
        member._name_, member._value_ = name, path
        known._member_map_[name] = member

    known: Any = AttentionBackendEnum
    module = "vllm.v1.attention.backends.registry"
    stub(monkeypatch, module, AttentionBackendEnum=known, register_backend=register_backend)
    return known


def gather_index_keys(
    cache: Tensor, keys: Tensor, scales: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """vLLM's `cp_gather_indexer_k_quant_cache`: each request's keys, one after another."""
    for table, begin, end in zip(block_table, cu_seq_lens, cu_seq_lens[1:], strict=False):
        position = torch.arange(int(end - begin))
        slots = table[position // 64].long() * 64 + position % 64
        fp8, scale = flashdsa.read_index_k_cache(cache.unsqueeze(2), slots)
        keys[begin:end], scales[begin:end] = fp8, scale[:, None].view(torch.uint8)


def require_best(
    ids: Tensor, seen: list[int], tables: Tensor, cache: Tensor, q: Tensor, weights: Tensor
) -> None:
    """Each row has distinct positions below its length, whose scores are the largest ones."""
    for row, length, table, query, weight in zip(ids, seen, tables, q, weights, strict=True):
        chosen = row[row >= 0].long()
        count = min(len(row), length)
        assert len(chosen.unique()) == len(chosen) == count, (row, length)
        assert (row[count:] == -1).all() and (chosen < length).all()
        position = torch.arange(length)
        slots = table[position // 64].long() * 64 + position % 64
        keys, scale = flashdsa.read_index_k_cache(cache.unsqueeze(2), slots)
        products = (query.double() @ keys.double().T).relu()
        scores = scale.double() * (weight.double()[:, None] * products).sum(0)
        best = scores.sort(descending=True).values[:count]
        torch.testing.assert_close(
            scores[chosen].sort(descending=True).values, best, rtol=1e-4, atol=1e-4
        )
