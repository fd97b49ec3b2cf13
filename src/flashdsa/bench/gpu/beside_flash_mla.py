"""What the benches of forward and decode share: FlashMLA as the peer, and O beside float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench.gpu.peers import in_a_line
from flashdsa.bench.gpu.turns import Call, TurnsTimer
from flashdsa.operands import SparseMlaOperands

OURS, FLASH_MLA = "flashdsa", "FlashMLA"
FLASH_MLA_HEADS = 64
"""Its kernels take multiples of these."""
JUDGED_QUERIES = 3
NORM_LIMIT = 2.5e-3

Times = TypeVar("Times")
"""Of a call, by the bench's protocol."""


@dataclass(frozen=True)
class Comparison(Generic[Times]):
    """Both times of a case, and what our O is worth."""

    ours: Times
    peer: Times | None
    peer_missing: str | None
    """Why there are no times of FlashMLA's."""
    norm_error: float
    """Of our O against float64, the largest of the judged queries."""

    @property
    def findings(self) -> list[str]:
        """What is wrong with our results; empty: nothing."""
        off = self.norm_error
        return [] if off <= NORM_LIMIT else [f"O is off by {off:.2e} of its norm"]


def compare(
    operands: SparseMlaOperands,
    timer: TurnsTimer[Times],
    prepare_peer: Callable[[], Call] | str,
    **options: Any,
) -> Comparison[Times]:
    """`sparse_mla_fwd` judged, and timed beside FlashMLA.

    Args:
        prepare_peer: gives FlashMLA's call, or is the reason why there is none.
        options: of `sparse_mla_fwd`, besides the operands.
    """
    results: list[tuple[Tensor, ...]] = []
    q, kv, indices, topk_length, attn_sink = operands
    options |= {"topk_length": topk_length, "attn_sink": attn_sink}

    def ours() -> None:
        results[:] = [flashdsa.sparse_mla_fwd(q, kv, indices, **options)]

    calls: dict[str, Call] = {OURS: ours}
    missing = prepare_peer if isinstance(prepare_peer, str) else add_peer(calls, prepare_peer)
    times = timer.in_turns(calls)
    ours()
    off = worst_norm_error(results[0][0], operands)
    return Comparison(times[OURS], times.get(FLASH_MLA), missing, off)


def add_peer(calls: dict[str, Call], prepare: Callable[[], Call]) -> str | None:
    """Add FlashMLA's call to `calls`, tried once; where it refuses, the reason.

    A peer's refusal must not cost the rest of the run.
    """
    try:
        call = prepare()
        call()
    except Exception as error:
        return in_a_line(error)
    calls[FLASH_MLA] = call
    return None


def worst_norm_error(out: Tensor, operands: SparseMlaOperands) -> float:
    """The largest relative error of O over the first, a middle and the last query.

    Args:
        out: (S, H, 512), what is judged.
    """
    q, kv, indices, topk_length, attn_sink = operands
    last = len(q) - 1
    worst = 0.0
    for query in sorted({0, last // 2, last})[:JUDGED_QUERIES]:
        one = slice(query, query + 1)
        ids = indices[query].long()
        rows = kv[ids.clamp(min=0)].cpu()  # few of a large cache
        slots = torch.where(ids.cpu() < 0, -1, torch.arange(len(rows)))[None].int()
        expected, _ = reference.sparse_mla_fwd(
            q[one].cpu(),
            rows,
            slots,
            topk_length=None if topk_length is None else topk_length[one].cpu(),
            attn_sink=None if attn_sink is None else attn_sink.cpu(),
        )
        off = (out[one].cpu().double() - expected).norm() / expected.norm()
        worst = max(worst, float(off))
    return worst
