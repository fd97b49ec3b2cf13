"""transformers' DeepSeek-V4 and GLM-5.3, tiny and random, with flashdsa against eager attention.

fp32, since in bf16 the two implementations' indexers may pick different keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("transformers.models.deepseek_v4", reason="needs a newer transformers")
glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")

from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig  # noqa: E402

from flashdsa.errors import UnsupportedError  # noqa: E402
from flashdsa.integrations.transformers import disable, enable, two_sources  # noqa: E402
from flashdsa.ops.entries import compress_kv  # noqa: E402

LENGTH, PADDING, WINDOW = 48, 5, 16
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 160_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 65_536,
    "beta_fast": 32,
    "beta_slow": 1,
}
"""Of layers with entries, as the released model has it."""


def deepseek_v4(**changed: Any) -> Any:
    """A layer of each kind: window, entries of 4 tokens, entries of 8."""
    config = transformers.DeepseekV4Config(
        **COMMON, head_dim=64, o_lora_rank=16, o_groups=2, index_topk=4, sliding_window=WINDOW,
        layer_types=LAYERS, compress_rates=dict(zip(LAYERS[1:], (4, 8), strict=True)), **changed,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "position_bias" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def glm5_next() -> Any:
    """Pools of four keys, and the query's own incomplete pool."""
    config = Glm5NextTextConfig(
        **COMMON, intermediate_size=64, num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=0,
        qk_nope_head_dim=24, v_head_dim=20, n_group=1, topk_group=1, index_topk=16, index_kpool=4,
        layer_types=["deepseek_sparse_attention"] * 3, indexer_types=["full", "shared", "full"],
    )  # fmt: skip
    return glm.Glm5NextTextModel(config).eval()


MODELS = {"deepseek_v4": deepseek_v4, "glm5_next": glm5_next}


def glm5_next_with_images() -> Any:
    """The whole model: a tower of one layer for images of 2 x 2 patches beside the text's."""
    text = glm5_next().config
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 8, "patch_size": 4,
        "intermediate_size": 32, "out_hidden_size": 64, "projection_intermediate_size": 32,
    }  # fmt: skip
    config = transformers.Glm5NextConfig(
        text_config=text.to_dict(), vision_config=vision, image_token_id=90
    )
    return glm.Glm5NextModel(config).eval()


@pytest.mark.parametrize("tower", ["eager", "sdpa"])
def test_an_image_is_seen_by_the_towers_own_attention(tower: str) -> None:
    torch.manual_seed(0)
    model = glm5_next_with_images()
    model.set_attn_implementation({"text_config": "eager", "vision_config": tower})
    ids = torch.randint(1, 80, (1, 20))
    ids[0, 5] = 90  # an image of 2 x 2 patches is one token
    x = {
        "input_ids": ids,
        "pixel_values": torch.randn(4, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": (ids == 90).int(),
    }
    with torch.no_grad():
        expected = model(**x)[0]
        assert error(model(**x | {"pixel_values": -x["pixel_values"]})[0], expected) > 1e-3
        enable(model)
        assert model.config.vision_config._attn_implementation == tower
        assert error(model(**x)[0], expected) < 5e-6
        disable(model)
    own = [model.config.text_config._attn_implementation]
    own.append(model.config.vision_config._attn_implementation)
    assert own == ["eager", tower]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    made = MODELS[request.param]()
    made.set_attn_implementation("eager")
    yield made


def tokens(length: int = LENGTH) -> dict[str, Tensor]:
    """Left padding in the second sequence, if it is long enough."""
    torch.manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, : PADDING if length > 2 * PADDING else 0] = 0
    return {"input_ids": torch.randint(1, 96, (2, length)), "attention_mask": mask}


def run(model: Any, x: dict[str, Tensor]) -> Tensor:
    """Results of the tokens that are no padding."""
    result: Tensor = model(**x)[0]
    return result[x["attention_mask"].bool()]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm().detach() / expected.detach().norm())


