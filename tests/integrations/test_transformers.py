"""transformers' DeepSeek-V3.2 and GLM-5, tiny and random, with flashdsa against eager attention.

fp32, since in bf16 the two implementations' indexers may pick different keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")

import flashdsa  # noqa: E402
from flashdsa.errors import UnsupportedError  # noqa: E402
from flashdsa.integrations.transformers import (  # noqa: E402
    NAME,
    attention,
    disable,
    enable,
    index_keys,
    indexers,
    releases,
)

BATCH, LENGTH, TOPK, PADDING = 2, 48, 16, 5
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_topk": TOPK,
    "index_head_dim": 128,
    "index_n_heads": 16,  # of few heads scores would often be 0 alike, and ties be broken otherwise
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if kind == "deepseek_v32":  # with yarn, whose mscale changes the logits' factor
        config = transformers.DeepseekV32Config(**SMALL | changes, rope_parameters=YARN)
        return transformers.DeepseekV32ForCausalLM(config).eval()
    layers = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    config = transformers.GlmMoeDsaConfig(**SMALL | layers | changes)
    return transformers.GlmMoeDsaForCausalLM(config).eval()


BOTH = pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"], indirect=True)
"""Layers of GLM share an indexer; other tests of it come later."""


@pytest.fixture(params=["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build(request.param)


def tokens() -> dict[str, Tensor]:
    """Left padding in the second sequence."""
    torch.manual_seed(1)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, :PADDING] = 0
    return {"input_ids": torch.randint(1, 96, (BATCH, LENGTH)), "attention_mask": mask}


def run(model: Any, gradients: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the tokens that are no padding, and every parameter's gradient."""
    model.zero_grad()
    x = tokens()
    with torch.set_grad_enabled(gradients):
        logits = model(**x).logits[x["attention_mask"].bool()]
        if gradients:
            torch.manual_seed(2)
            (logits * torch.randn_like(logits)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm().detach() / expected.detach().norm().clamp_min(1e-30))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(error(got[name], expected[name]) for name in expected)


@BOTH
@pytest.mark.parametrize("indexer", ["model", "exact"])
def test_logits_and_gradients_are_eagers(model: Any, indexer: str) -> None:
    model.set_attn_implementation("eager")
    expected, expected_gradients = run(model)
    assert enable(model, indexer=indexer) is model
    logits, gradients = run(model)
    assert error(logits, expected) < 3e-6
    assert worst(gradients, expected_gradients) < 1e-5
    disable(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(run(model, gradients=False)[0], expected)


@pytest.mark.parametrize("indexer", ["model", "exact", "fp8"])
def test_a_step_of_training_runs_under_autocast(model: Any, indexer: str) -> None:
    enable(model.train(), indexer=indexer)
    x = tokens()
    for holes in (False, True):
        if holes:
            x["attention_mask"][0, 3::7] = 0
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**x, labels=x["input_ids"]).loss
        loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_selection_matters_and_is_the_indexers(model: Any) -> None:
    """With other ids the logits are others: what is compared above is sparse attention."""
    enable(model)
    expected = run(model, gradients=False)[0]
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 3
    assert error(run(model, gradients=False)[0], expected) > 1e-2


@BOTH
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_are_eagers(model: Any, cache: str) -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    model.set_attn_implementation("eager")
    expected = model.generate(**tokens(), **settings)
    for indexer in ("model", "exact"):
        assert torch.equal(
            enable(model, indexer=indexer).generate(**tokens(), **settings), expected
        )


