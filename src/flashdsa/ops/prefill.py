"""Indexer over shared keys: many queries rank the same keys, in prefill and in training."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch import checks
from flashdsa.dispatch.dtypes import E4M3, FP32, INT32, same_dtype
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Operand, Output, Parameter, Sizes, fold_batch
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from flashdsa.ops.indexer import BLOCK
from flashdsa.problem import INDEX_HEAD_DIM, INT32_MAX

__all__ = ["causal_ranges", "dsa_topk_prefill", "prefill_logits"]


def _require_rows_within_int32(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """Rows are named by int32."""
    if tensor.shape[0] > INT32_MAX:
        raise ArgumentValueError(
            f"{name}: expected at most {INT32_MAX} rows (int32 ids); got {tensor.shape[0]}"
        )


def _require_scales_of_e4m3_keys(operands: PrefillOperands | TopkPrefillOperands) -> None:
    """Keys have scales if they are e4m3, and otherwise none."""
    dtype, scales = operands.k_index.dtype, operands.k_scale
    if dtype == torch.float8_e4m3fn and scales is None:
        raise ArgumentTypeError(
            "k_scale: expected the scales of e4m3 keys, as quantize_index_k gives them; got None"
        )
    if dtype != torch.float8_e4m3fn and scales is not None:
        raise ArgumentTypeError(
            f"k_scale: expected None, as keys of {checks.dtype_name(dtype)} have no scales; "
            "got a tensor"
        )


QIndex = Annotated[
    Tensor,
    Operand(
        f"S H {INDEX_HEAD_DIM}",
        (*E4M3, torch.bfloat16, torch.float16, torch.float32),
        batched=fold_batch("q_index", "k_index", "starts and ends of sequence b"),
        nonempty="expected shape [S, H, 128] with H >= 1; got H = 0",
    ),
]
KIndex = Annotated[
    Tensor, Operand(f"S_kv {INDEX_HEAD_DIM}", same_dtype, rule=_require_rows_within_int32)
]
Weights = Annotated[Tensor, Operand("S H", FP32)]
Ends = Annotated[Tensor, Operand("S", INT32)]
Starts = Annotated[Tensor | None, Operand("S", INT32)]
KScale = Annotated[Tensor | None, Operand("S_kv", FP32)]
_CHOSEN = Operand(
    "S topk", INT32, written=True, nonempty="expected shape [S, topk] with topk >= 1; got 0"
)


class PrefillOperands(NamedTuple):
    """Operands of `prefill_logits`."""

    q_index: QIndex
    k_index: KIndex
    weights: Weights
    ends: Ends
    starts: Starts = None
    k_scale: KScale = None


class TopkPrefillOperands(NamedTuple):
    """Operands of `dsa_topk_prefill`: those of `prefill_logits`, and the ids, written."""

    q_index: QIndex
    k_index: KIndex
    weights: Weights
    ends: Ends
    topk_indices: Annotated[Tensor, _CHOSEN]
    starts: Starts = None
    k_scale: KScale = None
    candidates: Annotated[Tensor | None, Operand("S num_candidates", INT32)] = None

    @property
    def inputs(self) -> PrefillOperands:
        """The operands without the output."""
        return PrefillOperands(*self[:4], self.starts, self.k_scale)


DSA_TOPK_PREFILL = register(
    OpSpec(
        "dsa_topk_prefill",
        TopkPrefillOperands,
        cpu="prefill:topk_prefill",
        parameters=(Parameter("sorted", "bool"), BLOCK),
        rule=_require_scales_of_e4m3_keys,
    )
)
PREFILL_LOGITS = register(
    OpSpec(
        "prefill_logits",
        PrefillOperands,
        cpu="prefill:logits",
        outputs=(Output("scores", "S S_kv", FP32),),
        rule=_require_scales_of_e4m3_keys,
    )
)


def dsa_topk_prefill(  # noqa: PLR0913 - operands, and what is chosen
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    topk_indices: Tensor,
    *,
    k_scale: Tensor | None = None,
    sorted: bool = False,
    block: int = 1,
    candidates: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the rows of each query's best-scoring keys into `topk_indices`.

    ``score[s, t] = k_scale[t] * sum_h weights[s, h] * relu(q_index[s, h] . k_index[t])``. Exactly
    ``min(topk, ends[s] - starts[s])`` rows of `k_index` are written, then -1. Ties at the cut-off
    go to the smallest row; NaN scores rank last. No matrix of S x S_kv is ever held whole.

    `block` and `candidates` choose in two levels, as those of `dsa_topk_indexer`: block j of a
    query has the rows from ``starts[s] + block * j`` on.

    Args:
        q_index: (S, H, 128) float8_e4m3fn from `quantize_index_q`, bf16, fp16 or fp32.
        k_index: (S_kv, 128), same dtype; e4m3 keys from `quantize_index_k`.
        weights: (S, H) fp32, of e4m3 queries with their scales folded in; may be negative.
        starts: (S,) int32, the first key row of each query; None: row 0 for all.
        ends: (S,) int32, the row behind the last one. `causal_ranges` makes both.
        topk_indices: (S, topk) int32, the output; may be uninitialised. `sparse_mla` takes it.
        k_scale: (S_kv,) fp32, of e4m3 keys only.
        sorted: descending score, ties by row. Otherwise the order is a backend's own,
            deterministic; the CPU's is ascending row.
        block: rows of a block, a divisor of 64.
        candidates: (S, n) int32, the blocks of each query to choose rows from.
        backend: "auto" or the name of one.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) a range that is no range of k_index's rows. Nothing is written then.
        NotImplementedError: no implementation serves the call.
    """
    operands = q_index, k_index, weights, ends, topk_indices, starts, k_scale, candidates
    call(DSA_TOPK_PREFILL, operands, (sorted, block), backend)


