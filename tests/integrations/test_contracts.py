"""What the integrations rely on stands in the packages themselves: `make test-integrations`.

FLASHDSA_PEERS is the folder with their unpacked wheels, which tools/test_integrations.sh makes.
Megatron-Core is run, where it can be imported; the others are read.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.integrations import megatron, sglang, veomni
from tests.distributed.ranks import run_ranks
from tests.support import vllm_stand_ins
from workbench.flashinfer_bench import ATTENTION, INDEXER, solution

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


@pytest.mark.parametrize("version", ["0.5.13", "0.5.23"])
def test_sglangs_methods_are_the_known_ones(version: str) -> None:
    attention = f"sglang-{version}/sglang/srt/layers/attention"
    found = definitions(f"{attention}/dsa_backend.py")
    for name in ("_forward_flashmla_sparse", "_forward_flashmla_kv"):
        method = found[f"DeepseekSparseAttnBackend.{name}"]
        sglang.require_known(sglang.NAME, name, parameters(method))
    server = definitions(f"sglang-{version}/sglang/srt/server_args.py")
    assert parameters(server["ServerArgs.check_server_args"]) == ("self",)
    indexer = definitions(f"{attention}/dsa/dsa_indexer.py")
    for name in ("_get_topk_paged", "_get_topk_ragged"):
        sglang.require_known(sglang.INDEXER_NAME, name, parameters(indexer[f"Indexer.{name}"]))
    for name, attributes in (
        ("dsa_backend", "num_q_heads dsa_index_topk kv_lora_rank qk_rope_head_dim"),
        ("dsa_backend", "dsa_kv_cache_store_fp8"),
        ("dsa/dsa_indexer", "n_heads index_topk head_dim"),
    ):
        text = (Path(PEERS or "") / attention / f"{name}.py").read_text()
        for attribute in attributes.split():
            assert f"        self.{attribute} = " in text, attribute
    if version != "0.5.13":
        found = definitions(f"{attention}/dsa/dsa_indexer_metadata.py")
        chosen = definitions(f"sglang-{version}/sglang/srt/arg_groups/overrides.py")
        assert parameters(chosen["resolution_result"]) == ("server_args", "field", "default")
    assert {
        f"DSAIndexerMetadata.{name}"
        for name in (
            "get_seqlens_int32", "get_seqlens_expanded", "get_page_table_64",
            "get_dsa_extend_len_cpu", "get_indexer_kvcache_range", "get_indexer_seq_len",
            "get_indexer_seq_len_cpu", "get_token_to_batch_idx",
        )
    } <= set(found)  # fmt: skip
    pool = definitions(f"sglang-{version}/sglang/srt/mem_cache/memory_pool.py")
    for name, count in (("get_index_k_with_scale_buffer", 2), ("get_index_k_scale_buffer", 6)):
        assert len(parameters(pool[f"DSATokenToKVPool.{name}"])) == count
    hooks = definitions(f"sglang-{version}/sglang/srt/plugins/hook_registry.py")
    assert parameters(hooks["HookRegistry.register"])[:4] == ("cls", "target", "hook", "hook_type")
    loader = f"sglang-{version}/sglang/srt/plugins/__init__.py"
    text = (Path(PEERS or "") / loader).read_text()
    assert '"sglang.srt.plugins"' in text and "SGLANG_PLUGINS" in text
    assert "except Exception:" in text and "BaseException" not in text


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
        "supports_combination",
        "supports_compute_capability",
    ):
        assert f"AttentionBackend.{name}" in backend, name
    order = backend["AttentionMetadataBuilder._init_reorder_batch_threshold"]
    assert parameters(order)[1:3] == ("reorder_batch_threshold", "supports_spec_as_decode")
    registry = definitions(f"{VLLM}/backends/registry.py")
    assert parameters(registry["register_backend"])[:2] == ("backend", "class_path")


def test_vllms_indexer_is_the_known_one() -> None:
    """Arguments without a name, as the layer gives them, and chunks of prompts."""
    layers = definitions("vllm/model_executor/layers/sparse_attn_indexer.py")
    known = vllm_stand_ins.PARAMETERS.split()
    assert parameters(layers["sparse_attn_indexer"]) == tuple(x.split("=")[0] for x in known)
    assert parameters(layers["PrefillRowShard.narrow"]) == ("self", "chunk")
    assert parameters(layers["PrefillRowShard.exchange_topk"]) == ("self", "topk_buffer", "width")
    text = (Path(PEERS or "") / "vllm/models/deepseek_v32/attention.py").read_text()
    given = text.split("            sparse_attn_indexer(\n")[1].split("skip_k_cache_insert=")[0]
    assert given.count(",\n") == known.index("skip_k_cache_insert")


def test_veomnis_functions_are_the_known_ones() -> None:
    """GLM-5's layers import them from that module by these names."""
    found = definitions(veomni.TARGET.replace(".", "/") + ".py")
    models = Path(PEERS or "") / "veomni/models/transformers/glm_moe_dsa/generated"
    text = (models / "patched_modeling_glm_moe_dsa_gpu.py").read_text()
    imports = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == veomni.TARGET
    ]
    names = {alias.name for node in imports for alias in node.names}
    assert len(imports) == 2 and len(names) == 3
    for name in names:
        own = tuple(inspect.signature(getattr(veomni, name)).parameters)
        assert parameters(found[name]) == own, name


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
            absorbed_mla=True, query=query, key=key, value=None, up_v_weight=up, topk_indices=ids,
            softmax_scale=576**-0.5, config=config, mask=torch.zeros(2, 12, 20), varlen_starts=None,
            varlen_ends=None, key_positions=None,
        )  # fmt: skip
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


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        (1, "without_parallelism"),
        (2, "with_tensor_parallelism"),
        (2, "with_context_parallelism"),
        (4, "with_both"),
    ],
)
def test_megatrons_gpt_has_the_losses_and_gradients_of_its_torch_path(
    tmp_path: Path, ranks: int, check: str
) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, on Python 3.12")
    from tests.integrations import megatron_on_cpu

    found = run_ranks(tmp_path, ranks, [getattr(megatron_on_cpu, check)])
    assert found == [{}] * ranks


