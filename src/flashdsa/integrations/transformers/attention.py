"""The attention function that transformers calls: absorbed queries, latents as keys, and ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.transformers.two_sources import attend
from flashdsa.ops.attention import sparse_mla

NAME = "dsa"
"""Name of the attention implementation. NOTE: a name with "flash" in it makes transformers look for
a kernel on the hub."""
OPTIONS = "_flashdsa"
"""Attribute of an attention module that `enable` has changed."""

VISIBLE = "_flashdsa_visible"
"""Attribute of ids that were picked among what the mask allows: it need not be asked again."""

_WITHOUT_MEANING_HERE = (
    "cache_position",
    "input_ids",
    "is_causal",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
)
"""Arguments that models pass on to the attention and that change nothing in it: the mask and the
ids say what each query sees."""


class Options(NamedTuple):
    """Options that `enable` got.

    Attributes:
        backend: of `flashdsa.sparse_mla`.
        deterministic: of its gradients.
        two_sources: the layer has a window and entries, see `two_sources.py`.
    """

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


def latent_states(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a module's `expand_kv`: return the latents themselves.

    Args:
        kv_nope: (B, 1, T, rank). k_rot: (B, 1, T, rope), with rotary position.

    Returns:
        keys (B, 1, T, rank + rope) and values (B, 1, T, rank).
    """
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope


def listed_ids(topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Replace a module's `build_attention_mask_from_topk`: return the ids themselves, which the
    model hands on in the place of a mask. Its indexer has left out what a query does not see."""
    del query_states, kv_length
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
) -> tuple[Tensor, None]:
    """Sparse attention as transformers calls it.

    Args:
        module: the attention, which `enable` has changed.
        query: (B, H, S, nope + rope). key, value: what `latent_states` returned.
        attention_mask: (B, 1, S, T) bool, True where a query may look, or added to logits.
        scaling: factor of the logits. indices: (B, S, topk), positions that the indexer picked.
        s_aux: (H,), a sink's logit.

    Returns:
        (B, S, H, v_head_dim), and None in the place of weights.

    Raises:
        UnsupportedError: the model was not enabled, or an argument asks for something else.
    """
    options: Options | None = module.__dict__.get(OPTIONS)
    if options is not None and options.two_sources:
        window = others.pop("sliding_window")
        _refuse(dropout, others)
        operands = query, key, attention_mask, s_aux
        return attend(module, operands, window, scaling, options.backend, options.deterministic)
    if indices is None and attention_mask is not None and attention_mask.dtype == torch.int32:
        indices = attention_mask  # see `listed_ids`
    if options is None or indices is None:
        raise UnsupportedError(
            f"attn_implementation={NAME!r}: this model hands over expanded keys; call "
            "flashdsa.integrations.transformers.enable(model)"
        )
    _refuse(dropout, others)
    batch, num_heads, num_queries, _ = query.shape
    num_keys, width = key.shape[2], key.shape[3]
    rank, nope = value.shape[3], query.shape[3] - (width - value.shape[3])
    weight = _up_projection(module).view(num_heads, -1, rank)
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


def _up_projection(module: torch.nn.Module) -> Tensor:
    """(H * (nope + v), rank), the weight that expands latents.

    It is used by itself and not by calling its module: one that does more than a product (LoRA, a
    quantised weight) would be bypassed.
    """
    projection: Any = module.kv_b_proj
    linear = torch.nn.Linear
    plain = isinstance(projection, linear) and type(projection).forward is linear.forward
    if not plain or projection.bias is not None:
        raise UnsupportedError(
            "kv_b_proj: its weight is multiplied into the queries, so it must be a plain "
            f"torch.nn.Linear without bias; got {type(projection).__name__}. Merge adapters, and "
            "leave it unquantised"
        )
    weight: Tensor = projection.weight
    return weight


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(f"attention_dropout={dropout}: flashdsa's attention has no dropout")
    for name, value in others.items():
        if name not in _WITHOUT_MEANING_HERE and value is not None and value is not False:
            raise UnsupportedError(f"{name}: attn_implementation={NAME!r} does not serve it")
