"""`enable` and `disable`: whose attention a model has, what is refused, what changes a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")

from flashdsa.errors import UnsupportedError  # noqa: E402
from flashdsa.integrations.transformers import NAME, attention, disable, enable, releases  # noqa: E402
from tests.support.tiny_models import LENGTH, build, error, run, tokens, worst  # noqa: E402

BOTH = pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"], indirect=True)
"""Layers of GLM share an indexer; other tests of it come later."""


@pytest.fixture(params=["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build(request.param)


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
