"""Decode with the cache spread over the ranks: queries and partial results travel, rows do not.

Page j of a request lies on rank ``j % ranks``, as its local page ``j // ranks``. Each rank attends
to its own rows with all heads; partial results are merged by their lse.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.backends.catalog import registry
from flashdsa.dispatch import checks
from flashdsa.dispatch.autograd import has_tangent
from flashdsa.dispatch.transforms import as_autocast_casts
from flashdsa.distributed.agree import agreement
from flashdsa.distributed.collectives import all_gather, all_to_all
from flashdsa.distributed.group import (
    Group,
    describe,
    group_of,
    process_group,
    require_device_of_group,
)
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.ops.attention import SPARSE_MLA_FWD, SparseMlaOperands, sparse_mla_fwd
from flashdsa.ops.blocks import valid_first
from flashdsa.ops.indexer import IndexerOperands, indexer_logits, topk_indices
from flashdsa.ops.merge import merge_attention
from flashdsa.problem import D_V, INDEX_TOPK, INT32_MAX, PAGE_SIZE


def local_seq_lens(seq_lens: Tensor, mesh: DeviceMesh | dist.ProcessGroup) -> Tensor:
    """Tokens of each request on this rank, of `seq_lens` (B,) int32 or int64 in all; same dtype.

    Raises:
        TypeError, ValueError: a wrong argument; where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1), a negative length.
    """
    group = group_of(mesh)
    checks.require_tensor("seq_lens", seq_lens)
    checks.require_dtype("seq_lens", seq_lens, torch.int32, torch.int64)
    if _are_checked(seq_lens) and bool((seq_lens < 0).any()):
        raise ArgumentValueError(f"seq_lens: expected values >= 0; got {int(seq_lens.min())}")
    full = seq_lens // PAGE_SIZE
    pages = (full - group.rank + group.size - 1) // group.size
    last = (full % group.size == group.rank) * (seq_lens % PAGE_SIZE)
    return (pages * PAGE_SIZE + last).to(seq_lens.dtype)


def local_slots(
    positions: Tensor, block_table_local: Tensor, mesh: DeviceMesh | dist.ProcessGroup
) -> Tensor:
    """Slots of this rank's cache, ``page * 64 + offset``, of its tokens among `positions`.

    They come first, in the order of `positions`: attention takes the time of as many.

    Args:
        positions: (B, topk) int32, tokens of each request, -1 for none.
        block_table_local: (B, max_pages) int32, this rank's pages of each request in order.
        mesh: a 1-D DeviceMesh or a ProcessGroup.

    Returns:
        (B, topk) int32, -1 behind them.

    Raises:
        TypeError, ValueError: a wrong argument; where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1), a token of this rank whose page the table lacks. Elsewhere it is left
            out.
    """
    group = group_of(mesh)
    for name, value in (("positions", positions), ("block_table_local", block_table_local)):
        checks.require_tensor(name, value)
        checks.require_dtype(name, value, torch.int32, torch.int64)
    checks.require_rank("positions", positions, (2,), "[B, topk]")
    width = block_table_local.shape[-1] if block_table_local.dim() else 0
    checks.require_shape(
        "block_table_local", block_table_local, (len(positions), width), "[B, max_pages]"
    )
    page = positions.clamp_min(0) // PAGE_SIZE
    place = page // group.size
    mine = (positions >= 0) & (page % group.size == group.rank)
    beyond = mine & (place >= width)
    if _are_checked(positions) and bool(beyond.any()):
        row, column = beyond.nonzero()[0].tolist()
        raise ArgumentValueError(
            f"block_table_local: expected at least {_pages(int(place[row, column]) + 1)} for "
            f"positions[{row}, {column}] = {int(positions[row, column])}; "
            f"got a table of {_pages(width)}"
        )
    if width == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    mine = mine & ~beyond
    place = torch.where(mine, place, 0).long()
    slots = block_table_local.gather(1, place) * PAGE_SIZE + positions % PAGE_SIZE
    packed, _ = valid_first(torch.where(mine, slots, -1).int())
    return packed


def _pages(count: int) -> str:
    return f"{count} page" if count == 1 else f"{count} pages"


def _are_checked(values: Tensor) -> bool:
    """Whether the host reads them."""
    if torch.compiler.is_compiling() or isinstance(values, FakeTensor):
        return False
    return checks.are_values_read(values)


def decode_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_local: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table_local: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    topk: int = INDEX_TOPK,
    backend: str = "auto",
) -> Tensor:
    """The tokens that `flashdsa.dsa_topk_indexer` selects of a cache that is spread over ranks.

    Every rank ranks its own keys; the best of each, 8 bytes a candidate, are exchanged and ranked
    again: exact, ties by the smallest token. Every rank gets the same result.

    Args:
        q_index_fp8: (B, H, 128) float8_e4m3fn, the same on every rank.
        k_index_cache_local: (num_pages, 64, 1, 132) uint8 or int8, this rank's pages.
        weights: (B, H) fp32, the same on every rank.
        seq_lens: (B,) int32, tokens of each request on all ranks together.
        block_table_local: (B, max_pages) int32, this rank's pages of each request in order: its
            pages r, r + ranks, ... on rank r. Width and number of pages may differ between ranks,
            and be 0 on a rank without tokens.
        mesh: a 1-D DeviceMesh or a ProcessGroup.
        topk: width of the result.
        backend: "auto" or the name of one.

    Returns:
        (B, topk) int32 token positions, ascending on the CPU, then -1; `local_slots` makes them
        slots of this rank's cache.

    Raises:
        TypeError, ValueError: as for `context_parallel_topk_indexer`, and where values are checked
            (on the CPU, or with FLASHDSA_CHECK=1) a negative length, a table too narrow for its
            length, a page id outside the cache.
        NotImplementedError: no implementation serves the call.
    """
    group = group_of(mesh, "decode_topk_indexer")
    with agreement(
        group, q_index_fp8, k_index_cache_fp8="k_index_cache_local", block_table="block_table_local"
    ) as facts:
        checks.require_positive("topk", topk)
        checks.require_backend("backend", backend)
        facts |= {"topk": str(topk), "backend": backend}
        alike = {"q_index_fp8": q_index_fp8, "weights": weights, "seq_lens": seq_lens}
        for name, value in alike.items():
            checks.require_tensor(name, value)
            facts[name] = describe(value)
        checks.require_tensor("k_index_cache_local", k_index_cache_local)
        require_device_of_group(
            "k_index_cache_local", k_index_cache_local.device, process_group(mesh)
        )
        x = _with_a_page(
            IndexerOperands(
                q_index_fp8,
                k_index_cache_local,
                weights,
                local_seq_lens(seq_lens, mesh).int(),
                block_table_local,
            )
        )
        scores = indexer_logits(*x, x.block_table.shape[1] * PAGE_SIZE, backend=backend)
        local = topk_indices(scores, x.seq_lens, topk, backend=backend)
    best = scores.gather(1, local.clamp_min(0).long())
    page = local // PAGE_SIZE * group.size + group.rank
    token = torch.where(local < 0, INT32_MAX, page * PAGE_SIZE + local % PAGE_SIZE).int()
    # Candidates in the order of tokens: the tie rule of the second ranking is that of the first.
    scores, token = _candidates(best, token, group)
    count = (token < INT32_MAX).sum(1).int()
    chosen = topk_indices(scores, count, topk, backend=backend)
    picked = token.gather(1, chosen.clamp_min(0).long())
    return torch.where(chosen < 0, -1, picked)


def _with_a_page(x: IndexerOperands) -> IndexerOperands:
    """Return operands with a table of at least one page; no token is read of an added page."""
    checks.require_tensor("block_table", x.block_table)
    checks.require_rank("block_table", x.block_table, (2,), "[B, max_pages]")
    if x.block_table.shape[1]:
        return x
    if _are_checked(x.seq_lens) and bool(x.seq_lens.any()):
        row = int(x.seq_lens.nonzero()[0])
        raise ArgumentValueError(
            f"block_table: expected at least 1 page, as {int(x.seq_lens[row])} tokens of request "
            f"{row} are on this rank; got a table of 0 pages"
        )
    page = x.block_table.new_zeros(len(x.block_table), 1)
    return x._replace(seq_lens=torch.zeros_like(x.seq_lens), block_table=page)


def _candidates(scores: Tensor, tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Scores and tokens (B, n) of this rank -> those of all ranks (B, ranks * n), by token."""
    pair = torch.stack([scores.view(torch.int32), tokens])  # [2, B, n]
    gathered = all_gather(pair, group).unflatten(0, (group.size, 2))  # [ranks, 2, B, n]
    all_scores, all_tokens = gathered.permute(1, 2, 0, 3).flatten(2)  # each [B, ranks * n]
    in_order = all_tokens.sort(dim=1)
    return all_scores.gather(1, in_order.indices).view(torch.float32), in_order.values


