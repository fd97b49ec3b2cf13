"""Sparse MLA by Triton: slots, tiles, splits, and the launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import readable
from flashdsa.backends.packed_rows import aligned_pages, form_of, num_rows
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.launch import FEW_HEADS, fenced, for_lists, has_fp8, launch, tile
from flashdsa.row_formats import RowFormat

if TYPE_CHECKING:
    from flashdsa.backends.registry import Serve
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands

LOG2_E = math.log2(math.e)
MOST_SPLITS = 32


class Source(NamedTuple):
    """Rows and each query's list of them, as the kernels take it."""

    kv: Tensor
    stride: int
    """Elements from row to row; of packed rows bytes from page to page."""
    page_rows: int
    rows: int
    ids: Tensor
    """(S, width) ids, or (S,) first rows."""
    limits: Tensor
    """(S,) lengths, or ends of ranges; `ids` where there are none."""
    width: int
    """Ids of a query's list; 0 where there are no rows, whatever the list has."""
    slots: int
    """The most that a query has: the width times the rows of an id, or a range's longest."""


def _source(
    kv: Tensor,
    ids: Tensor,
    length: Tensor | None,
    ends: Tensor | None,
    block: int,
    form: RowFormat | None,
) -> tuple[Source, dict[str, Any]]:
    """A source, and what the kernels are compiled for."""
    pages = readable(kv) if form is None else aligned_pages(kv.view(torch.uint8))
    rows = num_rows(kv)
    place = pages, pages.stride(0), 1 if form is None else pages.shape[1], rows
    block = max(1, min(block, rows))  # any id but 0 stays invalid
    kind = "whole" if length is None else "lengths"
    # Kernels count slots from the width that they get, which sizes their workspace here.
    limits, width = length, ids.shape[1] if rows else 0
    slots = width * block
    if ends is not None:
        kind, limits, width, slots = "range", ends, 1, rows
    ids = ids.contiguous()
    limits = ids if limits is None else limits.contiguous()
    constants = {"LIST": kind, "ROWS_OF_ID": block, "FORM": form}
    return Source(*place, ids, limits, width, slots), constants


def sources_of(
    x: Any, block: int, kv_format: str | None = None
) -> tuple[Source, Source, dict[str, Any]]:
    """kv and extra_kv, or kv again without a slot, and what the kernels are compiled for."""
    lists = x.indices, x.topk_length, x.ends
    first, constants = _source(x.kv, *lists, block, form_of(x.kv, kv_format))
    second, extra = first._replace(slots=0), constants
    if x.extra_kv is not None:
        lists = x.extra_indices, x.extra_topk_length, x.extra_ends
        second, extra = _source(x.extra_kv, *lists, 1, form_of(x.extra_kv, kv_format))
    constants = {
        **constants,
        "EXTRA": x.extra_kv is not None,
        "EXTRA_LIST": extra["LIST"],
        "EXTRA_FORM": extra["FORM"],
    }
    return first, second, constants


def without_gaps(
    runner: Runner, first: Source, second: Source, constants: dict[str, Any]
) -> tuple[Source, Source, dict[str, Any]]:
    """The same sources whose lists of ids have the valid ones alone, in their order."""
    from flashdsa.kernels.triton import attention

    shape, sources, kinds = tile("valid ids", runner.capability), [], {}
    lists = (first, "LIST", constants["ROWS_OF_ID"]), (second, "EXTRA_LIST", 1)
    for source, name, block in lists:
        kind = constants[name]
        if kind != "range" and source.slots:
            queries = len(source.ids)
            ids = runner.empty(*source.ids.shape, dtype=torch.int32)
            counts = runner.empty(queries, dtype=torch.int32)
            launch(
                runner,
                attention.valid_ids,
                (queries, 1, 1),
                (source.ids, source.limits, ids, counts, source.rows, source.width),
                shape, BLOCK=shape.keys, LIST=kind, ROWS_OF_ID=block,
            )  # fmt: skip
            source, kind = source._replace(ids=ids, limits=counts), "lengths"
        sources.append(source)
        kinds[name] = kind
    return sources[0], sources[1], constants | kinds


