"""The attention function that transformers calls: absorbed queries, latents as keys, and ids."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.transformers.replaced import is_plain
from flashdsa.integrations.transformers.two_sources import attend
from flashdsa.ops.attention import sparse_mla

NAME = "dsa"
"""Name of the attention implementation. NOTE: a name with "flash" in it makes transformers look for
a kernel on the hub."""
OPTIONS = "_flashdsa"
"""Attribute of an attention module that `enable` has changed."""

VISIBLE = "_flashdsa_visible"
"""Attribute of ids that were picked among what the mask allows: it need not be asked again."""

_CHANGES_THE_RESULT = ("head_mask", "position_bias", "sliding_window", "softcap")
"""Arguments that other attention functions of transformers compute with and this one does not.
What else a model or a trainer hands on changes nothing here: the mask and the ids say what each
query sees."""


class Options(NamedTuple):
    """Options that `enable` got.

    Attributes:
        previous: attention implementation of the layer before.
        backend: of `flashdsa.sparse_mla`.
        deterministic: of its gradients.
        two_sources: the layer has a window and entries, see `two_sources.py`.
    """

    previous: str
    backend: str | tuple[str, str] = "auto"
    deterministic: bool = False
    two_sources: bool = False


def register() -> None:
    """Make "dsa" known to transformers, as an attention implementation and as a kind of mask.

    A model needs `enable` besides: it hands over latents instead of expanded keys.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, dsa_attention)
    # Without a mask of its own name the models get None, and take it apart.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def is_active(layer: Any) -> bool:
    """Return whether the layer calls `dsa_attention`: it does not while its model has another
    attention implementation."""
    name: str = layer.config._attn_implementation
    return name == NAME


