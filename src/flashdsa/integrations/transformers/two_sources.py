"""DeepSeek-V4's layers: a window of tokens and compressed entries, two sources of one softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.integrations.transformers.releases import by_meaning, require_parameters, unknown
from flashdsa.integrations.transformers.replaced import is_plain
from flashdsa.integrations.transformers.seen_keys import MASK_ELEMENTS, OncePerCall, allowed
from flashdsa.ops.attention import sparse_mla
from flashdsa.ops.entries import compress_kv

ENTRIES = "_flashdsa_entries"
"""Attribute of an attention between its compressor and its attention function."""
COMPRESSORS = ("DeepseekV4CSACompressor", "DeepseekV4HCACompressor")
PARAMETERS = ("hidden_states", "q_residual", "position_ids", "cache", "layer_idx")
"""Parameters of a compressor's forward."""


class Entries(NamedTuple):
    """Compressed rows behind a layer's window rows, and who sees them.

    Attributes:
        number: of one sequence's.
        ids: (B, S, topk) chosen entries, -1 where there is none; None: the first `visible` ones.
        visible: (B, S) entries that each query sees, the first ones.
    """

    number: int
    ids: Tensor | None
    visible: Tensor


def require_known(attention: Any) -> None:
    """Raise UnsupportedError for a compressor whose forward is not the one that is replaced."""
    compressor = attention.compressor
    if compressor is None:
        return
    kind = type(compressor)
    if kind.__name__ not in COMPRESSORS:
        raise unknown(f"compressor: expected one of {', '.join(COMPRESSORS)}; got {kind.__name__}")
    require_parameters(kind, "forward", PARAMETERS)


