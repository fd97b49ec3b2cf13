"""Switch a model's DSA layers to flashdsa, and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.integrations.transformers import attention, two_sources
from flashdsa.integrations.transformers.indexers import INDEXERS, require_known
from flashdsa.integrations.transformers.releases import require_parameters, require_version, unknown

EXPAND, MASK_OF_IDS = "expand_kv", "build_attention_mask_from_topk"
"""Methods that give the attention function its keys and values and, of GLM-5.3's, its mask."""
REPLACED = {
    EXPAND: ("kv_nope", "k_rot"),
    MASK_OF_IDS: ("topk_indices", "query_states", "kv_length"),
}
"""Parameters of both."""
_PREVIOUS = "_flashdsa_previous"


def enable(
    model: Any,
    *,
    indexer: str = "model",
    backend: str | tuple[str, str] = "auto",
    deterministic: bool = False,
) -> Any:
    """Have the model's sparse attention computed by flashdsa; nothing else changes.

    Args:
        model: of transformers >= 5.17, with layers like DeepSeek-V3.2's, GLM-5's, GLM-5.3's and
            DeepSeek-V4's (`deepseek_v32`, `glm_moe_dsa`, `glm5_next`, `deepseek_v4`).
        indexer: "model": its own, which holds scores of every head, query and key at once;
            "exact": the same scores for a few queries at a time, and the model's own indexer for
            steps of one token; "fp8": keys and queries quantised
            as DeepSeek serves them, without its Hadamard transform, so that other keys may be
            picked.
        backend, deterministic: of `flashdsa.sparse_mla`.

    Returns:
        The model, changed.

    Raises:
        ArgumentTypeError: `model` is no module.
        UnsupportedError: another transformers, or no such layer in the model.
    """
    _require_module(model)
    if indexer not in ("model", *INDEXERS):
        raise ArgumentValueError(
            f"indexer: expected one of model, {', '.join(INDEXERS)}; got {indexer!r}"
        )
    require_version()
    layers = list(_attentions(model))
    of_two_sources = list(_of_two_sources(model))
    if not layers and not of_two_sources:
        raise unknown(
            f"{type(model).__name__}: found no attention with {EXPAND}, as DeepSeek-V3.2's and "
            "GLM-5's have it in transformers, and none with a window and "
            "entries, as DeepSeek-V4's"
        )
    if of_two_sources and indexer != "model":
        raise UnsupportedError(f"indexer={indexer!r}: DeepSeek-V4's layers have their own only")
    indexers: list[Any] = [
        one for layer in layers if (one := getattr(layer, "indexer", None)) is not None
    ]
    if indexer != "model":
        for one in indexers:
            require_known(one, indexer)
    disable(model)
    attention.register()
    setattr(model, _PREVIOUS, model.config._attn_implementation)
    for layer in layers:
        layer.__dict__[EXPAND] = attention.latent_states
        if hasattr(layer, MASK_OF_IDS):
            layer.__dict__[MASK_OF_IDS] = attention.listed_ids
        layer.__dict__[attention.OPTIONS] = attention.Options(backend, deterministic)
    for one in of_two_sources:
        one.__dict__[attention.OPTIONS] = attention.Options(
            backend, deterministic, two_sources=True
        )
        if one.compressor is not None:
            one.compressor.__dict__["forward"] = partial(two_sources.compress, one)
    for one in indexers if indexer != "model" else []:
        one.__dict__["forward"] = partial(INDEXERS[indexer], one)
    model.set_attn_implementation(attention.NAME)
    return model


def disable(model: Any) -> Any:
    """Undo `enable`; a model that was not enabled stays as it is. Returns the model."""
    _require_module(model)
    previous = model.__dict__.pop(_PREVIOUS, None)
    if previous is None:
        return model
    for one in _of_two_sources(model):
        one.__dict__.pop(attention.OPTIONS, None)
        if one.compressor is not None:
            one.compressor.__dict__.pop("forward", None)
    for layer in _attentions(model):
        for name in (*REPLACED, attention.OPTIONS):
            layer.__dict__.pop(name, None)
        indexer = getattr(layer, "indexer", None)
        if indexer is not None:
            indexer.__dict__.pop("forward", None)
    model.set_attn_implementation(previous)
    return model


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module; got {type(model).__name__}")


def _of_two_sources(model: nn.Module) -> Iterator[Any]:
    """The layers with a window and, most of them, a compressor."""
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4Attention":
            two_sources.require_known(module)
            yield module


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    """The layers whose `expand_kv` latents can take the place of."""
    for module in model.modules():
        if hasattr(type(module), EXPAND) and hasattr(module, "kv_b_proj"):
            for method, parameters in REPLACED.items():
                if hasattr(type(module), method):
                    require_parameters(type(module), method, parameters)
            yield module