def test_gradient_checkpointing_changes_nothing(model: Any) -> None:
    enable(model.train())
    _, expected = run(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert worst(run(model)[1], expected) < 1e-6


def test_compile_without_graph_breaks_changes_nothing() -> None:
    model = enable(build("deepseek_v32", num_hidden_layers=1))
    expected = run(model, gradients=False)[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(run(compiled, gradients=False)[0], expected) < 1e-6


@pytest.mark.parametrize("way", ["shared keys", "in chunks"])
def test_an_exact_indexer_picks_the_models_keys(
    model: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the mask forbids is -1 there and a future position here."""
    monkeypatch.setattr(indexers, "CHUNK_ELEMENTS", BATCH * 16 * LENGTH * 7)
    by_prefill = count_selected(monkeypatch)
    if way == "in chunks":
        monkeypatch.setattr(indexers, "is_served", lambda *_, **__: False)
    indexer = model.model.layers[0].self_attn.indexer
    x = tokens()
    hidden, resid = torch.randn(BATCH, LENGTH, 64), torch.randn(BATCH, LENGTH, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & x["attention_mask"][:, None].bool()
    theirs = indexer(hidden, resid, angles, mask, None)
    ours = indexers.exact_forward(indexer, hidden, resid, angles, mask)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    future = ~mask.gather(-1, theirs.long())
    assert future.any(), "no row with fewer keys than topk"
    picked = [set(row.tolist()) - {-1} for row in ours.flatten(0, 1)]
    allowed = theirs.masked_fill(future, -1)
    assert by_prefill == ([BATCH * LENGTH] if way == "shared keys" else [])
    assert picked == [set(row.tolist()) - {-1} for row in allowed.flatten(0, 1)]


def test_an_exact_indexer_takes_masks_with_holes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_prefill = count_selected(monkeypatch)
    indexer = model.model.layers[0].self_attn.indexer
    hidden, resid = torch.randn(BATCH, LENGTH, 64), torch.randn(BATCH, LENGTH, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    mask = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:, :, 20] = False
    assert not (indexers.exact_forward(indexer, hidden, resid, angles, mask) == 20).any()
    assert by_prefill == [BATCH * LENGTH]
    mask[:, 5::7, 3] = False  # which other queries see
    assert not (indexers.exact_forward(indexer, hidden, resid, angles, mask)[:, 5::7] == 3).any()
    assert by_prefill == [BATCH * LENGTH]


def count_selected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call selects for by `dsa_topk_prefill` from now on."""
    counts: list[int] = []

    def select(q_index: Tensor, *others: Any, **options: Any) -> None:
        counts.append(len(q_index))
        flashdsa.dsa_topk_prefill(q_index, *others, **options)

    monkeypatch.setattr(indexers, "dsa_topk_prefill", select)
    return counts


@pytest.mark.parametrize("length", [LENGTH, TOPK - 1])
def test_one_token_takes_the_models_own_choice(
    model: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more keys than topk are seen; no other choice is the host's work then."""
    called: list[int] = []
    kind = type(model.model.layers[0].self_attn.indexer)
    forward = kind.forward

    def counted(self: Any, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        called.append(hidden_states.shape[1])
        chosen: Tensor = forward(self, hidden_states, *others, **named)
        return chosen

    steps = {}
    for indexer in ("eager", "exact"):
        if indexer == "exact":
            enable(model, indexer=indexer)
            monkeypatch.setattr(kind, "forward", wraps(forward)(counted))
        else:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            x = {name: value[:, -length:] for name, value in tokens().items()}
            cache = model(**x, use_cache=True).past_key_values
            for name, value in x.items():
                x[name] = value[:, :1] if name == "input_ids" else pad(value, (0, 1), value=1)
            steps[indexer] = model(**x, past_key_values=cache).logits
    layers = [one for one in model.model.layers if one.self_attn.indexer is not None]
    assert called == [1] * (len(layers) if length + 1 > TOPK else 0)
    assert error(steps["exact"], steps["eager"]) < 3e-6


def test_an_fp8_indexer_picks_nearly_the_models_keys(model: Any) -> None:
    """And of each query's own keys only; a query that sees too few gets them all."""
    indexer = model.model.layers[0].self_attn.indexer
    x = tokens()
    hidden, resid = torch.randn(BATCH, LENGTH, 64), torch.randn(BATCH, LENGTH, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & x["attention_mask"][:, None].bool()
    exact = indexers.exact_forward(indexer, hidden, resid, angles, mask)
    fp8 = indexers.fp8_forward(indexer, hidden, resid, angles, mask)
    same = total = 0
    for mine, theirs, visible in zip(
        fp8.flatten(0, 1).tolist(), exact.flatten(0, 1).tolist(), mask.flatten(0, 1), strict=True
    ):
        picked, wanted = set(mine) - {-1}, set(theirs) - {-1}
        assert len(picked) == len(wanted) == min(TOPK, int(visible.sum()))
        assert all(visible[t] for t in picked)
        same, total = same + len(picked & wanted), total + len(wanted)
    assert same > 0.9 * total


@BOTH
def test_an_fp8_indexer_serves_prefill_and_decode(model: Any) -> None:
    """Decoding with a cache gives what one pass over all tokens gives."""
    enable(model, indexer="fp8")
    out = model.generate(**tokens(), max_new_tokens=4, do_sample=False)
    mask = pad(tokens()["attention_mask"], (0, 4), value=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=out, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(logits[:, LENGTH - 1 : -1].argmax(-1), out[:, LENGTH:])


def count_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each call quantises from now on."""
    counts: list[int] = []

    def write(k: Tensor, slots: Tensor, cache: Tensor) -> None:
        counts.append(len(k))
        flashdsa.write_index_k_cache(k, slots, cache)

    monkeypatch.setattr(index_keys, "write_index_k_cache", write)
    return counts


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_decoded_token_quantises_its_own_key_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the cache has no room any more; and the tokens are those of a pass without a cache."""
    model = enable(build("deepseek_v32"), indexer="fp8")
    counts = count_written(monkeypatch)
    monkeypatch.setattr(index_keys, "MORE_TOKENS", 3)
    settings: dict[str, Any] = {"cache_implementation": kind, "disable_compile": True}
    out = model.generate(**tokens(), max_new_tokens=20, do_sample=False, **settings)
    layers, steps = len(model.model.layers), 19
    assert len(counts) == layers * (1 + steps)
    longer = [count for count in counts[layers:] if count != BATCH]
    # 48 tokens and room for 12 are a page of 64, which is full behind the 16th step.
    assert longer == ([BATCH * 65] * layers if kind == "dynamic" else [])
    mask = pad(tokens()["attention_mask"], (0, 20), value=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=out, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(logits[:, LENGTH - 1 : -1].argmax(-1), out[:, LENGTH:])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_of_a_draft_only_the_new_tokens_are_quantised(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind rejected ones, whose places are written again: as one pass without a cache."""
    model = enable(build("deepseek_v32"), indexer="fp8")
    config, x = model.config, tokens()
    cache = (
        transformers.DynamicCache(config=config)
        if kind == "dynamic"
        else transformers.StaticCache(config=config, max_cache_len=LENGTH + 16)
    )
    mask = pad(x["attention_mask"], (0, 9), value=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    draft = torch.randint(1, 96, (BATCH, 9))
    whole = torch.cat([x["input_ids"], draft], dim=1)
    with torch.no_grad():
        expected = model(input_ids=whole, attention_mask=mask, position_ids=positions).logits
        model(**x, past_key_values=cache, position_ids=positions[:, :LENGTH])
        counts = count_written(monkeypatch)

        def follow(given: Tensor, first: int) -> Tensor:
            here = slice(LENGTH + first, LENGTH + first + given.shape[1])
            return model(
                input_ids=given,
                attention_mask=mask[:, : here.stop],
                position_ids=positions[:, here],
                past_key_values=cache,
            ).logits

        found = [follow(draft[:, :3], 0)]
        if kind == "dynamic":
            follow(draft[:, 5:], 3)  # other tokens than the ones that follow, all rejected
            cache.crop(-4)
        found += [follow(draft[:, 3:8], 3), follow(draft[:, 8:], 8)]
    steps = [3, 4, 5, 1] if kind == "dynamic" else [3, 5, 1]
    assert counts == [BATCH * step for step in steps for _ in model.model.layers]
    assert error(torch.cat(found, dim=1), expected[:, LENGTH:]) < 1e-5


def test_drafts_from_the_prompt_change_no_generated_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(build("deepseek_v32"), indexer="fp8")
    x = {"input_ids": torch.randint(1, 96, (1, 12)).repeat(1, 4)}
    settings = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**x, **settings)
    counts = count_written(monkeypatch)
    assert torch.equal(model.generate(**x, **settings, prompt_lookup_num_tokens=3), expected)
    layers = len(model.model.layers)
    assert counts[:layers] == [48 + 3] * layers  # the prompt and the first draft
    assert max(counts[layers:]) <= 4 < sum(counts[layers:])


@pytest.mark.parametrize("change", ["reorder_cache", "write"])
def test_a_cache_that_others_changed_is_quantised_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(build("deepseek_v32"), indexer="fp8")
    x = {"input_ids": tokens()["input_ids"]}
    with torch.no_grad():
        cache = model(**x, use_cache=True).past_key_values
        counts = count_written(monkeypatch)
        model(input_ids=x["input_ids"][:, :1], past_key_values=cache)
        assert set(counts) == {BATCH}
        if change == "reorder_cache":
            cache.reorder_cache(torch.tensor([1, 0]))
        else:
            cache.layers[0].indexer_keys.mul_(0.5)
        counts.clear()
        model(input_ids=x["input_ids"][:, :1], past_key_values=cache)
    changed = 1 if change == "write" else len(model.model.layers)
    assert counts == [BATCH * (LENGTH + 2)] * changed + [BATCH] * (len(counts) - changed)


def test_a_sink_takes_weight_and_has_a_gradient() -> None:
    """As models of this kind with sinks pass it: s_aux."""
    layer = enable(build("deepseek_v32")).model.layers[0].self_attn
    query, latent = torch.randn(1, 4, 6, 40), torch.randn(1, 1, 6, 32)
    key, value = attention.latent_states(layer, latent, torch.randn(1, 1, 6, 16))
    ids = torch.arange(6, dtype=torch.int32).expand(1, 6, 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    sink = torch.full((4,), 1.5, requires_grad=True)

    def attend(s_aux: Tensor | None) -> Tensor:
        return attention.dsa_attention(
            layer, query, key, value, mask, scaling=0.2, indices=ids, s_aux=s_aux
        )[0]

    none = attend(None)
    assert torch.equal(attend(torch.full((4,), -torch.inf)), none)
    with_sink = attend(sink)
    ratio = with_sink / none
    assert (ratio < 1).all() and (ratio > 0).all()
    with_sink.sum().backward()
    assert sink.grad is not None and sink.grad.abs().min() > 0


def test_an_additive_mask_is_a_boolean_one() -> None:
    ids = torch.tensor([[[0, 2], [1, 0]], [[2, 1], [0, -1]]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.bool).expand(2, 1, -1, -1)
    added = torch.zeros(2, 1, 2, 3).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = [[0, -1], [1, 0], [-1, -1], [3, -1]]
    assert attention._slots(ids, mask, 3).tolist() == expected
    assert attention._slots(ids, added, 3).tolist() == expected


# Traps


def test_the_name_does_not_make_transformers_look_on_the_hub() -> None:
    assert "flash" not in NAME


@BOTH
def test_a_model_that_was_not_enabled_is_computed_as_without_flashdsa(model: Any) -> None:
    """A trainer loads a reference model by the implementation's name of the trained one."""
    model.set_attn_implementation("sdpa")
    expected, expected_gradients = run(model)
    attention.register()
    model.set_attn_implementation(NAME)
    logits, gradients = run(model)
    assert torch.equal(logits, expected)
    assert worst(gradients, expected_gradients) == 0
    disable(model)  # nothing to undo


@pytest.mark.parametrize("indexer", ["model", "fp8"])
def test_another_implementation_on_an_enabled_model_is_its_own(model: Any, indexer: str) -> None:
    model.set_attn_implementation("sdpa")
    expected = run(model, gradients=False)[0]
    enable(model, indexer=indexer)
    model.set_attn_implementation("sdpa")
    assert torch.equal(run(model, gradients=False)[0], expected)
    model.set_attn_implementation(NAME)
    assert error(run(model, gradients=False)[0], expected) < 1
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_of_an_enabled_model_is_enabled_and_its_own(model: Any) -> None:
    enable(model, indexer="exact")
    expected = run(model, gradients=False)[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(other, gradients=False)[0], expected)


def test_enabling_twice_and_disabling_once_gives_the_first_back(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    enable(enable(model), indexer="exact", deterministic=True)
    disable(model)
    assert model.config._attn_implementation == "sdpa"
    layer = model.model.layers[0].self_attn
    assert not {"expand_kv", attention.OPTIONS} & set(layer.__dict__)
    assert "forward" not in layer.indexer.__dict__


def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("5.17.0", "6.0.0.dev0", "5.16.2"):
        monkeypatch.setattr(releases, "version", lambda _, found=found: found)
        refused = found == "5.16.2"
        said = r"cache\. transformers 5\.16\.2 is installed; flashdsa knows 5\.17 to 5\.24"
        with pytest.raises(UnsupportedError, match=said) if refused else nullcontext():
            releases.require_version()


@pytest.mark.parametrize("indexer", ["exact", "fp8"])
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_goes_by_its_names_of_all_releases(indexer: str, name: str) -> None:
    model = enable(build("deepseek_v32"), indexer=indexer)
    cache = transformers.DynamicCache(config=model.config)
    hidden, resid = torch.randn(1, 3, 64), torch.randn(1, 3, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(3)[None])
    mask = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    model.model.layers[1].self_attn.indexer(hidden, resid, angles, mask, None, **{name: cache})
    assert cache.layers[1].indexer_keys.shape == (1, 3, 128)


@pytest.mark.parametrize("method", ["expand_kv", "indexer.forward"])
def test_other_parameters_are_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which releases are known."""
    model = build("deepseek_v32")
    owner, _, name = f"model.layers.0.self_attn.{method}".rpartition(".")
    kind = type(model.get_submodule(owner))
    monkeypatch.setattr(kind, name, lambda self, hidden_states: hidden_states)
    said = rf"{kind.__name__}\.{name}: expected .* got hidden_states.* knows 5\.17 to 5\.24"
    with pytest.raises(UnsupportedError, match=said):
        enable(model, indexer="exact")


@pytest.mark.parametrize("switch", [enable, disable])
def test_what_is_no_model_is_refused(switch: Callable[[Any], Any]) -> None:
    for wrong in (None, "deepseek-ai/DeepSeek-V3.2"):
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got "):
            switch(wrong)


def test_models_without_such_layers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear: found no attention"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="indexer: expected one of model, exact, fp8"):
        enable(build("deepseek_v32"), indexer="fast")
    narrow = build("deepseek_v32", index_head_dim=64)
    with pytest.raises(NotImplementedError, match="fp8': expected index_head_dim 128; got 64"):
        enable(narrow, indexer="fp8")
    enable(narrow, indexer="exact")


class Adapted(torch.nn.Module):
    """Stands for an adapter's module around the one that it adapts."""

    def __init__(self, base: torch.nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.down = torch.nn.Linear(base.in_features, 3, bias=False)
        self.up = torch.nn.Linear(3, base.out_features, bias=False)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.up(self.down(self.dropout(x)))
        return added


def replace_module(layer: Any) -> None:
    layer.kv_b_proj = Adapted(layer.kv_b_proj)


def replace_forward_of_instance(layer: Any) -> None:
    projection, added = layer.kv_b_proj, torch.randn(layer.kv_b_proj.weight.shape) * 0.2
    forward = projection.forward
    projection.forward = lambda x: forward(x) + x @ added.T


def scale_by_a_hook(layer: Any) -> None:
    layer.kv_b_proj.register_forward_hook(lambda module, given, out: out * 1.5)


@pytest.mark.parametrize("change", [replace_module, replace_forward_of_instance, scale_by_a_hook])
def test_what_changes_the_up_projection_has_its_effect(
    model: Any, change: Callable[[Any], None]
) -> None:
    plain = run(model, gradients=False)[0]
    torch.manual_seed(4)
    for layer in model.model.layers:
        change(layer.self_attn)
    model.set_attn_implementation("eager")
    expected, expected_gradients = run(model)
    assert error(expected, plain) > 0.05
    logits, gradients = run(enable(model))
    assert error(logits, expected) < 3e-6
    assert worst(gradients, expected_gradients) < 1e-5


def test_an_up_projection_that_is_no_product_is_refused(model: Any) -> None:
    enable(model.train())
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = Adapted(layer.kv_b_proj, dropout=0.1)
    with pytest.raises(NotImplementedError, match="kv_b_proj: its adapter drops elements"):
        run(model, gradients=False)
    run(model.eval(), gradients=False)
    layer.kv_b_proj = torch.nn.Linear(32, 4 * 44)
    with pytest.raises(NotImplementedError, match="kv_b_proj: it has a bias"):
        run(model, gradients=False)


@pytest.mark.parametrize(
    "arguments",
    [{"dropout": 0.1}, {"sliding_window": 128}, {"softcap": 30.0}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_change_the_meaning_are_refused(arguments: dict[str, Any]) -> None:
    dropout = arguments.pop("dropout", 0.0)
    with pytest.raises(UnsupportedError, match="dropout" if dropout else next(iter(arguments), "")):
        attention._refuse(dropout, {"use_cache": True, "softcap": None, **arguments})


def test_arguments_that_trainers_add_change_nothing(model: Any) -> None:
    """Of packing, context parallelism and models with images; sdpa has no weights to return."""
    enable(model)
    x = {"input_ids": tokens()["input_ids"][:1]}
    ends = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    added = {
        "position_ids": torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 28,
        "max_length_k": 28,
        "shift_labels": x["input_ids"],
        "mm_token_type_ids": torch.zeros_like(x["input_ids"]),
        "a_keyword_of_the_next_release": 1,
    }
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = model(**x, **added, use_cache=False).logits
        model.set_attn_implementation(NAME)
        found = model(**x, **added, use_cache=False, output_attentions=True)
    assert error(found.logits, expected) < 3e-6
    assert not found.attentions or found.attentions[0] is None


class FormerForward:
    """A forward on the instance, as tracers and offloading hooks leave it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return type(self.module).forward(self.module, *arguments, **named)


@pytest.mark.parametrize("indexer", ["model", "exact"])
def test_disabling_gives_back_what_enabling_took(model: Any, indexer: str) -> None:
    """On whichever object either is called, with a forward that the indexer had."""
    model.set_attn_implementation("sdpa")
    former = model.model.layers[0].self_attn.indexer
    former.forward = FormerForward(former)
    expected = run(model, gradients=False)[0]
    calls = former.forward.calls
    for first, second in ((model, model.model), (model.model, model)):
        enable(first, indexer=indexer)
        run(model, gradients=False)
        disable(second)
        assert model.config._attn_implementation == "sdpa"
        former.forward.calls = 0
        assert torch.equal(run(model, gradients=False)[0], expected)
        assert former.forward.calls == calls == 1
