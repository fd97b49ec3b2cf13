"""Compressed entries in float64, one at a time: pooling, norm, rotation, and their gradients."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.reference.quant import f64, full

__all__ = ["CompressGradients", "compress_kv", "compress_kv_bwd", "rotate_tail"]

LOGIT_SHARE = 1 / 16
"""Share of a logit's size by which sizes grow: a large one's rounding moves its weight."""


def rotate_tail(
    x: Tensor, positions: list[int], rotation: tuple[Tensor, Tensor], *, inverse: bool = False
) -> Tensor:
    """x `[S, ..., d]`, whose last 2n columns are n pairs `(a, b)` of neighbours: row s has
    `(a cos - b sin, a sin + b cos)` in their places, with row `positions[s]` of the tables
    `[P, n]`. `inverse` negates the angles.
    """
    y = f64(x).clone()
    cos, sin = (f64(table)[positions] for table in rotation)
    sin = -sin if inverse else sin
    for row, c, turn in zip(y, cos, sin, strict=True):
        a, b = row[..., -2 * len(c) :].unflatten(-1, (-1, 2)).clone().unbind(-1)
        row[..., -2 * len(c) :] = torch.stack([a * c - b * turn, a * turn + b * c], -1).flatten(-2)
    return y


class Window(NamedTuple):
    """The slots of an entry: rows of kv, their rows of `ape`, and the columns of each."""

    tokens: list[int]
    rows: list[int]
    columns: list[slice]
    position: int


def windows(cu_seqlens: list[int], ratio: int, d: int, overlap: bool) -> list[Window]:
    """The slots of every entry, sequence by sequence."""
    found = []
    for first, end in pairwise(cu_seqlens):
        for j in range((end - first) // ratio):
            own = [(ratio * j + r, r, slice(d, 2 * d) if overlap else slice(0, d)) for r in
                   range(ratio)]  # fmt: skip
            before = [(ratio * (j - 1) + r, r, slice(0, d)) for r in range(ratio)]
            slots = before + own if overlap and j > 0 else own
            tokens, rows, columns = zip(*slots, strict=True)
            found.append(Window([first + t for t in tokens], list(rows), list(columns), ratio * j))
    return found


class Pooled(NamedTuple):
    """An entry's slots: kv and p `[slots, d]`, e, its size and the largest logit `[d]`."""

    kv: Tensor
    p: Tensor
    e: Tensor
    size: Tensor
    logit: Tensor


def _pool(kv: Tensor, gate: Tensor, ape: Tensor | None, window: Window) -> Pooled:
    tokens, rows, columns, _ = window
    values = torch.stack([kv[t, c] for t, c in zip(tokens, columns, strict=True)])
    g = torch.stack([gate[t, c] for t, c in zip(tokens, columns, strict=True)])
    if ape is not None:
        g = g + torch.stack([ape[r, c] for r, c in zip(rows, columns, strict=True)])
    p = torch.softmax(g, dim=0)
    return Pooled(values, p, (p * values).sum(0), (p * values.abs()).sum(0), g.abs().amax(0))


def _turned(x: Tensor, position: int, rotation: tuple[Tensor, Tensor] | None, back: bool) -> Tensor:
    if rotation is None:
        return x
    return rotate_tail(x[None], [position], rotation, inverse=back)[0]


def _sizes_turned(x: Tensor, position: int, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    if rotation is None:
        return x
    cos, sin = (table.abs() for table in rotation)
    forth, back = (rotate_tail(x[None], [position], (cos, s))[0] for s in (sin, -sin))
    return torch.maximum(forth, back)


def compress_kv(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor | None = None,
    *,
    ratio: int,
    cu_seqlens: list[int],
    overlap: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The entries `[E, d]`, E those that are complete, and what is summed into each element.

    kv, gate `[T, width]`, ape `[ratio, width]`, norm_weight `[d]`; width is 2d with `overlap`.
    """
    d = kv.shape[1] // (2 if overlap else 1)
    kv, gate, ape = f64(kv), f64(gate), None if ape is None else f64(ape)
    entries, sizes = [full(kv, (0, d))], [full(kv, (0, d))]
    for window in windows(cu_seqlens, ratio, d, overlap):
        pooled = _pool(kv, gate, ape, window)
        e, size = pooled.e, pooled.size
        if norm_weight is not None:
            factor = f64(norm_weight) / (e.square().mean() + eps).sqrt()
            e, size = e * factor, size * factor.abs()
        size = size * (1 + LOGIT_SHARE * pooled.logit)
        entries.append(_turned(e, window.position, rotation, back=False)[None])
        sizes.append(_sizes_turned(size, window.position, rotation)[None])
    return torch.cat(entries), torch.cat(sizes)


class CompressGradients(NamedTuple):
    """Gradients of `compress_kv`; those of `ape` and of the norm's weight are 0 without them."""

    d_kv: Tensor
    d_gate: Tensor
    d_ape: Tensor
    d_norm_weight: Tensor


def compress_kv_bwd(
    kv: Tensor,
    gate: Tensor,
    grad_entries: Tensor,
    ape: Tensor | None = None,
    *,
    ratio: int,
    cu_seqlens: list[int],
    overlap: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> tuple[CompressGradients, CompressGradients]:
    """Gradients from `grad_entries` `[E or more, d]`, and what is summed into each element.

    `dn` is `grad_entries` turned back. With a norm, `r = 1 / sqrt(mean(e^2) + eps)`:
    `d_norm_weight = sum dn e r`, `de = r (w dn - e r^2 mean(w dn e))`; else `de = dn`. Then
    `d_kv = p de`, `d_gate = p (kv - e) de`, `d_ape` its sum over the entries.
    """
    d = kv.shape[1] // (2 if overlap else 1)
    kv, gate, ape = f64(kv), f64(gate), None if ape is None else f64(ape)
    weight = None if norm_weight is None else f64(norm_weight)
    shapes = kv.shape, kv.shape, (ratio, kv.shape[1]), (d,)
    found, sizes = (CompressGradients(*(full(kv, shape) for shape in shapes)) for _ in range(2))
    for number, window in enumerate(windows(cu_seqlens, ratio, d, overlap)):
        pooled = _pool(kv, gate, ape, window)
        e, size = pooled.e, pooled.size
        given = f64(grad_entries[number])
        dn = de = _turned(given, window.position, rotation, back=True)
        dn_size = de_size = _sizes_turned(given.abs(), window.position, rotation)
        if weight is not None:
            r = 1 / (e.square().mean() + eps).sqrt()
            found.d_norm_weight.add_(dn * e * r)
            sizes.d_norm_weight.add_(dn_size * size * r * (1 + LOGIT_SHARE * pooled.logit))
            de = r * (weight * dn - e * r**2 * (weight * dn * e).mean())
            through = (weight.abs() * dn_size * size).mean()
            de_size = r * (weight.abs() * dn_size + size * r**2 * through)
        de_size = de_size * (1 + LOGIT_SHARE * pooled.logit)
        for slot, (t, row, c) in enumerate(zip(*window[:3], strict=True)):
            p, value = pooled.p[slot], pooled.kv[slot]
            d_gate, d_gate_size = p * (value - e) * de, p * (value.abs() + size) * de_size
            found.d_kv[t, c] += p * de
            sizes.d_kv[t, c] += p * de_size
            found.d_gate[t, c] += d_gate
            sizes.d_gate[t, c] += d_gate_size
            found.d_ape[row, c] += d_gate
            sizes.d_ape[row, c] += d_gate_size
    return found, sizes
