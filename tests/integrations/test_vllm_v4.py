"""DeepSeek-V4's two functions in vLLM: put in their place, and on tensors; without vLLM."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start, vllm
from flashdsa.integrations.vllm import v4
from tests.support.formulas import assert_close, attention
from tests.support.interleaved_caches import interleaved_caches
from tests.support.stubs import forget_starts, stub, taking
from tests.support.vllm_batches import stub_registry

FLASH_MLA = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits"
FLASH_MLA += " softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache topk_length"
FLASH_MLA += " extra_indices_in_kvcache extra_topk_length out enable_batch_invariant"


PROMPTS = "q kv indices sm_scale d_v attn_sink topk_length out"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with kernels, of which nothing was said."""
    forget_starts()
    hopper = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    stub(monkeypatch, "vllm", __version__="0.33.0")
    stub(monkeypatch, "vllm.platforms", current_platform=hopper)
    monkeypatch.setattr(start, "require_kernels", lambda backend: None)


@pytest.mark.parametrize("switch", ["1", "0", None])
def test_the_switch_replaces_both_models_functions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str | None
) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    stub_registry(monkeypatch)
    if switch is not None:
        monkeypatch.setenv("FLASHDSA_VLLM_V4", switch)
    members = {
        "flash_mla_with_kvcache": taking(FLASH_MLA), "flash_mla_sparse_fwd": taking(PROMPTS),
    }  # fmt: skip
    for name in v4.MODULES:
        stub(monkeypatch, name, **members)
    for _ in range(2):
        vllm.register()
    for name in v4.MODULES:
        module = sys.modules[name]
        assert (module.flash_mla_sparse_fwd is v4.flash_mla_sparse_fwd) == (switch == "1")
        assert (module.flash_mla_with_kvcache is v4.flash_mla_with_kvcache) == (switch == "1")
    said = [one for one in caplog.messages if "attention of DeepSeek-V4 and V4.1" in one]
    assert len(said) == (switch == "1")


def test_missing_kernels_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str) -> None:
        raise UnsupportedError(f"{backend}: compiling kernels needs CuTe DSL")

    monkeypatch.setattr(start, "require_kernels", missing)
    with pytest.raises(NotImplementedError, match="sm90: compiling kernels needs CuTe DSL"):
        v4.install()


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in v4.MODULES:
        stub(monkeypatch, name, flash_mla_with_kvcache=taking(FLASH_MLA.replace(" out", "")))
    with pytest.raises(
        NotImplementedError, match=r"V4: .*v4.nvidia.* of vLLM 0.33.0 has no .* out; 0.33"
    ):
        v4.install()


def packed(pages: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A cache as vLLM has it, pages apart, and its rows."""
    rows = torch.randn(pages * size, 512, generator=generator).bfloat16()
    cache = torch.zeros(pages, 2, size, 584, dtype=torch.uint8)[:, 0]
    flashdsa.write_kv_cache(rows, torch.arange(len(rows)), cache, kv_format="v4")
    held = flashdsa.read_kv_cache(cache, torch.arange(len(rows)), kv_format="v4")
    return cache.unsqueeze(2), held


@pytest.mark.parametrize("compressed", [False, True])
def test_a_decode_reads_the_window_and_the_compressed_cache(compressed: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    window, rows = packed(4, 64, generator)
    extra, extra_rows = packed(3, 16, generator)
    q = torch.randn(3, 1, 4, 512, generator=generator).bfloat16() / 4
    ids = torch.randint(256, (3, 1, 8), generator=generator).int()
    more = torch.randint(48, (3, 1, 6), generator=generator).int()
    lengths, extra_lengths = torch.tensor([8, 3, 0]).int(), torch.tensor([6, 0, 0]).int()
    sink = torch.randn(4, generator=generator)
    second: dict[str, Any] = {
        "extra_k_cache": extra, "extra_indices_in_kvcache": more,
        "extra_topk_length": extra_lengths,
    } if compressed else {}  # fmt: skip
    out = torch.full((3, 1, 4, 512), torch.nan, dtype=torch.bfloat16)
    got, lse = v4.flash_mla_with_kvcache(
        q=q, k_cache=window, block_table=None, head_dim_v=512, tile_scheduler_metadata="theirs",
        cache_seqlens=None, is_fp8_kvcache=True, indices=ids, topk_length=lengths,
        softmax_scale=0.1, attn_sink=sink, out=out, **second,
    )  # fmt: skip
    chosen = [
        ids[s, 0, : lengths[s]].tolist()
        + [256 + one for one in more[s, 0, : extra_lengths[s]].tolist() if compressed]
        for s in range(3)
    ]
    both = torch.cat((rows, extra_rows))
    expected, _ = attention(q[:, 0].float(), both.float(), chosen, 0.1, sink=sink)
    assert got is out and lse is None
    assert_close(out[:, 0].float(), expected, 2e-2)


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_capability_10_are_interleaved(compressed: bool) -> None:
    """DeepSeek-V4.1's, of 528 bytes and of 288 beside them; bytes between pages are NaN."""
    torch.manual_seed(5)
    caches, rows = interleaved_caches(128, 64)
    q = torch.randn(3, 1, 4, 512).bfloat16() / 4
    ids = [torch.randint(len(x), (3, 1, 8)).int() for x in rows]
    out = torch.full((3, 1, 4, 512), torch.nan, dtype=torch.bfloat16)
    v4.flash_mla_with_kvcache(
        q=q, k_cache=caches[0], indices=ids[0], softmax_scale=0.1, out=out,
        extra_k_cache=caches[1] if compressed else None,
        extra_indices_in_kvcache=ids[1] if compressed else None,
    )  # fmt: skip
    lists = zip(*(x[:, 0].tolist() for x in ids), strict=True)
    chosen = [[*a, *(128 + i for i in b if compressed)] for a, b in lists]
    expected, _ = attention(q[:, 0].float(), torch.cat(rows), chosen, 0.1)
    assert_close(out[:, 0].float(), expected, 2e-2)


@pytest.mark.parametrize("heads", [4, 2])
def test_prompts_write_their_heads_of_the_output(heads: int) -> None:
    """V4.1 asks for the heads that there are, of an output with padding behind them."""
    generator = torch.Generator().manual_seed(6)
    q, rows = (torch.randn(n, 4, 512, generator=generator).bfloat16() for n in (5, 30))
    rows = rows[:, :1]
    ids = torch.randint(30, (5, 1, 7), generator=generator).int()
    lengths, sink = torch.tensor([7, 0, 1, 5, 7]).int(), torch.randn(4, generator=generator)
    out = torch.full((5, 4, 512), 3.0, dtype=torch.bfloat16)
    v4.flash_mla_sparse_fwd(
        q=q[:, :heads], kv=rows, indices=ids, sm_scale=0.1, attn_sink=sink[:heads],
        topk_length=lengths, out=out[:, :heads],
    )  # fmt: skip
    chosen = [ids[s, 0, : lengths[s]].tolist() for s in range(5)]
    expected, _ = attention(
        q[:, :heads].float(), rows[:, 0].float(), chosen, 0.1, sink=sink[:heads]
    )
    assert_close(out[:, :heads].float(), expected, 2e-2)
    assert (out[:, heads:] == 3).all()
