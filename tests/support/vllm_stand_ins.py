"""Stand-ins for vLLM: its base classes, configuration, workspace and logger."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.integrations import vllm
from tests.support.stubs import forget_starts, stub, taking
from tests.support.vllm_batches import gather_index_keys

ATTENTION = "vllm.models.deepseek_v32.attention"
TOPK, HEADS, MOST_TOKENS = 24, 16, 64
PARAMETERS = (
    "hidden_states k_cache_prefix kv_cache q_quant q_scale k weights quant_block_size scale_fmt"
    " topk_tokens head_dim max_model_len total_seq_lens topk_indices_buffer skip_k_cache_insert"
    " use_pcp pcp_shard_decode_requests dense_mha_metadata_layer_name use_fp4_cache=False"
    " dcp_rank=0 dcp_world_size=1 cp_kv_cache_interleave_size=1 skip_topk_buffer_clear=False"
    " candidate_blocks=None candidate_block_size=0 candidate_write=False topk_backend='auto'"
)
"""Of vLLM's function of the indexer; test_contracts.py holds them against it."""


class Common:
    """A layer's attention: what vLLM's base sets."""

    dcp_world_size = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        kv_cache_dtype: str,
        kv_lora_rank: int = 512,
        indexer: Any = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank
        self.need_to_return_lse_for_decode = True

    def forward_mqa(self, q: Any, kv_cache: Tensor, batch: Any, layer: Any) -> Any:
        """Zeros, for the tokens of q."""
        return torch.zeros(len(q[0]), *q[0].shape[1:]), "lse"


class Builder:
    """vLLM's builder of metadata: notes how its batches are to be ordered."""

    dcp_world_size = 1
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"))

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """What it is given as the batch."""
        return common_attn_metadata

    def build_for_cudagraph_capture(self, batch: Any) -> Any:
        """The batch, by vLLM's names."""
        return self.build(common_prefix_len=0, common_attn_metadata=batch)

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool) -> None:
        self.ordered_by = threshold, supports_spec_as_decode


class Backend:
    """vLLM's answers."""


def flat_kv_row_view(kv_cache: Tensor, block_size: int) -> tuple[Tensor, int]:
    """Blocks may lie apart: rows are counted through what lies between."""
    apart = kv_cache.stride(0) // kv_cache.shape[2]
    rows = (len(kv_cache) - 1) * apart + block_size
    return kv_cache.as_strided((rows, kv_cache.shape[2]), (kv_cache.shape[2], 1)), apart


class Workspace:
    """vLLM's manager of memory that all layers share: one buffer, which must not grow once it is
    locked. Nobody may count on what a buffer holds: it is NaN."""

    def __init__(self) -> None:
        self.held, self.is_locked = torch.empty(0, dtype=torch.uint8), False

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Views of the buffer."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in specs]
        ends = torch.tensor([-(-size // 256) * 256 for size in sizes]).cumsum(0).tolist()
        if ends[-1] > len(self.held):
            assert not self.is_locked, "the workspace grows after vLLM has measured it"
            self.held = torch.full((ends[-1],), 255, dtype=torch.uint8)
        return [
            self.held[begin : begin + size].view(dtype).view(shape)
            for begin, size, (shape, dtype) in zip([0, *ends], sizes, specs, strict=False)
        ]


class Indexer:
    """A layer's indexer, as far as it is looked at."""

    head_dim, n_head, topk_tokens = 128, HEADS, TOPK

    def __init__(self) -> None:
        self.k_cache = Cache()


class Cache:
    """Its layer of the index cache."""


def layer_of(kind: Any, cache: str = "auto", columns: int = 576, **named: Any) -> Any:
    """A layer's attention of one of the classes, as vLLM makes it."""
    return kind(4, columns, 0.2, cache, **named)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Backend and indexer over stand-ins, the batch, and calls of vLLM's own indexer."""
    forget_starts()
    made = SimpleNamespace(
        batch=None, left=[], parallel=SimpleNamespace(), layers={}, mx_scales=False
    )
    made.workspace = Workspace()
    made.parallel.decode_context_parallel_size = 1
    made.parallel.prefill_context_parallel_size = 1

    def left(*given: Any, **named: Any) -> str:
        made.left.append(given)
        return "vLLM's"

    left.__signature__ = inspect.signature(taking(PARAMETERS))  # type: ignore[attr-defined]
    made.config = SimpleNamespace(
        parallel_config=made.parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST_TOKENS),
        model_config=SimpleNamespace(
            max_model_len=512, hf_text_config=SimpleNamespace(index_topk=TOPK)
        ),
    )
    layers = "vllm.model_executor.layers"
    mla = "vllm.v1.attention.backends.mla"
    for name, members in {
        f"{layers}.attention.sparse_mla_attention": {
            "SparseMLACommonImpl": Common,
            "SparseMLACommonMetadata": object,
            "SparseMLACommonMetadataBuilder": Builder,
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": Backend,
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH=2),
            "MultipleOf": lambda step: ("multiple of", step),
        },
        f"{mla}.sparse_utils": {
            "align_blocks_to_rows": lambda spec: ("aligned", spec),
            "flat_kv_row_view": flat_kv_row_view,
        },
        "vllm.v1.attention.ops.metadata": {
            "compute_token_to_req_indices": lambda *given: made.left.append(given)
        },
        "vllm._custom_ops": {"cp_gather_indexer_k_quant_cache": gather_index_keys},
        "vllm": {"__version__": "0.33.0"},
        "vllm.config": {"get_current_vllm_config": lambda: made.config},
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(
                attn_metadata=made.batch, no_compile_layers=made.layers
            )
        },
        f"{layers}.sparse_attn_indexer": {
            "PrefillRowShard": SimpleNamespace(from_metadata=lambda prefill, first: prefill.shard)
        },
        "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda: made.mx_scales},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: made.workspace},
        ATTENTION: {"DeepseekV32Indexer": Indexer, "sparse_attn_indexer": left},
    }.items():
        stub(monkeypatch, name, **members)
    ours = [f"flashdsa.integrations.vllm.{name}" for name in ("indexer", "backend")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(vllm, name.rpartition(".")[2], raising=False)
    made.backend, made.theirs = import_module(ours[1]), left
    yield made
    for name in ours:
        sys.modules.pop(name, None)
        vars(vllm).pop(name.rpartition(".")[2], None)