INT8, BF16, FP32 = "int8", "bfloat16", "float32"
DEFINITIONS: dict[str, dict[str, Any]] = {
    INDEXER: {
        "axes": {"num_heads": 64, "dim": 128, "page": 64, "one": 1, "token_bytes": 132, "k": 2048},
        "inputs": {
            "q_index_fp8": (["batch", "num_heads", "dim"], "float8_e4m3fn"),
            "k_index_cache_fp8": (["pages", "page", "one", "token_bytes"], INT8),
            "weights": (["batch", "num_heads"], FP32),
            "seq_lens": (["batch"], "int32"),
            "block_table": (["batch", "max_pages"], "int32"),
        },
        "outputs": {"topk_indices": (["batch", "k"], "int32")},
    },
    ATTENTION: {
        "axes": {"num_heads": 16, "latent": 512, "rope": 64, "page": 64, "k": 2048},
        "inputs": {
            "q_nope": (["tokens", "num_heads", "latent"], BF16),
            "q_pe": (["tokens", "num_heads", "rope"], BF16),
            "ckv_cache": (["pages", "page", "latent"], BF16),
            "kpe_cache": (["pages", "page", "rope"], BF16),
            "sparse_indices": (["tokens", "k"], "int32"),
            "sm_scale": (None, FP32),
        },
        "outputs": {
            "output": (["tokens", "num_heads", "latent"], BF16),
            "lse": (["tokens", "num_heads"], FP32),
        },
    },
}


@pytest.mark.parametrize("name", [INDEXER, ATTENTION], ids=["indexer", "attention"])
def test_flashinfer_bench_validates_builds_and_runs_the_solutions(name: str) -> None:
    data = pytest.importorskip(
        "flashinfer_bench.data", reason="needs pydantic and docstring-parser"
    )
    from flashinfer_bench.compile import BuilderRegistry

    made = DEFINITIONS[name]
    named = {axis for shape, _ in made["inputs"].values() for axis in shape or ()}
    axes = {axis: {"type": "var"} for axis in named}
    axes |= {axis: {"type": "const", "value": value} for axis, value in made["axes"].items()}
    specs = {
        kind: {key: {"shape": shape, "dtype": dtype} for key, (shape, dtype) in made[kind].items()}
        for kind in ("inputs", "outputs")
    }
    definition = data.Definition.model_validate(
        {
            "name": name,
            "op_type": "dsa_paged",
            "axes": axes,
            "reference": "def run(): pass",
            **specs,
        }
    )
    content = solution(name)
    runnable = BuilderRegistry.get_instance().build(
        definition, data.Solution.model_validate(content)
    )
    torch.manual_seed(0)
    if name == INDEXER:
        cache = torch.zeros(40, 64, 1, 132, dtype=torch.int8)
        flashdsa.write_index_k_cache(torch.randn(2560, 128), torch.arange(2560), cache)
        inputs: list[Any] = [
            torch.randn(2, 64, 128).to(torch.float8_e4m3fn),
            cache,
            torch.randn(2, 64),
            torch.tensor([2300, 64], dtype=torch.int32),
            torch.arange(40, dtype=torch.int32).repeat(2, 1),
        ]
        got = runnable.call_value_returning(*inputs)
        expected = torch.empty(2, 2048, dtype=torch.int32)
        flashdsa.dsa_topk_indexer(*inputs, expected)
        assert torch.equal(got, expected)
    else:
        q, kv = torch.randn(2, 16, 576).bfloat16(), torch.randn(3, 64, 576).bfloat16()
        ids = torch.randint(-1, 192, (2, 2048), dtype=torch.int32)
        split = (*q.split([512, 64], -1), *kv.split([512, 64], -1))
        out, lse = runnable.call_value_returning(*[x.contiguous() for x in split], ids, 0.05)
        expected_out, natural = flashdsa.sparse_mla_fwd(q, kv.view(-1, 576), ids, sm_scale=0.05)
        torch.testing.assert_close(out, expected_out, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(lse, flashdsa.lse_to_base2(natural))
    for change in (
        {"spec": content["spec"] | {"entry_point": "main.py:run"}},
        {"spec": content["spec"] | {"entry_point": "other.py::run"}},
        {"spec": content["spec"] | {"language": "fortran"}},
        {"spec": content["spec"] | {"target_hardware": []}},
    ):
        with pytest.raises(ValueError):
            data.Solution.model_validate(content | change)