def latent_states(layer: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a layer's `expand_kv`: return the latents themselves.

    Args:
        kv_nope: (B, 1, T, rank). k_rot: (B, 1, T, rope), with rotary position.

    Returns:
        keys (B, 1, T, rank + rope) and values (B, 1, T, rank).
    """
    if not is_active(layer):
        expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, kv_nope, k_rot)
        return expanded
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope


def listed_ids(
    layer: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int
) -> Tensor | None:
    """Replace a layer's `build_attention_mask_from_topk`: return the ids themselves, which the
    model hands on in the place of a mask. Its indexer has left out what a query does not see."""
    if not is_active(layer):
        build = type(layer).build_attention_mask_from_topk
        mask: Tensor | None = build(layer, topk_indices, query_states, kv_length)
        return mask
    return marked_visible(topk_indices)


def dsa_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Sparse attention as transformers calls it.

    A layer that `enable` has not changed is computed as without flashdsa. Trainers make such
    models: they load a reference model by the name of the trained one's implementation.

    Args:
        module: the attention.
        query: (B, H, S, nope + rope). key, value: what `latent_states` returned.
        attention_mask: (B, 1, S, T) bool, True where a query may look, or added to logits.
        scaling: factor of the logits. indices: (B, S, topk), positions that the indexer picked.
        s_aux: (H,), a sink's logit.

    Returns:
        (B, S, H, v_head_dim), and None in the place of weights.

    Raises:
        UnsupportedError: an argument asks for something else.
    """
    options: Options | None = module.__dict__.get(OPTIONS)
    if options is None:
        own = query, key, value, attention_mask, indices, s_aux
        return as_without_flashdsa(module, *own, scaling=scaling, dropout=dropout, **others)
    if options.two_sources:
        window = others.pop("sliding_window")
        if others.get("output_attentions"):
            raise UnsupportedError(f"output_attentions: attn_implementation={NAME!r} has none")
        _refuse(dropout, others)
        operands = query, key, attention_mask, s_aux
        return attend(module, operands, window, scaling, options.backend, options.deterministic)
    if indices is None and attention_mask is not None and attention_mask.dtype == torch.int32:
        indices = attention_mask  # see `listed_ids`
    if indices is None:
        raise UnsupportedError(f"indices: attn_implementation={NAME!r} needs the indexer's choice")
    _refuse(dropout, others)
    batch, num_heads, num_queries, _ = query.shape
    num_keys, width = key.shape[2], key.shape[3]
    rank, nope = value.shape[3], query.shape[3] - (width - value.shape[3])
    weight = up_projection(module.kv_b_proj, key).view(num_heads, -1, rank)
    # By heads: (H, B * S, nope) times (H, nope, rank).
    latent = query[..., :nope].transpose(0, 1).flatten(1, 2) @ weight[:, :nope]
    rotated = query[..., nope:].transpose(1, 2).flatten(0, 1)
    out = sparse_mla(
        torch.cat([latent.transpose(0, 1), rotated], dim=-1),
        key.reshape(batch * num_keys, width),
        _slots(indices, attention_mask, num_keys),
        d_v=rank,
        sm_scale=scaling,
        attn_sink=None if s_aux is None else s_aux.float(),
        deterministic=options.deterministic,
        backend=options.backend,
    )
    values = out.transpose(0, 1) @ weight[:, nope:].transpose(1, 2)
    return values.transpose(0, 1).unflatten(0, (batch, num_queries)), None


def _slots(indices: Tensor, attention_mask: Tensor, num_keys: int) -> Tensor:
    """(B * S, topk) rows of all batches' keys; -1 where the mask forbids what the indexer picked.

    The best of masked scores are positions of the future and of padding where there are too few
    others.
    """
    batch = len(indices)
    if _is_visible(indices):
        if batch == 1:
            return indices.flatten(0, 1)
        allowed = indices >= 0
    else:
        mask = attention_mask[:, 0].expand(batch, -1, -1)
        allowed = mask.gather(-1, indices.clamp_min(0).long())
        allowed = allowed if allowed.dtype == torch.bool else allowed >= 0
        if batch > 1:
            allowed = allowed & (indices >= 0)
    slots = indices
    if batch > 1:
        first = torch.arange(batch, dtype=torch.int32, device=indices.device) * num_keys
        slots = indices + first[:, None, None]
    return torch.where(allowed, slots, -1).flatten(0, 1)


def marked_visible(indices: Tensor) -> Tensor:
    """The ids, which no mask forbids; the attention will not hold them against it."""
    if not torch.compiler.is_compiling():
        setattr(indices, VISIBLE, True)
    return indices


def _is_visible(indices: Tensor) -> bool:
    return not torch.compiler.is_compiling() and getattr(indices, VISIBLE, False)


def up_projection(projection: Any, latents: Tensor) -> Tensor:
    """Return (H * (nope + v), rank), the weight that expands latents, with its gradient.

    It is multiplied into the queries. Where calling the module does more than a product with its
    weight (an adapter, 4-bit codes, hooks, a weight that is elsewhere until the call), the product
    with the identity is the weight.

    Args:
        latents: (..., rank), their dtype and device.

    Raises:
        UnsupportedError: the module adds a bias, or drops elements at random.
    """
    if any(getattr(one, "bias", None) is not None for one in projection.modules()):
        raise UnsupportedError("kv_b_proj: it has a bias, which no product with a weight adds")
    if is_plain(projection, torch.nn.Linear):
        weight: Tensor = projection.weight
        return weight
    drops = (one for one in projection.modules() if isinstance(one, torch.nn.Dropout))
    if projection.training and any(one.p for one in drops):
        raise UnsupportedError(
            "kv_b_proj: its adapter drops elements at random, which no weight does; set the "
            "adapter's dropout to 0, or leave kv_b_proj out of its target modules"
        )
    rank = projection.in_features
    identity = torch.eye(rank, dtype=latents.dtype, device=latents.device)
    found: Tensor = projection(identity)
    return found.T


def as_without_flashdsa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    indices: Tensor | None,
    s_aux: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer that `enable` has not changed: by torch's attention, or by the model's own
    function where that has sinks.

    Args: of `dsa_attention`; query, key, value: (B, H, S or T, D), expanded.
    """
    from transformers import AttentionInterface

    if indices is not None and attention_mask is not None:
        chosen = torch.zeros_like(attention_mask, dtype=torch.bool)
        chosen = chosen.expand(len(query), -1, -1, -1).scatter(-1, indices[:, None].long(), True)
        if attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & chosen
        else:
            smallest = torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(~chosen, smallest)
    given = module, query, key, value
    if s_aux is None:
        result: tuple[Tensor, Tensor | None]
        result = AttentionInterface()["sdpa"](*given, attention_mask, **others)
        return result
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        smallest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, smallest
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    result = eager(*given, attention_mask, s_aux=s_aux, **others)
    return result


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(f"attention_dropout={dropout}: flashdsa's attention has no dropout")
    for name in _CHANGES_THE_RESULT:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: attn_implementation={NAME!r} does not serve it")
