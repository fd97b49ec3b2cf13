"""The indexer of this rank's queries over the keys of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.dispatch import checks
from flashdsa.dispatch.registration import is_served
from flashdsa.distributed.agree import agreed, agreement
from flashdsa.distributed.collectives import all_gather
from flashdsa.distributed.dtensors import as_dtensor, local_parts
from flashdsa.distributed.group import describe, group_of, process_group, require_device_of_group
from flashdsa.distributed.layout import SequenceLayout, require_layout
from flashdsa.errors import ArgumentValueError
from flashdsa.ops.index_k_cache import read_index_k_cache, write_index_k_cache
from flashdsa.ops.indexer import dsa_topk_indexer
from flashdsa.ops.prefill import DSA_TOPK_PREFILL, TopkPrefillOperands, dsa_topk_prefill
from flashdsa.problem import INDEX_HEAD_DIM, INDEX_TOKEN_BYTES, INDEX_TOPK, PAGE_SIZE


def context_parallel_topk_indexer(
    q_index_fp8: Tensor,
    k_index_local: Tensor,
    weights: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    layout: SequenceLayout,
    topk: int = INDEX_TOPK,
    query_chunk: int = 4096,
    sorted: bool = False,
    query_rows: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The indexer of this rank's queries over the keys of all ranks, causal.

    The packed pages are gathered (132 bytes a token). Each query sees the keys of its document up
    to itself, and selects those that one process would, ties by the smallest token: by
    `dsa_topk_prefill`, as queries share the keys, and where no backend serves that, or the call is
    compiled, by `dsa_topk_indexer` from the pages.

    Args:
        q_index_fp8: (S, H, 128) float8_e4m3fn, from `quantize_index_q`; S = num_local unless
            `query_rows` says otherwise. Rows of padding are ignored.
        k_index_local: (num_local, 128) bf16 or fp32, quantised here; or the rank's packed pages
            (num_local / 64, 64, 1, 132) uint8 or int8, as `write_index_k_cache` wrote them.
        weights: (S, H) fp32, with the queries' scales folded in.
        mesh: a 1-D DeviceMesh or a ProcessGroup.
        layout: of the tokens on the ranks.
        topk: width of the result.
        query_chunk: queries that are scored at a time from the pages; bounds the workspace.
        sorted: descending score, ties by token; otherwise a backend's own order.
        query_rows: (S,) int64, the local row of each query, where not every row asks; S may differ
            between ranks. A query of a row outside [0, num_local) sees no key.
        backend: "auto" or the name of one.

    Returns:
        (S, topk) int32: rows of the gathered kv, -1 where fewer keys are seen and in rows
        of padding; `layout.token_of` gives their tokens. A DTensor where the arguments are.

    Raises:
        TypeError, ValueError: a wrong argument here or on another rank, or ranks that differ, and
            where values are checked (on the CPU, or with FLASHDSA_CHECK=1) a row of `query_rows`
            outside [0, num_local); on every rank, before anything is sent.
        NotImplementedError: no implementation serves the call.
    """
    group = group_of(mesh, "context_parallel_topk_indexer")
    arguments = {"q_index_fp8": q_index_fp8, "k_index_local": k_index_local, "weights": weights}
    if torch.compiler.is_compiling():
        (q, k, folded), spread = local_parts(mesh, arguments)
        own_pages = _pages_of(k, layout, backend)
    else:
        with agreement(group, k_index_local, k="k_index_local") as facts:
            (q, k, folded), spread = local_parts(mesh, arguments)
            _check(q, k, folded, layout, process_group(mesh), query_rows)
            checks.require_positive("topk", topk)
            checks.require_positive("query_chunk", query_chunk)
            checks.require_backend("backend", backend)
            facts |= _facts(q, k, folded, layout)
            facts |= {"topk": str(topk), "sorted": str(bool(sorted)), "backend": backend}
            own_pages = _pages_of(k, layout, backend)
    others = {"q_index_fp8": q, "weights": folded}
    options = f"topk={topk} sorted={sorted} backend={backend} layout={layout.fingerprint}"
    local = agreed(own_pages, others, "pages", options, group)
    pages = all_gather(local, group)
    indices = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    block_table = layout.block_table.to(q.device)
    seq_lens, documents = layout.seq_lens.to(q.device), layout.documents.to(q.device)
    if query_rows is not None:
        own = query_rows.clamp(0, layout.num_local - 1)
        seq_lens, documents = seq_lens[own].masked_fill(own != query_rows, 0), documents[own]
    starts = torch.tensor(layout.cu_seqlens, dtype=torch.int32, device=q.device)[documents]
    none = q.new_empty(0, INDEX_HEAD_DIM), folded.new_empty(0)
    shared = TopkPrefillOperands(
        q, none[0], folded, starts + seq_lens, indices, starts, k_scale=none[1]
    )
    if not torch.compiler.is_compiling() and is_served(
        DSA_TOPK_PREFILL, shared, backend, sorted=sorted
    ):
        keys, k_scale = read_index_k_cache(pages, layout.rows.to(q.device))
        dsa_topk_prefill(
            q,
            keys,
            folded,
            starts,
            shared.ends,
            indices,
            k_scale=k_scale,
            sorted=sorted,
            backend=backend,
        )
        return as_dtensor(layout.key_row(indices), spread)
    for first in range(0, q.shape[0], query_chunk):
        chunk = slice(first, min(first + query_chunk, q.shape[0]))
        rows = chunk.stop - chunk.start
        # One document: every query has the same table, which is not copied for each.
        table = (
            block_table.expand(rows, -1) if len(block_table) == 1 else block_table[documents[chunk]]
        )
        dsa_topk_indexer(
            q[chunk],
            pages,
            folded[chunk],
            seq_lens[chunk],
            table,
            indices[chunk],
            sorted=sorted,
            backend=backend,
        )
    return as_dtensor(indices, spread)


