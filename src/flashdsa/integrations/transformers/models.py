"""Switch a model's DSA layers to flashdsa, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.integrations.transformers import attention, two_sources
from flashdsa.integrations.transformers.indexers import INDEXERS, require_known
from flashdsa.integrations.transformers.releases import require_parameters, require_version, unknown
from flashdsa.integrations.transformers.replaced import replace_forward, restore_forward

EXPAND, MASK_OF_IDS = "expand_kv", "build_attention_mask_from_topk"
"""Methods that give the attention function its keys and values and, of GLM-5.3's, its mask."""
REPLACED = {
    EXPAND: ("kv_nope", "k_rot"),
    MASK_OF_IDS: ("topk_indices", "query_states", "kv_length"),
}
"""Parameters of both."""


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
    for layer in layers if indexer != "model" else []:
        if getattr(layer, "indexer", None) is not None:
            require_known(layer.indexer, indexer)
    disable(model)
    attention.register()
    previous = (layers or of_two_sources)[0].config._attn_implementation
    options = attention.Options(previous, backend, deterministic)
    for layer in layers:
        layer.__dict__[attention.OPTIONS] = options
        layer.__dict__[EXPAND] = partial(attention.latent_states, layer)
        if hasattr(layer, MASK_OF_IDS):
            layer.__dict__[MASK_OF_IDS] = partial(attention.listed_ids, layer)
        if indexer != "model" and getattr(layer, "indexer", None) is not None:
            replace_forward(layer.indexer, partial(_select, layer, INDEXERS[indexer]))
    for one in of_two_sources:
        one.__dict__[attention.OPTIONS] = options._replace(two_sources=True)
        if one.compressor is not None:
            replace_forward(one.compressor, partial(_compress, one))
    _request(model, (layers or of_two_sources)[0].config, attention.NAME)
    return model


def disable(model: Any) -> Any:
    """Undo `enable`, which may have got a part of this model or a wrapper of it.

    A model that was not enabled stays as it is.

    Returns:
        The model.
    """
    _require_module(model)
    changed = [one for one in model.modules() if attention.OPTIONS in one.__dict__]
    for layer in changed:
        previous = layer.__dict__.pop(attention.OPTIONS).previous
        for name in REPLACED:
            layer.__dict__.pop(name, None)
        for part in (getattr(layer, "indexer", None), getattr(layer, "compressor", None)):
            if part is not None:
                restore_forward(part)
        if attention.is_active(layer):
            _request(model, layer.config, previous)
    return model


def _select(layer: Any, forward: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """Choose keys by `forward`, or by the indexer's own while the layer has another attention."""
    own = type(layer.indexer).forward
    chosen: Tensor = (forward if attention.is_active(layer) else own)(
        layer.indexer, *arguments, **named
    )
    return chosen


def _compress(layer: Any, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Compress as the attention function wants it, or as the layer's other attention does."""
    if attention.is_active(layer):
        entries: tuple[Tensor, None] = two_sources.compress(layer, *arguments, **named)
        return entries
    own: tuple[Tensor, Tensor | None]
    own = type(layer.compressor).forward(layer.compressor, *arguments, **named)
    return own


def _request(model: Any, config: Any, implementation: str) -> None:
    """Set the attention implementation of the layers with `config`, which may be one of several
    parts of a model: a vision tower keeps its own."""
    parts = [name for name in model.config.sub_configs if getattr(model.config, name) is config]
    model.set_attn_implementation({parts[0]: implementation} if parts else implementation)


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module; got {type(model).__name__}")


def _of_two_sources(model: nn.Module) -> Iterator[Any]:
    """The layers with a window and, most of them, a compressor."""
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4Attention":
            two_sources.require_known(module)
            yield module


def _attentions(model: nn.Module) -> Iterator[Any]:
    """The layers whose `expand_kv` latents can take the place of."""
    for module in model.modules():
        if hasattr(type(module), EXPAND) and hasattr(module, "kv_b_proj"):
            for method, parameters in REPLACED.items():
                if hasattr(type(module), method):
                    require_parameters(type(module), method, parameters)
            yield module