@by_meaning
def compress(
    attention: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: Any,
    layer_idx: int,
) -> tuple[Tensor, None]:
    """Replace a compressor's forward: return its entries without a mask of them, and keep who sees
    them for the attention function.

    Args: of the compressor's forward; attention: the module that has it.

    Returns:
        entries (B, 1, T, d).
    """
    compressor = attention.compressor
    indexer = getattr(compressor, "indexer", None)
    layer = None if cache is None else cache.layers[layer_idx]
    chosen: list[Tensor] = []
    if is_pooled_here(compressor, hidden_states, layer):
        entries = pool(compressor, hidden_states, layer)[:, None]
        if indexer is not None:
            chosen.append(indexer(hidden_states, q_residual, position_ids, cache, layer_idx))
    else:
        hook = None
        if indexer is not None:
            hook = indexer.register_forward_hook(lambda *given: chosen.append(given[-1]))
        try:
            entries, _ = type(compressor).forward(
                compressor, hidden_states, q_residual, position_ids, cache, layer_idx
            )
        finally:
            if hook is not None:
                hook.remove()
    count = entries.shape[2]
    visible = ((position_ids + 1) // compressor.compress_rate).clamp(max=count)
    if position_ids.shape[1] == 1 and not chosen:  # a query of decode sees all entries that exist
        visible = torch.full_like(visible, count)
    visible = visible.expand(len(hidden_states), -1)
    setattr(attention, ENTRIES, Entries(count, chosen[0] if chosen else None, visible))
    return entries, None


def is_pooled_here(compressor: Any, hidden_states: Tensor, cache: Any) -> bool:
    """Whether `compress_kv` has what the model's own form computes with.

    A cache keeps the gates of overlapping windows with the bias added, which only fp32 takes off
    again. The norm's weight is read beside its module, so it must lie there.
    """
    overlap = compressor.position_bias.shape[1] != compressor.head_dim
    wide = hidden_states.dtype in (torch.float32, torch.float64)
    return is_plain(compressor.kv_norm) and (cache is None or not overlap or wide)


def pool(compressor: Any, hidden_states: Tensor, cache: Any) -> Tensor:
    """Entries (B, T, d) of a compressor, those of earlier calls before the new ones.

    Roundings: once after pooling, norm and rotation; the model rounds after each.
    """
    ratio, d, bias = compressor.compress_rate, compressor.head_dim, compressor.position_bias
    kv, gate = compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)
    first = 0
    if cache is not None:
        kv, gate, first = cache.store_compression_weights("compressor", kv, gate)
    tokens = kv.shape[1] // ratio * ratio
    kv, gate = kv[:, :tokens], gate[:, :tokens]
    prior = 0
    overlap = bias.shape[1] != d
    if cache is not None and overlap and tokens:
        last = kv[:, None, -ratio:], gate[:, None, -ratio:] + bias
        before = cache.update_overlap_state("compressor", *last, d)
        if before[0] is not None:
            prior = ratio
            # The columns that nobody pools may hold anything.
            columns = before[0].to(kv.dtype), (before[1] - bias[:, :d]).to(gate.dtype)
            kv, gate = (
                torch.cat((torch.nn.functional.pad(x, (0, d)), y), dim=1)
                for x, y in zip(columns, (kv, gate), strict=True)
            )
    batch, length = kv.shape[:2]
    entries: Tensor = kv.new_zeros(batch, 0, d)
    if tokens:
        position = torch.arange(first - prior, first + tokens, device=kv.device)
        tables = compressor.rotary_emb(
            kv, position_ids=position[None], layer_type=compressor.rope_layer_type
        )
        sums = torch.float64 if kv.dtype == torch.float64 else torch.float32
        found = compress_kv(
            kv.flatten(0, 1),
            gate.flatten(0, 1),
            bias,
            ratio=ratio,
            overlap=overlap,
            cu_seqlens=torch.arange(batch + 1, device=kv.device) * length,
            norm_weight=compressor.kv_norm.weight,
            eps=compressor.kv_norm.variance_epsilon,
            rotation=(tables[0][0].to(sums).contiguous(), tables[1][0].to(sums).contiguous()),
        )
        assert found is not None
        entries = found.unflatten(0, (batch, -1))[:, prior // ratio :]
    if cache is not None:
        entries = cache.update_compressor_states("compressor", entries)
    return entries


def attend(
    module: Any,
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    window: int,
    scaling: float,
    backend: str | tuple[str, str],
    deterministic: bool,
) -> tuple[Tensor, None]:
    """Attention over the window, and over the entries that `compress` has kept.

    Args:
        operands: queries (B, H, S, d); keys (B, 1, N + T, d), window rows and entries, K and V
            alike; a mask (B, 1, S, N or more), True or 0 where a query may look, or None; sinks
            (H,).
        window: tokens that a query sees, its own among them.

    Returns:
        (B, S, H, d), and None in the place of weights.
    """
    query, key, mask, sinks = operands
    entries: Entries | None = module.__dict__.pop(ENTRIES, None)
    batch, _, num_queries, width = query.shape
    num_rows = key.shape[2]
    num_keys = num_rows - (0 if entries is None else entries.number)
    base = torch.arange(batch, device=key.device)[:, None] * num_rows
    sizes = batch, num_queries, num_keys
    rows = key.reshape(batch * num_rows, width)
    lists: dict[str, Any] = {"indices": window_of(mask, module.layer_idx, sizes, window, base)}
    if entries is not None and entries.number:
        first = base + num_keys
        if entries.ids is None:
            seen: Any = (first.expand_as(entries.visible), first + entries.visible)
            seen = tuple(x.flatten().int() for x in seen)
        else:
            seen = torch.where(entries.ids >= 0, entries.ids + first[..., None], -1)
            seen = seen.flatten(0, 1).int()
        # The same tensor twice: the lists name different rows of it.
        lists = {"indices": seen, "extra_kv": rows, "extra_indices": lists["indices"]}
    out = sparse_mla(
        query.transpose(1, 2).reshape(batch * num_queries, -1, width),
        rows,
        d_v=width,
        sm_scale=scaling,
        attn_sink=None if sinks is None else sinks.float(),
        deterministic=deterministic,
        backend=backend,
        **lists,
    )
    return out.unflatten(0, (batch, num_queries)), None


def window_of(
    mask: Tensor | None, layer: int, sizes: tuple[int, int, int], width: int, base: Tensor
) -> Any:
    """Return the window rows that each query sees, as `sparse_mla` takes a list.

    Args:
        mask: as `attend` gets it; None: each query sees the last `width` tokens.
        layer: its number. sizes: B, S and N, the number of window rows per sequence.
        base: (B, 1), the first row of each sequence.

    Returns:
        Without a mask ranges, (starts, ends) of (B * S,) int32: its own token last. With one a list
        of (B * S, width) int32, the last tokens that the mask lets it see: padding and other holes
        leave no range.
    """
    batch, num_queries, num_keys = sizes
    if mask is None:
        own = torch.arange(num_keys - num_queries, num_keys, device=base.device).expand(batch, -1)
        ranges = (own + 1 - width).clamp(min=0), own + 1
        return tuple((base + x).flatten().int() for x in ranges)
    last = last_seen(mask[:, 0, :, :num_keys], layer, min(width, num_keys))
    rows = torch.where(last >= 0, last + base[..., None], -1)
    return rows.flatten(0, 1).int()


def _last_seen(mask: Tensor, count: int) -> Tensor:
    """Return the last `count` positions that each query sees.

    Args:
        mask: (B, S, N) bool, True where a query may look, or what is added to logits.

    Returns:
        (B, S, count) int32, from the last one on, -1 where it sees fewer.
    """
    position = torch.arange(mask.shape[2], dtype=torch.int32, device=mask.device)
    parts = mask.split(max(1, MASK_ELEMENTS // (len(mask) * mask.shape[2])), dim=1)
    seen = [torch.topk(torch.where(allowed(part), position, -1), count).values for part in parts]
    return torch.cat(seen, dim=1)


last_seen = OncePerCall(_last_seen)
"""`_last_seen(mask, count)` once per model call: `last_seen(mask, layer, count)`."""
