"""Sparse MLA's backward over ranges in Triton: dKV by tiles of rows.

A range needs no list of the queries that see a row: a program looks through the ranges of a group
of queries for those with rows of its tile, and computes P and dS of all their heads again. What it
costs are the rows that queries see, not those that there are; nothing is kept in memory, and rows
get one addition from a group, not one from each query.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.attention_bwd import add_or_write
from flashdsa.kernels.triton.packed_rows import fence


@triton.jit
def rows_of(starts, ends, begin, end, num_rows, SPAN: tl.constexpr):
    """The rows from the first to before the second that ranges of queries begin to end span."""
    low = num_rows
    high = tl.zeros([], tl.int32)
    for at in range(begin, end, SPAN):
        query = at + tl.arange(0, SPAN)
        start = tl.maximum(tl.load(starts + query, mask=query < end, other=0), 0)
        stop = tl.minimum(tl.load(ends + query, mask=query < end, other=0), num_rows)
        low = tl.minimum(low, tl.min(tl.where(start < stop, start, num_rows), 0))
        high = tl.maximum(high, tl.max(tl.where(start < stop, stop, 0), 0))
    return low, high


@triton.jit
def next_queries(starts, ends, sums, at, end, first_row, last_row, SPAN: tl.constexpr):
    """The next queries from `at` on, from the first to before the second, that all see rows from
    `first_row` to before `last_row`; both are the next place to look if none of SPAN does. The
    third is whether their sums are finite: if not, the query is alone."""
    query = at + tl.arange(0, SPAN)
    start = tl.maximum(tl.load(starts + query, mask=query < end, other=0), first_row)
    sees = start < tl.minimum(tl.load(ends + query, mask=query < end, other=0), last_row)
    finite = tl.abs(tl.load(sums + query, mask=query < end, other=0.0)) < float("inf")
    first = tl.min(tl.where(sees, query, at + SPAN), 0)
    last = tl.min(tl.where(sees & finite | (query < first), at + SPAN, query), 0)
    alone = tl.max(((query == first) & (finite == 0)).to(tl.int32), 0)
    return first, tl.maximum(last, first + alone), alone == 0


@triton.jit(do_not_specialize=["num_queries", "num_rows", "group"])
def of_ranges(
    q, do, lse, delta, sums, kv, dkv, starts, ends, num_queries, num_heads: tl.int32, num_rows,
    group, TURNS: tl.int32, scale, sm_scale, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    D_V: tl.constexpr, D_ROPE: tl.constexpr, SPAN: tl.constexpr, ORDERED: tl.constexpr,
    FENCED: tl.constexpr,
):  # fmt: skip
    """dS^T Q + [P^T dO, 0] added to dkv's rows, of TURNS programs for each `group` of queries,
    which take tiles of BLOCK_K rows by turns, and BLOCK_P pairs of a query and a head at a time, of
    queries that they find by SPAN.

    Args:
        q, do, lse, delta, kv, scale: as for `of_queries`. starts, ends: (S,), ranges of any values.
        sums: (S,) fp32, of delta over heads. A query whose sum is not finite is not read, as 0
            times it would reach all rows of a tile; its dS is NaN.
        dkv: (num_rows, D_V + D_ROPE) fp32; ORDERED (groups, num_rows, D_V + D_ROPE), whose rows
            that no query of the group sees are not written.
    """
    number = tl.program_id(0) // TURNS
    begin = number * group
    end = tl.minimum(begin + group, num_queries)
    low, high = rows_of(starts, ends, begin, end, num_rows, SPAN)
    column, others = tl.arange(0, D_V), D_V + tl.arange(0, D_ROPE if D_ROPE > 0 else 16)
    kind: tl.constexpr = kv.dtype.element_ty
    first_tile = low // BLOCK_K + tl.program_id(0) % TURNS
    for tile in range(first_tile, tl.cdiv(high, BLOCK_K), TURNS):
        row = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        last_row = tl.minimum(tile * BLOCK_K + BLOCK_K, num_rows)
        there = (row < num_rows)[:, None]
        place = row.to(tl.int64)[:, None] * (D_V + D_ROPE)
        keys = tl.load(kv + place + column[None, :], mask=there, other=0.0)
        keys_rope = keys
        if D_ROPE > 0:
            keys_rope = tl.load(kv + place + others[None, :], mask=there, other=0.0)
        latent = tl.zeros([BLOCK_K, D_V], tl.float32)
        rope = tl.zeros([BLOCK_K, D_ROPE if D_ROPE > 0 else 16], tl.float32)
        at = begin
        while at < end:
            first, last, finite = next_queries(
                starts, ends, sums, at, end, tile * BLOCK_K, last_row, SPAN
            )
            stop = last * num_heads
            read = tl.where(finite, stop, 0)
            ds = tl.zeros([BLOCK_K, BLOCK_P], kind)
            ds_p = tl.zeros([BLOCK_K, 2 * BLOCK_P], kind)
            for pair in range(first * num_heads, stop, BLOCK_P):
                twice = pair + tl.arange(0, 2 * BLOCK_P) // 2
                wide = twice.to(tl.int64)
                of_q, of_do = q + wide * (D_V + D_ROPE), do + wide * D_V
                base = tl.where(tl.arange(0, 2 * BLOCK_P) % 2 == 0, of_q, of_do)[:, None]
                both = tl.load(base + column[None, :], mask=(twice < read)[:, None], other=0.0)
                own = pair + tl.arange(0, BLOCK_P)
                used = own < stop
                of_rope = keys_rope
                if D_ROPE > 0:
                    of_q = q + own.to(tl.int64)[:, None] * (D_V + D_ROPE)
                    of_rope = tl.load(of_q + others[None, :], mask=(own < read)[:, None], other=0.0)
                lse2 = tl.load(lse + own, mask=used, other=float("inf"))
                total = tl.load(delta + own, mask=used, other=0.0)
                start = tl.load(starts + own // num_heads, mask=used, other=0)
                behind = tl.load(ends + own // num_heads, mask=used, other=0)
                if pair < stop:  # always so: see `attend`
                    fence(FENCED)
                    products = tl.dot(keys, tl.trans(both))
                    s, dp = tl.split(tl.reshape(products, [BLOCK_K, BLOCK_P, 2]))
                    s *= scale
                    if D_ROPE > 0:
                        s += tl.dot(keys_rope, tl.trans(of_rope)) * scale
                    seen = (row[:, None] >= start[None, :]) & (row[:, None] < behind[None, :])
                    p = tl.where(seen & there, tl.exp2(s - lse2[None, :]), 0.0)
                    change = p * (dp - total[None, :]) * sm_scale
                    ds = tl.where(seen & there, change, 0.0).to(kind)
                    ds_p = tl.reshape(tl.join(ds, p.to(kind)), [BLOCK_K, 2 * BLOCK_P])
                latent = tl.dot(ds_p, both, latent)
                if D_ROPE > 0:
                    rope = tl.dot(ds, of_rope, rope)
            at = last
        valid = row < num_rows
        to = dkv + place
        if ORDERED:
            to += number.to(tl.int64) * num_rows * (D_V + D_ROPE)
        add_or_write(to + column[None, :], latent, valid, ORDERED)
        if D_ROPE > 0:
            add_or_write(to + others[None, :], rope, valid, ORDERED)