def prefill_logits(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    *,
    k_scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The scores that `dsa_topk_prefill` ranks, bit for bit: to look at them, not to rank them.

    Args: as for `dsa_topk_prefill`.

    Returns:
        (S, S_kv) fp32, -inf outside each query's range.
    """
    operands = q_index, k_index, weights, ends, starts, k_scale
    scores: Tensor = call(PREFILL_LOGITS, operands, (), backend)
    return scores


def causal_ranges(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    num_queries: int | None = None,
    ratio: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the keys that each query sees if sequences follow each other and attention is causal.

    The last query of a sequence sees all its keys, the one before it all but the last, and so on:
    a chunk of queries against a longer sequence of keys is the same call. If a sequence has
    fewer keys than queries, its first queries see nothing.

    With `ratio` the keys are entries of that many tokens each, as `compress_kv` makes them of these
    sequences: the query at position p sees the first ``(p + 1) // ratio`` of its sequence.

    Args:
        cu_seqlens_q: (B + 1,) int32 or int64, 0 and then the end of each sequence's queries.
        cu_seqlens_k: likewise of keys, (B + 1,), of the tokens if keys are entries; None: those of
            the queries.
        num_queries: S, the last of cu_seqlens_q. None reads that one, which on a GPU waits for
            the device and cannot be captured into a graph.
        ratio: tokens of a key.

    Returns:
        starts, ends (S,) int32, on cu_seqlens_q's device.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1; not in compiled code) offsets that do not begin at 0 or that decrease,
            and a `num_queries` that is not the last of cu_seqlens_q. Without checks, queries
            from the last offset on count as the last sequence's, with ends beyond its keys, and
            queries from `num_queries` on are left out; `dsa_topk_prefill` clamps ends to S_kv.
    """
    checks.require_positive("ratio", ratio)
    ends_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", ends_k)):
        checks.require_tensor(name, value)
        checks.require_rank(name, value, (1,), "[B + 1]")
        checks.require_device(name, value, cu_seqlens_q.device, "cu_seqlens_q")
        if value.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name}: expected dtype int32 or int64; got {value.dtype}")
        if not value.numel() or value.shape != cu_seqlens_q.shape:
            raise ArgumentValueError(
                f"{name}: expected B + 1 offsets, one more than sequences; got {list(value.shape)}"
                f" where cu_seqlens_q has {list(cu_seqlens_q.shape)}"
            )
    if num_queries is not None and (num_queries != 0 or isinstance(num_queries, bool)):
        checks.require_positive("num_queries", num_queries)
    if (
        checks.holds_values(cu_seqlens_q)
        and checks.holds_values(ends_k)
        and checks.are_values_read(ends_k)
    ):
        last = checks.require_offsets("cu_seqlens_q", cu_seqlens_q)
        checks.require_offsets("cu_seqlens_k", ends_k)
        if num_queries not in (None, last):
            raise ArgumentValueError(
                f"num_queries: expected the last of cu_seqlens_q, {last}; got {num_queries}"
            )
    if num_queries is None:
        num_queries = int(cu_seqlens_q[-1])
    lasts = cu_seqlens_q[1:].long().contiguous()
    query = torch.arange(num_queries, device=cu_seqlens_q.device)
    # Of empty sequences that begin where another one does, `right` finds the one with queries.
    sequence = torch.searchsorted(lasts, query, right=True)
    sequence = sequence.clamp(max=max(cu_seqlens_q.numel() - 2, 0))
    tokens = ends_k.long().diff()
    keys = tokens // ratio
    starts = (keys.cumsum(0) - keys)[sequence]
    behind = lasts[sequence] - query - 1
    ends = starts + (tokens[sequence] - behind).clamp(min=0) // ratio
    return checks.as_int32(starts, 0), checks.as_int32(ends, 0)
