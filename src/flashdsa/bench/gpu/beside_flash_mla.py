"""What the benches of forward and decode share: FlashMLA as the peer, and O beside float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.bench.gpu.peers import in_a_line

OURS, FLASH_MLA = "flashdsa", "FlashMLA"
FLASH_MLA_HEADS = 64
"""Its kernels take multiples of these."""
JUDGED_QUERIES = 3
NORM_LIMIT = 2.5e-3

Call = Callable[[], object]


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


def worst_norm_error(
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    topk_length: Tensor | None,
    attn_sink: Tensor | None = None,
) -> float:
    """The largest relative error of O over the first, a middle and the last query.

    Args:
        out: (S, H, 512), what is judged.
        q, kv, indices, topk_length, attn_sink: as `sparse_mla_fwd` takes them.
    """
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


def norm_findings(off: float) -> list[str]:
    """What a row says of O's error: nothing within NORM_LIMIT."""
    return [] if off <= NORM_LIMIT else [f"O is off by {off:.2e} of its norm"]
