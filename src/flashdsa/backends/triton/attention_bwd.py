"""Sparse MLA's backward by Triton: dQ, then dKV by atomic additions or by sums in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.attention import LOG2_E, Source, sources_of, without_gaps
from flashdsa.backends.triton.launch import FEW_HEADS, fenced, for_lists, launch, tile

if TYPE_CHECKING:
    from flashdsa.backends.registry import Serve
    from flashdsa.ops.attention_backward import MlaBwdOperands

WORKSPACE_BYTES = 2**29
"""P and dS of queries at a time, and as much again of rows if sums are ordered; those of one query
may be more."""
OF_LIST = ("D_V", "D_ROPE", "LIST", "ROWS_OF_ID")
MOST_BLOCKS = 64
"""Blocks of slots that programs of their own take, at most: lists may be short."""
GROUP_PAIRS, LEAST_GROUPS = 1024, 64
"""Pairs of a query and a head, at most, whose sums over ranges a program adds to rows at once; few
queries are as many groups."""
SPAN = 256
"""Queries whose ranges a program looks at at a time."""
LEAST_TURNS, PROGRAMS = 4, 1024
"""Programs of a group that take tiles of rows by turns, at least, as a window of 128 has three or
four; and of all groups, if that is more."""


class Call(NamedTuple):
    """Operands by query, the two sources, and what the kernels are compiled for."""

    q: Tensor
    do: Tensor
    lse2: Tensor
    """In base 2, with the sink."""
    delta: Tensor
    dq: Tensor
    sources: tuple[Source, Source]
    sm_scale: float
    constants: dict[str, Any]

    def parts(self, step: int) -> Iterator[Call]:
        """The same of `step` queries at a time."""
        for at in range(0, len(self.q), step):
            these = slice(at, at + step)
            first, second = (
                one._replace(ids=one.ids[these], limits=one.limits[these]) for one in self.sources
            )
            own = {name: getattr(self, name)[these] for name in self._fields[:5]}
            yield self._replace(**own, sources=(first, second))


def bind(runner: Runner, operands: MlaBwdOperands, **choices: Any) -> Serve:
    """Serve `mla_bwd`."""
    kind = type(operands)
    return runner.on_device(lambda given: _backward(runner, kind(*given), **choices))


def _backward(
    runner: Runner,
    x: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
    index_block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dKV, dextra_kv and d_sink; those of operands that are not there are empty."""
    d_qk, d_v = x.q.shape[2], x.dO.shape[2]
    q, do = readable(x.q), readable(x.dO)
    delta = _products(runner, readable(x.O), do)
    lse, d_sink = x.lse, x.lse.new_empty(0)
    if x.attn_sink is not None:
        lse, d_sink = sink_backward(lse, x.attn_sink, delta)
    first, second, constants = sources_of(x, index_block)
    if len(q):
        first, second, constants = without_gaps(runner, first, second, constants)
    del constants["FORM"], constants["EXTRA_FORM"]
    constants |= {"D_V": d_v, "D_ROPE": d_qk - d_v, "FENCED": fenced(runner)}
    lse2 = (lse * LOG2_E).contiguous()
    call = Call(q, do, lse2, delta, torch.zeros_like(q), (first, second), sm_scale, constants)
    dkv = x.lse.new_zeros(first.rows, d_qk)
    dextra = x.lse.new_zeros(second.rows if constants["EXTRA"] else 0, d_qk)
    if len(q) and first.slots + second.slots:
        _differentiate(runner, call, (dkv, dextra), deterministic)
    return call.dq, dkv.to(dkv_dtype), dextra.to(dkv_dtype), d_sink


