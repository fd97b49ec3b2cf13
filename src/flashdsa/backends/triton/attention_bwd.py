"""Sparse MLA's backward by Triton: dKV by atomic additions, or by sums in the order of slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.attention import LOG2_E, Source, sources_of
from flashdsa.backends.triton.launch import launch, tile

if TYPE_CHECKING:
    from flashdsa.backends.registry import Serve
    from flashdsa.ops.attention_backward import MlaBwdOperands

WORKSPACE_BYTES = 2**30
"""Rows of slots at a time, if sums are ordered; those of one query may be more."""
Pair = tuple[Tensor, Tensor]


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
    delta = (x.O.float() * do.float()).sum(-1)
    lse, d_sink = x.lse, x.lse.new_empty(0)
    if x.attn_sink is not None:
        lse, d_sink = sink_backward(lse, x.attn_sink, delta)
    first, second, constants = sources_of(x, index_block)
    del constants["FORM"], constants["EXTRA_FORM"]
    constants |= {"D_V": d_v, "D_ROPE": d_qk - d_v, "ORDERED": deterministic}
    lse2 = (lse * LOG2_E).contiguous()
    call = Call(q, do, lse2, delta, torch.zeros_like(q), (first, second), sm_scale, constants)
    dkv = x.lse.new_zeros(first.rows, d_qk)
    dextra = x.lse.new_zeros(second.rows if constants["EXTRA"] else 0, d_qk)
    if len(q) and first.slots + second.slots:
        if deterministic:
            _add_in_order(runner, call, (dkv, dextra))
        else:
            _add(runner, call, (dkv, dextra), None)
    return call.dq, dkv.to(dkv_dtype), dextra.to(dkv_dtype), d_sink


def _add(runner: Runner, call: Call, gradients: Pair, first_head: int | None) -> None:
    """Launch a program for each query and each block of heads, or that from `first_head` on."""
    from flashdsa.kernels.triton import attention_bwd

    (num_queries, num_heads, _), (first, second) = call.q.shape, call.sources
    shape = tile("backward", runner.capability, num_heads)
    blocks = -(-num_heads // shape.heads) if first_head is None else 1
    launch(
        runner,
        attention_bwd.backward,
        (num_queries, blocks, 1),
        (*call[:5], *gradients, first.kv, first.ids, first.limits, second.kv, second.ids,
         second.limits, num_heads, first_head or 0, first.rows, first.width, first.slots,
         second.rows, second.width, second.slots, call.sm_scale * LOG2_E, call.sm_scale),
        shape, BLOCK_H=shape.heads, BLOCK_K=shape.keys, **call.constants,
    )  # fmt: skip


def _add_in_order(runner: Runner, call: Call, gradients: Pair) -> None:
    """Add as many queries' rows at a time as fit the workspace, in the order of their slots.

    How many these are follows from sizes alone: sums are the same on every GPU of a tile's shape.
    """
    num_queries, num_heads, d_qk = call.q.shape
    slots = sum(source.slots for source in call.sources)
    step = min(max(1, WORKSPACE_BYTES // (4 * d_qk * slots)), num_queries)
    of_first, of_second = (
        runner.empty(step, source.slots, d_qk, dtype=torch.float) for source in call.sources
    )
    constants = call.constants
    for part in call.parts(step):
        of_first.zero_()
        of_second.zero_()
        for head in range(0, num_heads, tile("backward", runner.capability, num_heads).heads):
            _add(runner, part, (of_first, of_second), head)
        first, second = part.sources
        add_sums(runner, first, of_first, gradients[0], constants)
        if constants["EXTRA"]:
            of_extra = {"LIST": constants["EXTRA_LIST"], "ROWS_OF_ID": 1}
            add_sums(runner, second, of_second, gradients[1], constants | of_extra)


def add_sums(
    runner: Runner, source: Source, parts: Tensor, total: Tensor, constants: dict[str, Any]
) -> None:
    """Add the parts (queries, slots, d_qk) of slots to the rows of `total` that they name."""
    from flashdsa.kernels.triton import attention_bwd

    if not source.slots:
        return
    block, slot = constants["ROWS_OF_ID"], torch.arange(source.slots, device=parts.device)
    if constants["LIST"] == "range":
        row = source.ids.clamp(min=0) + slot
        valid = row < source.limits[:, None].clamp(max=source.rows)
    else:
        ids = source.ids[:, slot // block].long()
        row = ids * block + slot % block
        valid = (ids >= 0) & (row < source.rows)
        if constants["LIST"] == "lengths":
            valid &= slot < source.limits[:, None].long() * block
    shape = tile("sum of rows", runner.capability, 1)
    rows, order = row.where(valid, source.rows).flatten().sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(source.rows + 1, device=rows.device))
    launch(
        runner,
        attention_bwd.sum_rows,
        (source.rows, 1, 1),
        (parts, order, starts, total),
        shape,
        BLOCK=shape.keys,
        D_V=constants["D_V"],
        D_ROPE=constants["D_ROPE"],
    )
