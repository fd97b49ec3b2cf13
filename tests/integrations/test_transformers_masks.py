"""Models of transformers whose mask is not plainly causal: packed, padded, in chunks, with holes.

Each is compared with eager where every key is chosen, so that a wrong key shows, and where
choosing matters with the same tokens alone.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")

from flashdsa.integrations.transformers import enable, index_keys  # noqa: E402
from tests.support.tiny_models import build, error  # noqa: E402

ALL = 64
"""Keys to choose: more than any sequence here has."""


def pair(index_topk: int = ALL) -> tuple[Any, Any]:
    """Return one model twice: with eager attention, and enabled with fp8."""
    eager = build("deepseek_v32", index_topk=index_topk)
    eager.set_attn_implementation("eager")
    return eager, enable(build("deepseek_v32", index_topk=index_topk), indexer="fp8")


def random_tokens(*shape: int) -> Tensor:
    torch.manual_seed(3)
    return torch.randint(1, 96, shape)


@pytest.fixture(params=[32, 2], ids=["by rows", "by shared keys"])
def few_queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of choosing for calls of several tokens."""
    from flashdsa.integrations.transformers import indexers

    monkeypatch.setattr(indexers, "FEW_QUERIES", request.param)


@pytest.mark.usefixtures("few_queries")
def test_packed_documents_see_only_themselves() -> None:
    lengths = [7, 20, 13]
    ids = random_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    eager, fast = pair()
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        assert error(fast(**arguments).logits, eager(**arguments).logits) < 3e-6
        _, fast = pair(index_topk=8)
        packed = fast(**arguments).logits.split(lengths, dim=1)
        for document, found in zip(ids.split(lengths, dim=1), packed, strict=True):
            assert error(found, fast(input_ids=document, use_cache=False).logits) < 3e-6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.usefixtures("few_queries")
def test_steps_after_padding_are_eagers(side: str, hole: bool) -> None:
    """A padded prompt, three single tokens, then a draft of three; also with a hole in the mask."""
    prompt, lengths = 12, (12, 9)
    mask = torch.ones(2, prompt + 6, dtype=torch.int64)
    padding = prompt - lengths[1]
    mask[1, :padding] = 0 if side == "left" else 1
    mask[1, lengths[1] : prompt] = 0 if side == "right" else 1
    if hole:
        mask[0, 4] = 0
    ids, positions = random_tokens(2, prompt + 6), (mask.cumsum(1) - 1).clamp_min(0)
    found = {}
    for name, model in zip(("eager", "fp8"), pair(), strict=True):
        cache, parts = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            for first, last in ((0, 12), (12, 13), (13, 14), (14, 15), (15, 18)):
                logits = model(
                    input_ids=ids[:, first:last],
                    attention_mask=mask[:, :last],
                    position_ids=positions[:, first:last],
                    past_key_values=cache,
                ).logits
                parts.append(logits[mask[:, first:last].bool()])
        found[name] = torch.cat(parts)
    assert error(found["fp8"], found["eager"]) < 3e-6


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_in_chunks_whose_first_is_padding(kind: str) -> None:
    """Rows of 48 with 20 of padding on the left, 16 tokens a call."""
    ids, mask = random_tokens(2, 48), torch.ones(2, 48, dtype=torch.int64)
    mask[1, :20] = 0
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "prefill_chunk_size": 16,
        "cache_implementation": kind,
        "disable_compile": True,
    }
    eager, fast = pair()
    arguments = {"input_ids": ids, "attention_mask": mask}
    expected = eager.generate(**arguments, **settings)
    assert torch.equal(fast.generate(**arguments, **settings), expected)


def test_a_static_cache_that_is_reset_forgets_its_padding() -> None:
    """In inference mode no version tells that the cache was written."""
    found = []
    for model in pair():
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        with torch.inference_mode():
            for padding in ((0, 3), (5, 0)):
                cache.reset()
                mask = torch.ones(2, 14, dtype=torch.int64)
                for row, count in enumerate(padding):
                    mask[row, :count] = 0
                ids, positions = random_tokens(2, 14), (mask.cumsum(1) - 1).clamp_min(0)
                for first, last in ((0, 12), (12, 13), (13, 14)):
                    logits = model(
                        input_ids=ids[:, first:last],
                        attention_mask=mask[:, :last],
                        position_ids=positions[:, first:last],
                        past_key_values=cache,
                    ).logits
                    found.append(logits[mask[:, first:last].bool()])
    half = len(found) // 2
    for eager, fast in zip(found[:half], found[half:], strict=True):
        assert error(fast, eager) < 3e-6


def test_a_key_that_some_queries_skip_is_chosen_exactly() -> None:
    """The mask of one's own leaves later queries a hole: fp8 does as "exact" does."""
    ids = random_tokens(1, 40)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    mask[..., 30:, 5:9] = False
    found = []
    for model in pair():
        cache = transformers.DynamicCache(config=model.config)
        additive = torch.zeros(1, 1, 40, 40).masked_fill(~mask, torch.finfo(torch.float32).min)
        with torch.no_grad():
            prompt = model(input_ids=ids, attention_mask=additive, past_key_values=cache).logits
            step = model(input_ids=ids[:, :1], past_key_values=cache).logits
        found.append(torch.cat([prompt, step], dim=1))
    assert error(found[1], found[0]) < 3e-6


@pytest.mark.parametrize("indexer", ["exact", "fp8"])
def test_the_host_waits_once_per_model_call(indexer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of layers; the CPU backend's own looks at values do not count."""
    waits: list[str] = []
    for name in ("__bool__", "tolist", "item"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, original: Any = original) -> Any:
            code = sys._getframe(1).f_code
            if "integrations/transformers" in code.co_filename:
                waits.append(code.co_name)
            return original(self)

        monkeypatch.setattr(Tensor, name, counted)
    model = enable(build("deepseek_v32", num_hidden_layers=4), indexer=indexer)
    cache = transformers.DynamicCache(config=model.config)
    waited = []
    with torch.no_grad():
        for first, last in ((0, 40), (40, 41), (41, 44)):
            waits.clear()
            mask = torch.ones(1, 1, last - first, last, dtype=torch.bool).tril(first)
            model(random_tokens(1, 44)[:, first:last], mask, past_key_values=cache)
            waited.append(list(waits))
    shape, numbers = "_read_shape", "agrees_with"
    expected = [[shape], [], [shape]]
    if indexer == "fp8":
        expected = [[shape], [numbers], [shape, numbers]]
    assert waited == expected


def test_a_step_frees_what_the_one_before_numbered() -> None:
    """A long generation holds the numbers of its last calls only."""
    model = enable(build("deepseek_v32"), indexer="fp8")
    alive: list[weakref.ref[Any]] = []
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for first, last in ((0, 20), *((n, n + 1) for n in range(20, 26))):
            model(random_tokens(1, 26)[:, first:last], past_key_values=cache)
            kept = getattr(cache.layers[0], index_keys.ATTRIBUTE)
            alive.append(weakref.ref(kept.seen))
    assert sum(one() is not None for one in alive) <= 2
