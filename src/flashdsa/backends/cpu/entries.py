"""Compressed entries by torch's operations on any device: no value is read on the host.

An entry's sums go over its slots in their order, in one number a column: its bits depend on
nothing but its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.tiling import WORKSPACE_BYTES, spans
from flashdsa.backends.entries import Places, places, rotated

if TYPE_CHECKING:
    from flashdsa.ops.entries import CompressKvBwdOperands, CompressKvOperands

_TEMPORARIES = 6
"""Numbers of a slot and column that are held at once."""


class _Half(NamedTuple):
    """Slots that share columns: (n, ratio) rows of kv, positions, and which are a token's."""

    rows: Tensor
    position: Tensor
    valid: Tensor
    columns: slice


class _Chunk(NamedTuple):
    """Some entries. kv, p: (n, slots, d), 0 without a token. e: (n, d), what is pooled."""

    of: slice
    places: Places
    halves: list[_Half]
    kv: Tensor
    p: Tensor
    e: Tensor


def forward(operands: CompressKvOperands, *, ratio: int, overlap: bool, eps: float) -> Tensor:
    """Entries (num_entries, d) in kv's dtype, 0 after the last one."""
    x = operands
    tokens, width = x.kv.shape
    d = width // (1 + overlap)
    spare = 0 if x.state is None else (len(x.cu_seqlens) - 1) * (ratio - 1)
    num_entries = (tokens + spare) // ratio
    entries = x.kv.new_zeros(num_entries, d)
    if not len(x.kv):
        return entries
    for chunk in _chunks(x, num_entries, d, ratio):
        n = chunk.e
        if x.norm_weight is not None:
            n = n * _inverse_rms(n, eps) * x.norm_weight.to(n.dtype)
        if x.cos is not None and x.sin is not None:
            n = rotated(n, *_tables(x.cos, x.sin, chunk, ratio))
        entries[chunk.of] = n.masked_fill(~chunk.places.real[:, None], 0).to(entries.dtype)
    return entries


def backward(
    operands: CompressKvBwdOperands, *, ratio: int, overlap: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_kv and d_gate (T, width) in kv's dtype, d_ape and d_norm_weight in those of theirs, empty
    without them; see `reference.compress_kv_bwd` for the formulas."""
    x = operands
    (num_entries, d), (tokens, width) = x.grad_entries.shape, x.kv.shape
    assert width == d * (1 + overlap)
    dtype = _wide(x.kv)
    # The last row takes what has no token.
    d_kv, d_gate = x.kv.new_zeros(tokens + 1, width), x.kv.new_zeros(tokens + 1, width)
    d_ape = torch.zeros(ratio, width, dtype=dtype, device=x.kv.device)
    d_weight = torch.zeros(d, dtype=dtype, device=x.kv.device)
    for chunk in _chunks(x, num_entries, d, ratio) if tokens else ():
        dn = x.grad_entries[chunk.of].to(dtype).masked_fill(~chunk.places.real[:, None], 0)
        if x.cos is not None and x.sin is not None:
            dn = rotated(dn, *_tables(x.cos, x.sin, chunk, ratio), inverse=True)
        de, e = dn, chunk.e
        if x.norm_weight is not None:
            r = _inverse_rms(e, eps)
            d_weight += (dn * (e * r)).sum(0)
            dn = dn * x.norm_weight.to(dtype)
            de = r * (dn - e * r * r * (dn * e).mean(-1, keepdim=True))
        of_kv = chunk.p * de[:, None]
        of_gate = of_kv * (chunk.kv - e[:, None])
        for number, half in enumerate(chunk.halves):
            slots = slice(number * ratio, (number + 1) * ratio)
            rows = torch.where(half.valid, half.rows, tokens)
            d_kv[:, half.columns][rows] = of_kv[:, slots].to(d_kv.dtype)
            d_gate[:, half.columns][rows] = of_gate[:, slots].to(d_gate.dtype)
            d_ape[:, half.columns] += of_gate[:, slots].sum(0)
    d_ape, d_weight = (
        y.new_empty(0) if given is None else y.to(given.dtype)
        for y, given in ((d_ape, x.ape), (d_weight, x.norm_weight))
    )
    return d_kv[:tokens], d_gate[:tokens], d_ape, d_weight


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _inverse_rms(e: Tensor, eps: float) -> Tensor:
    return (e.square().mean(-1, keepdim=True) + eps).rsqrt()


def _tables(cos: Tensor, sin: Tensor, chunk: _Chunk, ratio: int) -> tuple[Tensor, Tensor]:
    """cos and sin (n, half) of the entries' positions."""
    rows = (chunk.places.number * ratio).clamp(0, len(cos) - 1)
    return cos[rows], sin[rows]


def _chunks(
    x: CompressKvOperands | CompressKvBwdOperands, num_entries: int, d: int, ratio: int
) -> Iterator[_Chunk]:
    """All entries, some at a time, so that their workspace is bounded."""
    overlap = x.kv.shape[1] != d
    dtype = _wide(x.kv)
    every = places(x.cu_seqlens, getattr(x, "seen", None), num_entries, ratio)
    step = max(1, WORKSPACE_BYTES // (_TEMPORARIES * dtype.itemsize * ratio * x.kv.shape[1]))
    offsets = torch.arange(ratio, device=x.kv.device)
    for first, last in spans(num_entries, step):
        own = Places(*(y[first:last] for y in every))
        halves = []
        for shift, columns in (
            ((-ratio, slice(0, d)), (0, slice(d, 2 * d))) if overlap else ((0, slice(0, d)),)
        ):
            position = own.number[:, None] * ratio + shift + offsets
            valid = own.real[:, None] & (position >= 0)
            rows = own.row[:, None] + shift + offsets
            halves.append(_Half(rows, position, valid, columns))
        kv, gate = (_gathered(x, own, halves, which).to(dtype) for which in (0, 1))
        valid = torch.cat([half.valid for half in halves], dim=1)[..., None]
        if x.ape is not None:
            gate = gate + torch.cat([x.ape[:, half.columns] for half in halves]).to(dtype)
        gate = gate.masked_fill(~valid, -math.inf)
        p = (gate - gate.amax(1, keepdim=True)).exp_().masked_fill_(~valid, 0)
        kv = kv.masked_fill(~valid, 0)
        total, e = p[:, 0].clone(), p[:, 0] * kv[:, 0]
        for slot in range(1, p.shape[1]):
            total += p[:, slot]
            e += p[:, slot] * kv[:, slot]
        total = total.masked_fill(~own.real[:, None], 1)
        yield _Chunk(slice(first, last), own, halves, kv, p.div_(total[:, None]), e.div_(total))


def _gathered(
    x: CompressKvOperands | CompressKvBwdOperands, own: Places, halves: list[_Half], which: int
) -> Tensor:
    """Slots (n, slots, d) of kv (`which` 0) or gate (1): of this call's tokens or of the state."""
    source = x.gate if which else x.kv
    state = getattr(x, "state", None)
    parts = []
    for half in halves:
        part = source[:, half.columns][half.rows.clamp(0, len(source) - 1)]
        if state is not None:
            row = half.position % state.shape[1]
            kept = state[own.sequence[:, None], row, which][..., half.columns]
            part = torch.where((half.rows < own.begin[:, None])[..., None], kept, part)
        parts.append(part)
    return torch.cat(parts, dim=1)
