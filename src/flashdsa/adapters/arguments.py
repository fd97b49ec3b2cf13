"""Arguments of peers: refusal by name of what flashdsa has no use for; exact top-k as asked."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from flashdsa.dispatch.checks import as_int32
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.ops.indexer import topk_indices
from flashdsa.problem import INT32_MAX


def require_default(
    function: str, name: str, value: object, *, instead: str, default: object = None
) -> None:
    """Raise UnsupportedError where `value` is not the one that the adapter can honour.

    Args:
        function, name: of the peer's function and its parameter.
        instead: what the caller can do.
        default: the value that is honoured.
    """
    if value is default or (not isinstance(value, Tensor) and value == default):
        return
    raise UnsupportedError(
        f"{function}: {name}={_shown(value)} is not served here, only {name}={default!r}; {instead}"
    )


def _shown(value: object) -> Any:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}>"
    return repr(value)


def copy_into(out: Tensor | None, result: Tensor) -> Tensor:
    """The caller's buffer with the result in it, or the result where there is no buffer."""
    return result if out is None else out.copy_(result.view(out.shape))


def with_a_column(indices: Tensor) -> Tensor:
    """Return lists of ids (..., topk), or one invalid slot per list where they have no column."""
    return indices if indices.shape[-1] else indices.new_full((*indices.shape[:-1], 1), -1)


class TopKTieBreak(IntEnum):
    """Choice among equal scores at the cut-off."""

    NONE = 0
    """Any; here the smallest index."""
    SMALL = 1
    LARGE = 2


def best_positions(
    scores: Tensor,
    lengths: Tensor,
    topk: int,
    tie_break: int,
    *,
    row_starts: Tensor | None = None,
    sorted: bool = False,
) -> Tensor:
    """Positions of the best scores of each row's window, by `flashdsa.topk_indices`.

    Args:
        scores: (rows, columns) fp32, bf16 or fp16 (made fp32, exactly).
        lengths: (rows,) int32, how many scores a window has.
        topk: how many.
        tie_break: a `TopKTieBreak`. LARGE copies the scores in reverse order first.
        row_starts: (rows,) int32, the column at which a window begins; 0 by default. It
            makes a copy of the windows first.
        sorted: in descending order of scores; otherwise ascending positions.

    Returns:
        (rows, topk) int32, -1 after those of a short row; positions count from the window's begin.

    Raises:
        ArgumentValueError: tie_break is none of them.
    """
    if tie_break not in list(TopKTieBreak):
        raise ArgumentValueError(f"tie_break: expected 0, 1 or 2; got {tie_break}")
    larger = tie_break == TopKTieBreak.LARGE
    scores, lengths = scores.float(), as_int32(lengths, 0).to(torch.int32)
    if larger or row_starts is not None:
        columns = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)[None]
        if larger:
            columns = lengths[:, None] - 1 - columns
        if row_starts is not None:
            columns = columns + row_starts[:, None]
        scores = scores.gather(1, columns.clamp(0, scores.shape[1] - 1).long())
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    positions = topk_indices(scores, lengths, topk, sorted=sorted)
    if not larger:
        return positions
    positions = torch.where(positions < 0, -1, lengths[:, None] - 1 - positions)
    return positions if sorted else ascending(positions)


def ascending(positions: Tensor) -> Tensor:
    """Each row of (rows, topk) int32 in ascending order, its negative entries as -1 at the end."""
    ordered = torch.where(positions < 0, INT32_MAX, positions).sort(dim=1).values
    return torch.where(ordered == INT32_MAX, -1, ordered)
