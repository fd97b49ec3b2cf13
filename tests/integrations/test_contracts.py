"""What the integrations rely on stands in the packages themselves: `make test-integrations`.

FLASHDSA_PEERS is the folder with their unpacked wheels, which tools/test_integrations.sh makes.
Megatron-Core is run, where it can be imported; the others are read.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdsa.integrations import megatron, sglang

PEERS = os.environ.get("FLASHDSA_PEERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PEERS is None, reason="run by make test-integrations"),
]
VLLM = "vllm/v1/attention"


def definitions(path: str) -> dict[str, ast.AST]:
    """Functions and classes of a file, and `Class.method`."""
    tree = ast.parse((Path(PEERS or "") / path).read_text())
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if hasattr(one, "name")}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
    return found


def parameters(node: ast.AST) -> tuple[str, ...]:
    assert isinstance(node, ast.FunctionDef)
    return tuple(
        one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    )


def test_sglangs_method_is_the_known_one() -> None:
    found = definitions("sglang/srt/layers/attention/dsa_backend.py")
    method = found["DeepseekSparseAttnBackend._forward_flashmla_sparse"]
    sglang.require_known(parameters(method))
    hooks = definitions("sglang/srt/plugins/hook_registry.py")
    assert parameters(hooks["HookRegistry.register"])[:4] == ("cls", "target", "hook", "hook_type")
    text = (Path(PEERS or "") / "sglang/srt/plugins/__init__.py").read_text()
    assert '"sglang.srt.plugins"' in text and "SGLANG_PLUGINS" in text


def test_vllms_base_classes_are_the_known_ones() -> None:
    common = definitions("vllm/model_executor/layers/attention/sparse_mla_attention.py")
    method = common["SparseMLACommonImpl._forward_mqa_kernel"]
    assert parameters(method) == (
        "self", "q", "kv_cache", "topk_indices", "valid_counts", "layer", "block_size", "is_decode",
    )  # fmt: skip
    assert {"SparseMLACommonMetadata", "SparseMLACommonMetadataBuilder"} <= set(common)
    utils = definitions(f"{VLLM}/backends/mla/sparse_utils.py")
    assert parameters(utils["flat_kv_row_view"]) == ("kv_cache", "block_size")
    assert parameters(utils["align_blocks_to_rows"])[0] == "spec"
    backend = definitions(f"{VLLM}/backend.py")
    assert "MultipleOf" in backend
    for name in (
        "get_name",
        "get_impl_cls",
        "get_builder_cls",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "customize_spec",
        "is_mla",
        "is_sparse",
        "supports_compute_capability",
    ):
        assert f"AttentionBackend.{name}" in backend, name
    registry = definitions(f"{VLLM}/backends/registry.py")
    assert parameters(registry["register_backend"])[:2] == ("backend", "class_path")


def test_megatrons_own_dispatch_calls_the_hook_and_agrees_with_its_torch_path() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, on Python 3.12")
    from megatron.core.transformer.experimental_attention_variant import dsa

    megatron.register()
    torch.manual_seed(0)
    query = torch.randn(12, 2, 4, 576, requires_grad=True)
    key = torch.randn(20, 2, 1, 576, requires_grad=True)
    up = torch.randn(4, 128, 512) / 20
    ids = torch.stack([torch.randperm(20)[:6] for _ in range(24)]).view(2, 12, 6)
    ids[0, 3, 2:], ids[1, 5, 0] = -1, -1

    def run(backend: str) -> tuple[torch.Tensor, Any]:
        config = SimpleNamespace(
            kv_lora_rank=512, dsa_kernel_backend=backend, attention_backend=None
        )
        out = dsa._run_sparse_attention(
            absorbed_mla=True,
            query=query,
            key=key,
            value=None,
            up_v_weight=up,
            topk_indices=ids,
            softmax_scale=576**-0.5,
            config=config,
            mask=torch.zeros(2, 12, 20),
            varlen_starts=None,
            varlen_ends=None,
            key_positions=None,
        )
        torch.manual_seed(1)
        return out.detach(), torch.autograd.grad(out, (query, key), torch.randn_like(out))

    expected, expected_gradients = run("none")
    called: list[int] = []
    kept = megatron.run_fused_absorbed_sparse_attention

    def counted(*arguments: Any) -> Any:
        called.append(1)
        return kept(*arguments)

    megatron.run_fused_absorbed_sparse_attention = counted  # type: ignore[assignment]
    try:
        got, gradients = run("flashdsa")
    finally:
        megatron.run_fused_absorbed_sparse_attention = kept
    assert called == [1]
    for mine, theirs in zip((got, *gradients), (expected, *expected_gradients), strict=True):
        error = float((mine - theirs).norm() / theirs.norm())
        assert error < 5e-6, error
