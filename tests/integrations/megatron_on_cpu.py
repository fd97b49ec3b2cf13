"""Megatron-Core 0.19 on a machine without a GPU: a GPTModel with sparse attention, on gloo's ranks.

    FLASHDSA_PEERS=FOLDER pytest tests/integrations/test_contracts.py -k gpt

Megatron takes tensors from "the current CUDA device" and its tracker of CUDA's random states; both
are the CPU's here. Its local norms refuse sequence parallelism, which its absorbed MLA asks for if
tensors are parallel, and its local layers have no duplicated linear: both are torch's here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import language_model_embedding as embedding
from megatron.core.models.common.embeddings import rotary_pos_embedding as rotary
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from flashdsa.integrations import megatron
from flashdsa.integrations.megatron import indexer

TOKENS, BATCH, VOCABULARY = 48, 2, 64
HOOKS = [name for name in megatron.__all__ if name.startswith("run_fused")]


class Duplicated(torch.nn.Linear):
    """A linear layer that every rank has whole, called as Megatron calls its own."""

    def __init__(self, inputs: int, outputs: int, *, init_method: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)
        init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Norm:
    """Torch's norm, of a rank's own tokens."""

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        return kind(hidden_size, eps)


class Layers(LocalSpecProvider):
    """Megatron's local layers, with what they lack."""

    def linear(self) -> type:
        return Duplicated

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> Any:
        return Norm


def shard(offsets: list[int]) -> Tensor:
    """This rank's tokens, of each sequence the part from the front and its mate from the back."""
    cp = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if cp == 1:
        return torch.arange(offsets[-1])
    parts = [torch.arange(*each).chunk(2 * cp) for each in pairwise(offsets)]
    return torch.cat([one[i] for one in parts for i in (rank, 2 * cp - 1 - rank)])


def make_model(**choices: Any) -> GPTModel:
    """Two layers, and a configuration that names the backend, which a CPU may after `register`."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    embedding.tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(
        fork=contextlib.nullcontext
    )
    rotary.get_pos_emb_on_this_cp_rank = lambda x, dim, group: x[shard([0, len(x)])]
    megatron.register()
    torch.manual_seed(0)
    config = MLATransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=64, q_lora_rank=32,
        kv_lora_rank=512, qk_head_dim=32, qk_pos_emb_head_dim=64, v_head_dim=32, rope_type="rope",
        qk_layernorm=True, add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        init_method_std=0.2, experimental_attention_variant="dsa", dsa_kernel_backend="flashdsa",
        dsa_indexer_n_heads=16, dsa_indexer_head_dim=128, dsa_indexer_topk=8,
        dsa_indexer_rotate_activation=False, use_cpu_initialization=True,
        transformer_impl="local", cp_comm_type="allgather",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1, **choices,
    )  # fmt: skip
    layers = specs.get_transformer_layer_with_experimental_attention_variant_spec(config, Layers())
    for layer in layers:
        inner = layer.submodules.self_attention.submodules
        inner.linear_q_down_proj = inner.linear_kv_down_proj = ColumnParallelLinear
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    return GPTModel(
        config, block, VOCABULARY, TOKENS, position_embedding_type="rope", parallel_output=True
    )


@contextlib.contextmanager
def recorded() -> Iterator[tuple[dict[str, int], list[Tensor]]]:
    """How often each hook served a call, and every choice that Megatron or a hook made."""
    served = dict.fromkeys(HOOKS, 0)
    choices: list[Tensor] = []
    kept = {name: getattr(megatron, name) for name in HOOKS}
    naive, choose = dsa.fused_qk_topk_naive, indexer.Indexer.choose

    def counted(name: str) -> Any:
        def hook(*arguments: Any, **named: Any) -> Any:
            result = kept[name](*arguments, **named)
            served[name] += result is not None
            return result

        return hook

    def theirs(*arguments: Any, **named: Any) -> Any:
        scores, ids = naive(*arguments, **named)
        choices.append(ids.sort().values.flatten(0, 1))
        return scores, ids

    def ours(self: Any, topk: int) -> Any:
        chosen = choose(self, topk)
        ids, _ = chosen.in_sequences(self.batch, len(self.k) // self.batch)
        choices.append(ids.long().sort().values.flatten(0, 1))
        return chosen

    for name in HOOKS:
        setattr(megatron, name, counted(name))
    dsa.fused_qk_topk_naive, indexer.Indexer.choose = theirs, ours
    try:
        yield served, choices
    finally:
        for name in HOOKS:
            setattr(megatron, name, kept[name])
        dsa.fused_qk_topk_naive, indexer.Indexer.choose = naive, choose


def step(model: GPTModel, backend: str, packed: PackedSeqParams | None) -> Any:
    """Losses of the tokens, gradients by name, the indexer's losses, and what `recorded` saw."""
    model.zero_grad()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.dsa_kernel_backend = backend
    torch.manual_seed(1)
    batch = 1 if packed else BATCH
    tokens = torch.randint(0, VOCABULARY, (batch, TOKENS + 1))
    mine = shard(packed.cu_seqlens_q.tolist() if packed else [0, TOKENS])
    dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    with recorded() as (served, choices):
        losses = model(
            tokens[:, mine], mine.expand(batch, -1), None, labels=tokens[:, mine + 1],
            packed_seq_params=packed,
        )  # fmt: skip
        losses.mean().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    logged = dsa.DSAIndexerLossLoggingHelper.tracker.get("values", torch.zeros(2))
    return losses.detach(), gradients, logged.clone(), served, choices