def with_gradients(model: Any) -> tuple[Tensor, Tensor]:
    """Results, and gradients of the embedding and of the attentions, each of norm 1."""
    model.zero_grad()
    result = run(model, tokens())
    torch.manual_seed(2)
    (result * torch.randn_like(result)).sum().backward()
    found = [
        parameter.grad.flatten() / parameter.grad.norm()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and ("self_attn" in name or "embed" in name)
    ]
    return result.detach(), torch.cat(found)


def test_results_and_gradients_are_eagers(model: Any) -> None:
    expected, expected_gradients = with_gradients(model)
    assert enable(model) is model
    result, gradients = with_gradients(model)
    assert error(result, expected) < 5e-6
    assert float((gradients - expected_gradients).abs().max()) < 2e-5
    disable(model)
    again, _ = with_gradients(model)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, WINDOW, WINDOW + 1, 33])
def test_lengths_around_windows_and_pools(model: Any, length: int) -> None:
    with torch.no_grad():
        expected = run(model, tokens(length))
        assert error(run(enable(model), tokens(length)), expected) < 5e-6


SIDES = [
    ("deepseek_v4", "right"),  # its own compressor pools what is on the left, padding too
    ("glm5_next", "right"),
    ("glm5_next", "left"),
]


@pytest.mark.parametrize(("name", "side"), SIDES)
@pytest.mark.parametrize("length", [3, 4, 6])
def test_padding_changes_no_token(name: str, side: str, length: int) -> None:
    """A sequence beside a longer one has the results that it has alone."""
    torch.manual_seed(0)
    model = enable(MODELS[name]())
    ids, mask = torch.randint(1, 96, (2, 21)), torch.ones(2, 21, dtype=torch.int64)
    places = slice(0, length) if side == "right" else slice(21 - length, 21)
    mask[1] = 0
    mask[1, places] = 1
    with torch.no_grad():
        alone = model(input_ids=ids[1:, places])[0][0]
        padded = model(input_ids=ids, attention_mask=mask)[0][1, places]
    assert error(padded, alone) < 5e-6


@pytest.mark.parametrize(("first", "rope"), [(5_000, None), (70_000, YARN)], ids=["5k", "YaRN"])
def test_positions_far_from_the_first(first: int, rope: dict[str, Any] | None) -> None:
    """A prompt behind so many tokens: queries and entries have angles of their own positions, and
    layers of entries another base than the window's."""
    torch.manual_seed(0)
    model = deepseek_v4(rope_parameters=rope)
    model.set_attn_implementation("eager")
    x = {"input_ids": tokens()["input_ids"], "position_ids": torch.arange(LENGTH)[None] + first}

    def logits() -> Tensor:
        cache = transformers.DynamicCache(config=model.config)
        for layer in cache.layers:
            for name in getattr(layer, "entry_count", {}):
                layer.entry_count[name] = first // layer.compress_rate
        found: Tensor = model(**x, past_key_values=cache)[0]
        return found

    with torch.no_grad():
        expected, near = logits(), model(**x)[0]
        assert error(near, expected) > 1e-2
        enable(model)
        assert error(logits(), expected) < 5e-6
        assert error(model(**x)[0], near) < 5e-6


def test_results_are_eagers_if_all_scores_tie(model: Any) -> None:
    """Any choice is right that has as many as there are, none twice and none of the future."""
    chosen: list[Tensor] = []
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("indexer"):
                module.register_forward_hook(lambda *given: chosen.append(given[-1]))
            if name.endswith("weights_proj"):
                module.weight.zero_()
        x = {"input_ids": tokens()["input_ids"]}
        expected = model(**x)[0]
        found = enable(model)(**x)[0]
    assert error(found, expected) < 5e-6
    position = torch.arange(LENGTH)[:, None]
    pools = (position + 1) // 4
    last, count = pools - 1, pools.clamp(max=4)
    if isinstance(model, glm.Glm5NextTextModel):  # tokens of pools, and the incomplete one's
        last, count = position, 4 * count + (position + 1) % 4
    assert len(chosen) % 2 == 0
    for ids in chosen:
        is_chosen = ids[..., None] == torch.arange(LENGTH)
        assert int(is_chosen.sum(2).max()) == 1 and bool((ids <= last).all())
        assert torch.equal(is_chosen.any(2).sum(2), count[:, 0].expand(2, LENGTH))