def _products(runner: Runner, a: Tensor, b: Tensor) -> Tensor:
    """Sums of products over the last of three dimensions, fp32."""
    from flashdsa.kernels.triton.attention_bwd import row_products

    out, rows = runner.empty(*a.shape[:2], dtype=torch.float), a.shape[0] * a.shape[1]
    shape = tile("products", runner.capability)
    if rows:
        launch(
            runner, row_products, (-(-rows // shape.keys), 1, 1), (a, b, out, rows), shape,
            BLOCK=shape.keys, D=a.shape[2],
        )  # fmt: skip
    return out


def _differentiate(
    runner: Runner, call: Call, gradients: tuple[Tensor, Tensor], ordered: bool
) -> None:
    """Write dQ and add to the gradients of rows, of as many queries at a time as fit the workspace,
    which ranges do not take.

    How many these are follows from sizes alone: ordered sums are the same on every GPU of a tile's
    shape.
    """
    from flashdsa.kernels.triton import attention_bwd

    (num_queries, num_heads, d_qk), constants = call.q.shape, call.constants
    few = (FEW_HEADS,) if num_heads <= FEW_HEADS else ()
    of_queries = for_lists(tile("backward", runner.capability, *few), constants)
    of_rows = tile("backward of rows", runner.capability, *few)
    multiple = max(of_queries.keys, of_rows.keys)
    of_extra = {"LIST": constants["EXTRA_LIST"], "ROWS_OF_ID": 1}
    lists = [{name: one[name] for name in OF_LIST} for one in (constants, constants | of_extra)]
    named = [0 if own["LIST"] == "range" else source.slots
             for own, source in zip(lists, call.sources, strict=True)]  # fmt: skip
    padded = [-(-slots // multiple) * multiple for slots in named]
    size = sum(max(4 * num_heads * more, ordered * 4 * d_qk * slots)
               for more, slots in zip(padded, named, strict=True))  # fmt: skip
    step = min(max(1, WORKSPACE_BYTES // size), num_queries) if size else num_queries
    kept = [runner.empty(2 * step * num_heads * slots, dtype=call.q.dtype) for slots in padded]
    blocks = -(-num_heads // of_queries.heads)
    for part in call.parts(step):
        first, second = part.sources
        queries = len(part.q)
        launch(
            runner,
            attention_bwd.of_queries,
            (queries * blocks, 1, 1),
            (*part[:5], *kept, first.kv, first.ids, first.limits, second.kv, second.ids,
             second.limits, num_heads, first.rows, first.width, padded[0], second.rows,
             second.width, padded[1], part.sm_scale * LOG2_E, part.sm_scale),
            of_queries, BLOCK_H=of_queries.heads, BLOCK_K=of_queries.keys, STEP=multiple,
            **constants,
        )  # fmt: skip
        for source, slots, parts, total, own in zip(
            part.sources, padded, kept, gradients, lists, strict=True
        ):
            if not slots:
                continue
            to = total
            if ordered:
                to = runner.empty(queries, source.slots, d_qk, dtype=torch.float)
            programs = min(slots // of_rows.keys, MOST_BLOCKS)
            launch(
                runner,
                attention_bwd.of_rows,
                (queries * programs, 1, 1),
                (part.q, part.do, parts, to, source.ids, source.limits, num_heads, source.rows,
                 source.width, slots, source.slots, programs),
                of_rows, BLOCK_H=of_rows.heads, BLOCK_K=of_rows.keys, ORDERED=ordered,
                FENCED=constants["FENCED"], **own,
            )  # fmt: skip
            if ordered:
                add_sums(runner, source, to, total, own)
    for source, total, own in zip(call.sources, gradients, lists, strict=True):
        if own["LIST"] == "range" and source.slots:
            _add_ranges(runner, call, source, total, ordered)


def _add_ranges(runner: Runner, call: Call, source: Source, total: Tensor, ordered: bool) -> None:
    """Add to the gradients of rows that ranges see, in one launch: groups of queries compute P and
    dS again by tiles of rows. Ordered, what groups found is added up in their order."""
    from flashdsa.kernels.triton.attention_bwd_ranges import of_ranges

    (num_queries, num_heads, _), constants = call.q.shape, call.constants
    shape = tile("backward of ranges", runner.capability)
    tiles = -(-source.rows // shape.keys)
    group = max(1, min(GROUP_PAIRS // num_heads, num_queries // LEAST_GROUPS))
    if ordered:
        most = min(PROGRAMS // tiles, WORKSPACE_BYTES // total.nbytes)
        group = max(group, -(-num_queries // max(1, most)))
    groups = -(-num_queries // group)
    turns = min(tiles, max(LEAST_TURNS, PROGRAMS // groups))
    apart = ordered and groups > 1
    to = total.new_zeros(groups, *total.shape) if apart else total
    launch(
        runner,
        of_ranges,
        (groups * turns, 1, 1),
        (call.q, call.do, call.lse2, call.delta, call.delta.sum(1), source.kv, to, source.ids,
         source.limits, num_queries, num_heads, source.rows, group, turns,
         call.sm_scale * LOG2_E, call.sm_scale),
        shape, BLOCK_P=shape.heads, BLOCK_K=shape.keys, SPAN=SPAN, ORDERED=ordered,
        **{name: constants[name] for name in ("D_V", "D_ROPE", "FENCED")},
    )  # fmt: skip
    if apart:
        place = torch.arange(groups * source.rows, device=total.device)
        starts = torch.arange(0, len(place) + 1, groups, device=total.device)
        _sum_rows(runner, to, place.view(groups, -1).t().contiguous(), starts, total, constants)


def add_sums(
    runner: Runner, source: Source, parts: Tensor, total: Tensor, constants: dict[str, Any]
) -> None:
    """Add the parts (queries, slots, d_qk) of ids' slots to the rows of `total` that they name."""
    if not source.slots:
        return
    block, slot = constants["ROWS_OF_ID"], torch.arange(source.slots, device=parts.device)
    ids = source.ids[:, slot // block].long()
    row = ids * block + slot % block
    valid = (ids >= 0) & (row < source.rows)
    if constants["LIST"] == "lengths":
        valid &= slot < source.limits[:, None].long() * block
    rows, order = row.where(valid, source.rows).flatten().sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(source.rows + 1, device=rows.device))
    _sum_rows(runner, parts, order, starts, total, constants)


def _sum_rows(
    runner: Runner,
    parts: Tensor,
    order: Tensor,
    starts: Tensor,
    total: Tensor,
    constants: dict[str, Any],
) -> None:
    """Add to each row of `total` the parts from `order[starts[row]]` to before the next row's."""
    from flashdsa.kernels.triton import attention_bwd

    shape = tile("sum of rows", runner.capability)
    launch(
        runner,
        attention_bwd.sum_rows,
        (len(total), 1, 1),
        (parts, order, starts, total),
        shape,
        BLOCK=shape.keys,
        D_V=constants["D_V"],
        D_ROPE=constants["D_ROPE"],
    )