def compare(expected: dict[str, int], packed: bool = False, **choices: Any) -> None:
    """Hold a step by flashdsa against one by Megatron's torch code.

    Raises:
        AssertionError: other keys were chosen, a result is too far off, or hooks served otherwise
            than `expected`, calls of both layers by the hook's last words.
    """
    model = make_model(**choices)
    params = None
    if packed:
        offsets = torch.tensor([0, 20, 24, TOKENS], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=24,
            max_seqlen_kv=24,
        )  # fmt: skip
    losses, gradients, logged, _, theirs = step(model, "none", params)
    ours, our_gradients, our_logged, served, mine = step(model, "flashdsa", params)
    assert {name: count for name, count in served.items() if count} == expected, served
    assert gradients.keys() == our_gradients.keys()
    assert all(map(torch.equal, theirs, mine)), "other keys were chosen"
    errors = {
        name: float((our_gradients[name] - one).norm() / one.norm().clamp(min=1e-20))
        for name, one in gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    found = {
        "loss": float((ours - losses).abs().max()),
        "indexer's loss": float((our_logged - logged).abs().max() / logged.max().clamp(min=1e-20)),
        "gradients": len(errors),
        "worst": errors[worst],
        "of": worst,
    }
    FOUND.append({**choices, "packed": packed} | found)
    assert found["loss"] < 1e-5 and found["indexer's loss"] < 1e-5 and errors[worst] < 1e-5, found
    trained = any("indexer" in name and bool(x.any()) for name, x in our_gradients.items())
    asked = bool(choices.get("dsa_indexer_loss_coeff"))
    assert trained == bool(logged.any()) == asked, "the indexer's loss"


FOUND: list[dict[str, Any]] = []
"""Largest differences, of each comparison."""
FUSED = {"run_fused_dsa_attention": 2}
ATTENTION = {"run_fused_absorbed_sparse_attention": 2}
LOSS: dict[str, Any] = {"dsa_indexer_loss_coeff": 0.3}
SPARSE: dict[str, Any] = LOSS | {"dsa_indexer_use_sparse_loss": True}


def without_parallelism() -> None:
    """Every rank for itself: all losses, packed sequences, a choice that layers share."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    compare(FUSED)
    compare(FUSED, **SPARSE)
    compare(FUSED, **LOSS)
    compare(FUSED, packed=True, **SPARSE)
    compare(FUSED, packed=True, **LOSS, calculate_per_token_loss=True)
    shared = {"dsa_indexer_topk_freq": 2}
    compare({"run_fused_qk_topk": 1} | ATTENTION, **shared)
    compare({"run_fused_qk_topk_with_loss": 1} | ATTENTION, **SPARSE, **shared)


def with_tensor_parallelism() -> None:
    """Heads on two ranks, and sequence parallelism between the layers."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    compare(FUSED)
    compare(FUSED, **SPARSE)
    compare(FUSED, **LOSS)
    compare(FUSED, packed=True, **SPARSE)
    compare({"run_fused_qk_topk_with_loss": 1} | ATTENTION, **SPARSE, dsa_indexer_topk_freq=2)


def with_context_parallelism() -> None:
    """Queries on two ranks, keys gathered."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    compare(FUSED)
    compare(FUSED, **SPARSE)
    compare(FUSED, **LOSS)
    compare(FUSED, packed=True, **SPARSE)
    compare(FUSED, packed=True, **LOSS)
    compare({"run_fused_qk_topk_with_loss": 1} | ATTENTION, **SPARSE, dsa_indexer_topk_freq=2)


def with_both() -> None:
    """Heads and queries on two ranks each."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    compare(FUSED, **SPARSE)
    compare(FUSED, packed=True, **LOSS)