@pytest.mark.parametrize("padded", [False, True])
def test_deepseek_v4_generates_the_same_tokens(padded: bool) -> None:
    """Prefill, then steps of one token, over the window's end and over many complete entries."""
    torch.manual_seed(0)
    model = deepseek_v4()
    model.set_attn_implementation("eager")
    x = tokens(20)
    if not padded:
        x = {name: value[:1] for name, value in x.items()}
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    expected = model.generate(**x, **options)
    assert torch.equal(enable(model).generate(**x, **options), expected)


@pytest.mark.parametrize("hole", [False, True])
def test_deepseek_v4_steps_behind_right_padding(hole: bool) -> None:
    """A window of 16 over prompts of 12 and 9: the padding lies inside it. With a hole besides."""
    torch.manual_seed(0)
    model = deepseek_v4()
    model.set_attn_implementation("eager")
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, 9:12] = 0
    mask[0, 7] = 0 if hole else 1
    ids, positions = tokens(14)["input_ids"], (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for is_enabled in (False, True):
        if is_enabled:
            enable(model)
        cache, logits = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            for first, last in ((0, 12), (12, 13), (13, 14)):
                part = slice(first, last)
                result = model(
                    input_ids=ids[:, part],
                    attention_mask=mask[:, :last],
                    position_ids=positions[:, part],
                    past_key_values=cache,
                )
                logits.append(result.logits[mask[:, part].bool()])
        found.append(torch.cat(logits))
    assert error(found[1], found[0]) < 5e-6


def test_deepseek_v4_is_exported() -> None:
    """No value of the mask decides what is computed."""
    torch.manual_seed(0)
    model = enable(deepseek_v4())
    ids = tokens(20)["input_ids"]
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        expected = model(ids, use_cache=False).logits
        assert error(program.module()(input_ids=ids, use_cache=False).logits, expected) < 1e-6


@pytest.mark.parametrize("layer", [1, 2])
def test_entries_in_bf16_are_as_near_to_float64s_as_the_models(layer: int) -> None:
    """`compress_kv` rounds once, the model's own form after each step."""
    torch.manual_seed(0)
    compressor = deepseek_v4().bfloat16().model.layers[layer].self_attn.compressor
    hidden = torch.randn(2, 43, 64).bfloat16()
    found = two_sources.pool(compressor, hidden, None)
    positions = torch.arange(43)[None]
    eager, _ = compressor(hidden, torch.zeros(2, 43, 32).bfloat16(), positions, None, layer)
    exact = two_sources.pool(compressor.double(), hidden.double(), None)
    assert found.dtype == torch.bfloat16 and found.shape == eager[:, 0].shape
    own, theirs = error(found.double(), exact), error(eager[:, 0].double(), exact)
    assert own < 1.02 * theirs < 0.02


def test_entries_come_from_compress_kv_where_it_has_the_models_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.dtype] = []

    def counted(kv: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(kv.dtype)
        return compress_kv(kv, *rest, **options)

    monkeypatch.setattr(two_sources, "compress_kv", counted)
    torch.manual_seed(0)
    with torch.no_grad():
        model = enable(deepseek_v4())
        model(**tokens(20), use_cache=True)
        assert calls == [torch.float32] * 2
        model.bfloat16()(**tokens(20), use_cache=False)
        assert calls[2:] == [torch.bfloat16] * 2
        model(**tokens(20), use_cache=True)  # the overlap's gates lie rounded in the cache
        assert calls[4:] == [torch.bfloat16]


def test_other_indexers_are_refused() -> None:
    torch.manual_seed(0)
    model = deepseek_v4()
    with pytest.raises(UnsupportedError, match="DeepSeek-V4's layers have their own only"):
        enable(model, indexer="fp8")


def test_a_compressor_that_is_not_known_is_refused() -> None:
    torch.manual_seed(0)
    model = deepseek_v4()
    layer = model.model.layers[1].self_attn
    layer.compressor = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"compressor: .* got Linear\. .* knows 5\.17 to"):
        enable(model)
