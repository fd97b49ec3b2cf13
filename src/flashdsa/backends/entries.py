"""Places of compressed entries: the sequence, the number and the first row of each; rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Places of E rows of entries; no value of them is read on the host.

    Attributes:
        sequence: (E,) of a batch; 0 <= sequence < B for rows without an entry, too.
        number: (E,) of the entry in its sequence.
        row: (E,) of kv, that its window's first token has, or would have if this call brought it.
        real: (E,) whether the row is an entry's.
        begin: (E,) the sequence's first row of kv; tokens of rows before it are in the state.
    """

    sequence: Tensor
    number: Tensor
    row: Tensor
    real: Tensor
    begin: Tensor


def places(cu_seqlens: Tensor, seen: Tensor | None, num_entries: int, ratio: int) -> Places:
    """The places of `num_entries` rows, those of real entries first.

    Args:
        cu_seqlens: (B + 1,), B >= 1. seen: (B,) tokens before this call; None: none.
    """
    begins, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    before = torch.zeros_like(begins) if seen is None else seen.long()
    first = before // ratio
    counts = (before + lengths) // ratio - first
    ends = counts.cumsum(0)
    entry = torch.arange(num_entries, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, entry, right=True)
    real = sequence < counts.shape[0]
    sequence = sequence.clamp(max=counts.shape[0] - 1)
    number = first[sequence] + entry - (ends - counts)[sequence]
    begin = begins[sequence]
    return Places(sequence, number, begin - before[sequence] + ratio * number, real, begin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """`x` (..., d) with the pairs of neighbours in its last 2n columns turned.

    Args:
        cos, sin: (..., n) of x's dtype, broadcast against x.
    """
    columns = 2 * cos.shape[-1]
    tail = x[..., x.shape[-1] - columns :]
    a, b = tail.unflatten(-1, (-1, 2)).unbind(-1)
    turn = -sin if inverse else sin
    pairs = torch.stack((a * cos - b * turn, a * turn + b * cos), dim=-1).flatten(-2)
    first = x.shape[-1] - columns
    return torch.cat((x[..., :first], pairs), dim=-1) if first else pairs
