"""What SGLang's hooks do before requests come, without SGLang: kernels, lines of the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdsa.errors import UnsupportedError
from flashdsa.integrations import sglang, start
from flashdsa.integrations.sglang import indexer
from flashdsa.jit import loader
from tests.support.stubs import forget_starts


@pytest.fixture(autouse=True)
def _first_time(caplog: pytest.LogCaptureFixture) -> None:
    forget_starts()
    caplog.set_level(logging.INFO, logger="sglang")


def backend(packed: bool = False, rope: int = 64, **more: Any) -> Any:
    """SGLang's attention of DeepSeek-V3.2 with 16 heads a rank."""
    return SimpleNamespace(
        num_q_heads=16, dsa_index_topk=24, kv_lora_rank=512, qk_rope_head_dim=rope,
        dsa_kv_cache_store_fp8=packed, **more,
    )  # fmt: skip


def layer(**more: Any) -> Any:
    """A layer's indexer."""
    return SimpleNamespace(n_heads=64, index_topk=24, head_dim=128, **more)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Kernels that are loaded."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(loader, "_loaded", {})  # by other tests of this process
    monkeypatch.setattr(start, "warm_up", lambda name, **sizes: found.append((name, sizes)))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_the_attentions_kernels_are_loaded_once(
    calls: Any, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    for _ in range(2):
        sglang.prepare(None, backend(packed), "model runner")
    assert [name for name, _ in calls] == ["sparse_mla_fwd"] * (1 + packed)
    forms = [sizes.get("kv_dtype") for _, sizes in calls]
    assert forms == ([torch.uint8, None] if packed else [None])
    for _, sizes in calls:
        assert {1, 2**13} <= set(sizes["S"]) and (sizes["H"], sizes["topk"]) == (16, 24)
        assert (sizes["d_qk"], sizes["d_v"]) == (576, 512) and sizes["topk_length"] == (False, True)
    (line,) = caplog.messages
    cache = "of packed rows" if packed else "bf16"
    assert f"sparse_mla_fwd by cpu; kernels: none loaded yet; kv cache {cache}; SGLang's:" in line


def test_packed_rows_without_rope_are_served_or_refused_at_the_start(calls: Any) -> None:
    """SGLang 0.5.23 has rows of 528 bytes for a model without RoPE columns."""
    sglang.prepare(None, backend(True, rope=0))
    (_, packed), (_, bf16) = calls
    assert packed["kv_format"] == "v32_no_rope" and "kv_format" not in bf16
    assert packed["d_qk"] == bf16["d_qk"] == 512
    with pytest.raises(NotImplementedError, match=r"an fp8 cache with 64 or 0 columns .* got 32"):
        sglang.prepare(None, backend(True, rope=32))


def test_ranks_of_decode_context_parallelism_have_all_their_heads(calls: Any) -> None:
    sglang.prepare(None, backend(num_dcp_q_heads=32))
    assert [sizes["H"] for _, sizes in calls] == [32]


def test_the_indexers_kernels_are_loaded_once(calls: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        indexer.prepare_index(None, layer(), 7168, index_n_heads=64)
    assert [name for name, _ in calls] == ["dsa_topk_indexer", "dsa_topk_prefill"]
    assert calls[0][1]["positions"] == (False, True)
    assert all((sizes["H"], sizes["topk"]) == (64, 24) for _, sizes in calls)
    (line,) = caplog.messages
    assert "dsa_topk_indexer by cpu, dsa_topk_prefill by cpu; kernels:" in line


def test_what_nothing_serves_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: Any, **sizes: Any) -> None:
        raise UnsupportedError("compiling kernels needs CuTe DSL")

    monkeypatch.setattr(start, "warm_up", missing)
    with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
        sglang.prepare(None, backend())
    with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
        indexer.prepare_index(None, layer())
    monkeypatch.setattr(start, "load_own", missing)
    with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
        indexer.prepare_index(None, layer())
    other = layer()
    other.head_dim = 64
    indexer.prepare_index(None, SimpleNamespace(**vars(other), num_init_tokens=4))  # SGLang's
    with pytest.raises(NotImplementedError, match="flashdsa_indexer: serves 128 columns; got 64"):
        indexer.prepare_index(None, other)