def bind(
    runner: Runner, operands: SparseMlaOperands, *, d_v: int, max_logits: bool, **choices: Any
) -> Serve:
    """Serve `sparse_mla_fwd`: O (S, H, d_v), lse and, if asked for, max_logits (S, H)."""

    def serve(given: Sequence[Any]) -> tuple[Tensor, ...]:
        x: Any = type(operands)(*given)
        rows = x.q.shape[:2]
        out, lse = runner.empty(*rows, d_v, dtype=x.q.dtype), runner.empty(*rows, dtype=torch.float)
        largest = runner.empty(*(rows if max_logits else (0,)), dtype=torch.float)
        asked = largest if max_logits else None
        _forward(runner, x.into(*x[:3], out, lse, asked, *x[3:]), **choices)
        return out, lse, largest

    return runner.on_device(serve)


def bind_out(runner: Runner, operands: SparseMlaOutOperands, **choices: Any) -> Serve:
    """Serve `sparse_mla_fwd_out`."""
    kind = type(operands)
    return runner.on_device(lambda given: _forward(runner, kind(*given), **choices))


def _forward(
    runner: Runner,
    x: SparseMlaOutOperands,
    *,
    sm_scale: float,
    index_block: int,
    batch_invariant: bool,
    kv_format: str | None = None,
) -> None:
    """out, lse and, if asked for, max_logits, written."""
    from flashdsa.kernels.triton import attention

    (num_queries, num_heads, d_qk), d_v = x.q.shape, x.out.shape[2]
    first, second, constants = sources_of(x, index_block, kv_format)
    slots = first.slots + second.slots
    if not num_queries or not slots:
        write_without_keys(x)
        return
    scales = {form.scale for name in ("FORM", "EXTRA_FORM") if (form := constants[name])}
    kernel = "packed" if scales else "forward"
    if num_heads <= FEW_HEADS:
        kernel += ", few heads, fp32 scales" if "fp32" in scales else ", few heads"
    shape = for_lists(tile(kernel, runner.capability), constants)
    blocks = -(-num_heads // shape.heads)
    splits = 1
    if not batch_invariant:
        if num_queries * blocks >= runner.num_sms:
            first, second, constants = without_gaps(runner, first, second, constants)
        wanted = min(runner.num_sms // (num_queries * blocks), -(-slots // shape.keys))
        splits = max(min(wanted, MOST_SPLITS), 1)
    rows = num_queries * num_heads
    parts = runner.empty(splits * rows * (d_v + 2) if splits > 1 else 1, dtype=torch.float)
    written = x.out, x.lse, torch.empty_like(x.lse) if x.max_logits is None else x.max_logits
    sink = x.lse if x.attn_sink is None else x.attn_sink.contiguous()
    constants |= {"D_V": d_v, "SINK": x.attn_sink is not None, "SPLIT": splits > 1}
    constants |= {"PARTS": shape.parts, "FP8": has_fp8(runner), "FENCED": fenced(runner)}
    launch(
        runner,
        attention.forward,
        (num_queries * blocks, splits, 1),
        (
            readable(x.q),
            *first[:-1],
            *second[:-1],
            sink,
            *written,
            parts,
            num_heads,
            sm_scale * LOG2_E,
        ),
        shape,
        BLOCK_H=shape.heads,
        BLOCK_K=shape.keys,
        D_ROPE=d_qk - d_v,
        **constants,
    )
    if splits > 1:
        launch(
            runner,
            attention.merge,
            (rows, 1, 1),
            (parts, sink, *written, rows, num_heads, splits),
            shape._replace(warps=4, stages=1),
            BLOCK=MOST_SPLITS,
            **{name: constants[name] for name in ("D_V", "SINK")},
        )
