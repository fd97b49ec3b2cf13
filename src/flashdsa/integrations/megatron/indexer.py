"""The indexer of Megatron's hooks: operands of all sequences, keys chosen, and the loss.

Megatron's tensors have the sequences' axis second. Here the sequences lie one behind the other: row
``s`` of sequence ``b`` is row ``b * length + s``. Scores are those of q and k as they come, in 16
or 32 bits: nothing is quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.indexer_loss import indexer_kl_loss
from flashdsa.ops.indexer_loss_dense import indexer_kl_loss_dense
from flashdsa.ops.indexer_training import attention_target
from flashdsa.ops.prefill import dsa_topk_prefill
from flashdsa.problem import INDEX_HEAD_DIM

INDEXER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WITHOUT_MEANING_HERE = frozenset(
    {
        "block_size",
        "cp_size",
        "local_packed_cp_query_len",
        "local_packed_cp_query_start",
        "local_packed_cp_rank",
        "packed_seq_params",
        "single_packed_thd_sequence",
        "use_local_indexer_varlen",
        "varlen_is_plain_causal",
    }
)
"""Arguments that change nothing where keys are gathered: starts and ends say what a query sees. A
hook declines what it does not know."""


class Indexer(NamedTuple):
    """Operands of the indexer, of all sequences.

    Attributes:
        q: (b * sq, h, 128). k: (b * skv, 128). weights: (b * sq, h) fp32.
        starts, ends: (b * sq,) int32, rows of k that each query sees.
        batch: b.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    batch: int

    def choose(self, index_topk: int) -> Chosen:
        """The best keys of each query."""
        topk = min(index_topk, len(self.k) // self.batch)
        ids = self.q.new_empty(len(self.q), topk, dtype=torch.int32)
        with torch.no_grad():
            dsa_topk_prefill(self.q, self.k, self.weights, self.starts, self.ends, ids)
        return Chosen(ids, (self.ends - self.starts).clamp(max=topk))


class Chosen(NamedTuple):
    """Chosen keys: ids (b * sq, topk) int32, rows of all sequences' keys, and (b * sq,) int32, the
    slots in use."""

    ids: Tensor
    lengths: Tensor

    def in_sequences(self, batch: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Megatron's form: ids (b, sq, topk) within each sequence, and lengths (b, sq)."""
        ids = self.ids.unflatten(0, (batch, -1))
        if batch > 1:
            ids = torch.where(ids >= 0, ids - first_rows(ids, num_keys)[..., None], -1)
        return ids, self.lengths.view(batch, -1)


class Loss(NamedTuple):
    """The indexer's loss, as it counts.

    Attributes:
        row_weight: (b * sq,) fp32, what the KL of each query counts.
        scale: factor of the attention's logits.
        group: of tensor parallelism, over which the attention's heads are spread, or None.
    """

    row_weight: Tensor
    scale: float
    group: Any

    def over_chosen(
        self, indexer: Indexer, chosen: Chosen, query: Tensor, key: Tensor, lse: Tensor
    ) -> Tensor:
        """KL over the chosen keys; every rank of `group` has chosen the same ones."""
        ids, lengths = chosen
        target = attention_target(query, key, lse, ids, sm_scale=self.scale, topk_length=lengths)
        if self.group is not None:
            torch.distributed.all_reduce(target, group=self.group)
        kl = indexer_kl_loss(
            *indexer[:3], ids, target=target, topk_length=lengths, deterministic=is_deterministic()
        )
        return (kl * self.row_weight).sum()

    def over_all(self, indexer: Indexer, query: Tensor, key: Tensor, d_v: int) -> Tensor:
        """KL over every visible key, sequence by sequence; every rank of `group` for all heads."""
        with torch.no_grad():
            ranges = indexer.starts, indexer.ends
            lse = sparse_mla_fwd(query, key, ranges, d_v=d_v, sm_scale=self.scale)[1]
        rows, keys = len(query) // indexer.batch, len(key) // indexer.batch
        total = query.new_zeros((), dtype=torch.float32)
        for number in range(indexer.batch):
            mine = slice(number * rows, (number + 1) * rows)
            seen = slice(number * keys, (number + 1) * keys)
            total = total + indexer_kl_loss_dense(
                indexer.q[mine],
                indexer.k[seen],
                indexer.weights[mine],
                of_all_ranks(query[mine], self.group),
                key[seen],
                of_all_ranks(lse[mine], self.group),
                indexer.ends[mine] - number * keys,
                key_start=indexer.starts[mine] - number * keys,
                row_weight=self.row_weight[mine],
                sm_scale=self.scale,
            )
        return total


def indexer_of(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    use_relu: bool,
    others: Mapping[str, Any],
    config: Any = None,
) -> Indexer | None:
    """The indexer's operands of all sequences; None where something else is asked for."""
    if not use_relu or others.keys() - WITHOUT_MEANING_HERE:
        return None
    if getattr(config, "dsa_indexer_precision", "bf16") != "bf16":
        return None
    if q.dim() != 4 or k.dim() != 3 or q.dtype not in INDEXER_DTYPES or k.dtype != q.dtype:
        return None
    num_queries, batch, _, width = q.shape
    num_keys = len(k)
    if width != INDEX_HEAD_DIM or k.shape[1:] != (batch, width) or not num_keys * num_queries:
        return None
    if weights.shape != q.shape[:3] or starts.shape != ends.shape or ends.shape != (num_queries,):
        return None
    if others.get("single_packed_thd_sequence") and (
        others.get("local_packed_cp_query_len") == num_keys
    ):
        return None  # the keys are this rank's alone
    ends = ends.clamp(0, num_keys)
    first = first_rows(q.transpose(0, 1), num_keys)
    return Indexer(
        flat(q),
        flat(k),
        flat(weights).float(),
        (torch.minimum(starts.clamp(min=0), ends) + first).flatten().int(),
        (ends + first).flatten().int(),
        batch,
    )


def row_weight(valid: Tensor | None, query: Tensor, is_sum: bool, factor: float) -> Tensor:
    """(b * sq,) fp32, what a query's KL counts: `factor`, or its share of the mean."""
    num_queries, batch = query.shape[:2]
    rows = torch.ones(batch, num_queries, dtype=torch.float32, device=query.device)
    if valid is not None:
        rows *= valid.to(rows)
    count = 1 if is_sum else rows.sum().clamp(min=1)
    return (rows * factor / count).flatten()


def spread(pg_collection: Any) -> Any:
    """The group over which heads are spread, or None."""
    group = getattr(pg_collection, "tp", None)
    return None if group is None or group.size() == 1 else group


def of_all_ranks(x: Tensor, group: Any) -> Tensor:
    """(rows, all heads, ...) of each rank's (rows, heads, ...)."""
    if group is None:
        return x
    every = x.new_empty(group.size() * len(x), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(every, x.contiguous(), group=group)
    heads: Tensor = every.unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1, 2)
    return heads


def first_rows(of_sequences: Tensor, num_keys: int) -> Tensor:
    """(b, 1) int32, the first key's row of each sequence (b, ...)."""
    batch = torch.arange(len(of_sequences), dtype=torch.int32, device=of_sequences.device)
    return batch[:, None] * num_keys


def flat(x: Tensor) -> Tensor:
    """(b * s, ...) of (s, b, ...)."""
    return x.transpose(0, 1).flatten(0, 1)


def is_deterministic() -> bool:
    """Whether gradients have to repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled()