def _pages_of(k: Tensor, layout: SequenceLayout, backend: str) -> Tensor:
    """The rank's packed pages: `k` itself, or written from the keys; padding stays zero."""
    if k.dim() == 4:
        return k
    num_pages = layout.num_local // PAGE_SIZE
    cache = torch.zeros(
        num_pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8, device=k.device
    )
    positions = layout.positions.to(k.device)
    slots = torch.arange(layout.num_local, device=k.device).masked_fill(positions < 0, -1)
    write_index_k_cache(k, slots, cache, backend=backend)
    return cache


def _check(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    query_rows: Tensor | None,
) -> None:
    """Everything about shapes, dtypes and devices that can be wrong on this rank."""
    for name, value in (("q_index_fp8", q), ("k_index_local", k), ("weights", weights)):
        checks.require_tensor(name, value)
    require_layout(layout)
    layout.require_place(group)
    rows, why = layout.num_local, " (rows as the layout says)"
    checks.require_dtype("q_index_fp8", q, torch.float8_e4m3fn)
    heads = q.shape[1] if q.dim() == 3 else 1
    queries, of_queries = rows, why
    if query_rows is not None:
        checks.require_tensor("query_rows", query_rows)
        checks.require_dtype("query_rows", query_rows, torch.int64)
        checks.require_rank("query_rows", query_rows, (1,), "[S]")
        checks.require_device("query_rows", query_rows, q.device, "q_index_fp8")
        _require_rows(query_rows, rows)
        queries, of_queries = query_rows.shape[0], " (S of query_rows)"
    checks.require_shape(
        "q_index_fp8", q, (queries, heads, INDEX_HEAD_DIM), "[S, H, 128]", of_queries
    )
    checks.require_dense_rows("q_index_fp8", q)
    checks.require_dtype("weights", weights, torch.float32)
    checks.require_shape("weights", weights, (queries, heads), "[S, H]", of_queries)
    checks.require_dense_rows("weights", weights)
    if k.dim() == 4:
        checks.require_dtype("k_index_local", k, torch.uint8, torch.int8)
        packed = (rows // PAGE_SIZE, PAGE_SIZE, 1, INDEX_TOKEN_BYTES)
        checks.require_shape("k_index_local", k, packed, "[num_local / 64, 64, 1, 132]", why)
    else:
        checks.require_dtype("k_index_local", k, torch.bfloat16, torch.float32)
        checks.require_shape("k_index_local", k, (rows, INDEX_HEAD_DIM), "[num_local, 128]", why)
    checks.require_device("k_index_local", k, q.device, "q_index_fp8")
    checks.require_device("weights", weights, q.device, "q_index_fp8")
    require_device_of_group("k_index_local", k.device, group)


def _require_rows(query_rows: Tensor, num_local: int) -> None:
    """Require that each is a row of this rank, if values are checked."""
    if not checks.are_values_read(query_rows):
        return
    outside = (query_rows < 0) | (query_rows >= num_local)
    if bool(outside.any()):
        first = int(query_rows[outside][0])
        raise ArgumentValueError(f"query_rows: expected values in [0, {num_local}); got {first}")


def _facts(q: Tensor, k: Tensor, weights: Tensor, layout: SequenceLayout) -> dict[str, str]:
    return {
        "q_index_fp8": describe(q, of_each_row=True),
        "k_index_local": describe(k),
        "weights": describe(weights, of_each_row=True),
        "layout": layout.summary,
    }
