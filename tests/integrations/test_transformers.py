"""transformers' DeepSeek-V3.2 and GLM-5, tiny and random, with flashdsa against eager attention.

fp32, since in bf16 the two implementations' indexers may pick different keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")

import flashdsa  # noqa: E402
from flashdsa.integrations.transformers import attention, disable, enable, index_keys, indexers  # noqa: E402
from tests.support.tiny_models import BATCH, LENGTH, TOPK, build, error, run, tokens, worst  # noqa: E402

BOTH = pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"], indirect=True)
"""Layers of GLM share an indexer; other tests of it come later."""


@pytest.fixture(params=["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build(request.param)


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