def decode_sparse_mla(
    q_local: Tensor,
    kv_local: Tensor,
    slots_local: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    attn_sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a cache that is spread over the ranks, heads being split over them too.

    Every rank attends with all heads to its own rows; partial results go to the rank of their heads
    and are merged by lse, in fp32 and the order of ranks. Not differentiable: a call that would
    need a derivative is refused.

    Args:
        q_local: (B, H / ranks, d_qk), this rank's heads of every query.
        kv_local: this rank's cache, as `flashdsa.sparse_mla_fwd` takes it.
        slots_local: (B, topk) int32, slots of this rank's cache, then -1; see `local_slots`.
        mesh: a 1-D DeviceMesh or a ProcessGroup.
        d_v, sm_scale, backend: as for `flashdsa.sparse_mla_fwd`.
        attn_sink: (H / ranks,) fp32, of this rank's heads.

    Returns:
        O (B, H / ranks, d_v) in q's dtype, or autocast's; the partial results are rounded to it. 0
        where no rank has a row.

    Raises:
        TypeError, ValueError: as for `context_parallel_sparse_mla`.
        NotImplementedError: no implementation serves the call, or an input here requires a gradient
            or has a tangent; on other ranks it is a ValueError.
    """
    group = group_of(mesh, "decode_sparse_mla")
    with agreement(group, q_local, q="q_local", kv="kv_local", indices="slots_local") as facts:
        checks.require_tensor("q_local", q_local)
        checks.require_rank("q_local", q_local, (3,), "[B, H / ranks, d_qk]")
        checks.require_tensor("slots_local", slots_local)
        shape = (q_local.shape[0], slots_local.shape[-1] if slots_local.dim() else 0)
        checks.require_shape("slots_local", slots_local, shape, "[B, topk]", ", as q_local says")
        require_device_of_group("q_local", q_local.device, process_group(mesh))
        scale = checks.scale_or_default(sm_scale, q_local)
        x = _checked(
            SparseMlaOperands(as_autocast_casts(q_local), kv_local, slots_local, None, attn_sink),
            {"d_v": d_v, "sm_scale": scale},
            group,
            backend,
        )
        _refuse_derivatives(q_local=q_local, kv_local=kv_local, attn_sink=attn_sink)
        facts |= {"d_v": str(d_v), "sm_scale": str(scale), "backend": backend}
        facts |= {"q_local": describe(x.q), "slots_local": describe(slots_local)}
    q = all_gather(x.q.transpose(0, 1), group).transpose(0, 1).contiguous()  # all heads
    out, lse = sparse_mla_fwd(
        q, x.kv, x.indices, topk_length=x.topk_length, d_v=d_v, sm_scale=scale, backend=backend
    )
    sizes = (group.size, q_local.shape[1])
    outs = all_to_all(out.transpose(0, 1), group).unflatten(0, sizes)  # [ranks, H / ranks, B, d_v]
    lses = all_to_all(lse.transpose(0, 1), group).unflatten(0, sizes)
    merged, total = merge_attention(outs, lses)
    merged, total = merged.transpose(0, 1), total.transpose(0, 1)
    if attn_sink is None:
        return merged.contiguous()
    share = (total - attn_sink).sigmoid().masked_fill(total == math.inf, 1)
    return (merged * share[..., None]).to(x.q.dtype)


def _used_slots(indices: Tensor) -> Tensor:
    """Slots of each list (B, topk) up to its last one that is not negative, (B,) int32. Kernels
    share out no others."""
    number = torch.arange(1, indices.shape[1] + 1, device=indices.device, dtype=torch.int32)
    used = torch.where(indices < 0, 0, number)
    return used.amax(1) if len(number) else used.sum(1, dtype=torch.int32)


def _checked(
    x: SparseMlaOperands, scalars: dict[str, float], group: Group, backend: str
) -> SparseMlaOperands:
    """The operands in the table's form, and lengths; a backend serves them with the heads of all
    ranks."""
    x = SPARSE_MLA_FWD.normalised(x)
    x = x._replace(kv=as_autocast_casts(x.kv))
    parameters = SPARSE_MLA_FWD.filled(x, {**scalars, "backward_backend": backend})
    sizes = SPARSE_MLA_FWD.check(x, parameters)
    sizes["H"] *= group.size
    x = x._replace(topk_length=_used_slots(x.indices))
    without_sink = x._replace(attn_sink=None)
    registry.select(SPARSE_MLA_FWD.problem(without_sink, parameters, sizes), backend)
    return x


def _refuse_derivatives(**inputs: Tensor | None) -> None:
    """Raise UnsupportedError where autograd would record the call, or carry a tangent through."""
    for name, one in inputs.items():
        if checks.wants_gradient([one]):
            asks = f"{name} requires one; call under torch.no_grad(), or detach it"
        elif has_tangent(one):
            asks = f"{name} has a tangent"
        else:
            continue
        raise UnsupportedError(f"decode_sparse_mla: has no gradient, but {asks}")
