"""The indexer's scores in Triton: scale * sum_h weights relu(q . k), over pages or shared keys.

A program holds a tile of keys and goes through neighbouring queries, which see the same ones: those
of a request, or some of a prompt. Keys are the product's rows, so that a thread adds up the heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.packed_rows import e4m3, fence

COLUMNS = tl.constexpr(128)
PAGE = tl.constexpr(64)
KEY_BYTES = tl.constexpr(64 * 128)
NEVER = tl.constexpr(-1)
"""Bits of a score that is not to be chosen: those of a NaN that no score has."""
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def range_of(begins, ends, row, inside, width, FROM_0: tl.constexpr):
    """The first position of each of these rows, and that behind the last one, within the width."""
    end = tl.minimum(tl.load(ends + row, mask=inside, other=0), width)
    begin = tl.zeros_like(end)
    if not FROM_0:
        begin = tl.load(begins + row, mask=inside, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), width)
    return begin, tl.maximum(end, begin)


@triton.jit
def query_of(q, row, there, BLOCK_H: tl.constexpr, NUM_HEADS: tl.constexpr):
    """A row's query (BLOCK_H, 128), zeros if it is not `there`."""
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, COLUMNS)
    at = (row.to(tl.int64) * NUM_HEADS + head[:, None]) * COLUMNS + column[None, :]
    return tl.load(q + at, mask=there & (head < NUM_HEADS)[:, None], other=0.0)


@triton.jit
def put(
    wide, tile, scale, seen, token, weights, begins, ends, out, width, row, there,
    BLOCK_H: tl.constexpr, NUM_HEADS: tl.constexpr, FROM_0: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Write the scores of a row's query `wide` and a tile of keys (BLOCK_T, 128)."""
    head = tl.arange(0, BLOCK_H)
    inside = there & (head < NUM_HEADS)
    weight = tl.load(weights + row.to(tl.int64) * NUM_HEADS + head, mask=inside, other=0.0)
    fence(FENCED)
    dots = tl.maximum(tl.dot(tile, tl.trans(wide)), 0.0, propagate_nan=tl.PropagateNan.ALL)
    terms = dots * weight[None, :]
    if BLOCK_H > NUM_HEADS:
        terms = tl.where((head < NUM_HEADS)[None, :], terms, 0.0)
    total = tl.sum(terms, 1) * scale
    bits = tl.where(total == total, total.to(tl.int32, bitcast=True), NAN)
    begin, end = range_of(begins, ends, row, there, width, FROM_0)
    to = out + row.to(tl.int64) * width + token
    tl.store(to, tl.where(seen, bits, NEVER), mask=(token >= begin) & (token < end))


@triton.jit(do_not_specialize=["num_rows", "unscored", "num_entries"])
def score(
    q, keys, scales, weights, begins, ends, table, out, num_rows, width: tl.int32, unscored,
    num_entries, page_stride, table_stride, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_HEADS: tl.constexpr, RUN: tl.constexpr, BLOCK_Q: tl.constexpr, TABLE_PAGE: tl.constexpr,
    SCALED: tl.constexpr, FROM_0: tl.constexpr, NARROW: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Scores (S, width) in each row's range, of ceil(S / RUN) times some programs, which take tiles
    of the keys of RUN rows by turns. Ranges of at most `unscored` keys need none.

    BLOCK_Q rows are copied while those before are multiplied: wgmma's fence waits for all copies
    on their way, so it pays to copy several. Of no more rows the queries stay, and keys are copied
    ahead, for which a loop must have none in it.

    Args:
        q: (S, NUM_HEADS, 128). weights: (S, NUM_HEADS) fp32. begins, ends: (S,) int32.
        keys: (width, 128), or with TABLE_PAGE bytes of pages of 64 keys and scales, at
            `page_stride`; NARROW: e4m3 bytes that become bf16.
        scales: fp32, with TABLE_PAGE the same memory as keys.
        table: (S / RUN, width / TABLE_PAGE) int32, rows at `table_stride`, whose entries name
            TABLE_PAGE keys each; 0: keys are not in pages.
        out: bits of fp32: `NEVER` where an entry is none of num_entries, NAN of any NaN. Nothing is
            written outside a row's range.
    """
    group = tl.program_id(0)
    first = group * RUN
    row = first + tl.arange(0, triton.next_power_of_2(RUN))
    own = (row < first + RUN) & (row < num_rows)
    first_key, last_key = range_of(begins, ends, row, own, width, FROM_0)
    scored = own & (last_key - first_key > unscored)
    low = tl.min(tl.where(scored, first_key, width))
    high = tl.max(tl.where(scored, last_key, 0))
    behind = tl.minimum(first + RUN, num_rows)
    kept = ()
    if RUN <= BLOCK_Q:
        for one in tl.static_range(RUN):
            kept += (query_of(q, first + one, first + one < behind, BLOCK_H, NUM_HEADS),)
    step = tl.num_programs(1) * BLOCK_T
    for before in range(low // BLOCK_T * BLOCK_T + tl.program_id(1) * BLOCK_T, high, step):
        token = before + tl.arange(0, BLOCK_T)
        seen = (token >= low) & (token < high)
        at, of_scale = token.to(tl.int64) * COLUMNS, token.to(tl.int64)
        if TABLE_PAGE > 0:
            entries = table + group.to(tl.int64) * table_stride
            entry = tl.load(entries + token // TABLE_PAGE, mask=seen, other=-1)
            seen = (entry >= 0) & (entry < num_entries)
            slot = entry.to(tl.int64) * TABLE_PAGE + token % TABLE_PAGE
            page = slot // PAGE * page_stride
            at, of_scale = page + slot % PAGE * COLUMNS, (page + KEY_BYTES) // 4 + slot % PAGE
        at = at[:, None] + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(keys + at, mask=seen[:, None], other=0.0)
        if NARROW:
            tile = e4m3(tile, False).to(tl.bfloat16)
        scale = tl.full([BLOCK_T], 1.0, tl.float32)
        if SCALED:
            scale = tl.load(scales + of_scale, mask=seen, other=0.0)
        if RUN <= BLOCK_Q:
            for one in tl.static_range(RUN):
                put(
                    kept[one], tile, scale, seen, token, weights, begins, ends, out, width,
                    first + one, first + one < behind, BLOCK_H, NUM_HEADS, FROM_0, FENCED,
                )  # fmt: skip
        else:
            for some in range(first, behind, BLOCK_Q):
                for one in tl.static_range(BLOCK_Q):
                    there = some + one < behind
                    wide = query_of(q, some + one, there, BLOCK_H, NUM_HEADS)
                    put(
                        wide, tile, scale, seen, token, weights, begins, ends, out, width,
                        some + one, there, BLOCK_H, NUM_HEADS, FROM_0, FENCED,
                    )  # fmt: skip
