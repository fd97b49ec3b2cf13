"""Sparse MLA in Triton: the forward over one or two lists of rows, and the merge of its splits.

A program takes BLOCK_H heads of a query and BLOCK_K slots at a time: it gathers their rows, in
PARTS of the D_V columns that are V, too, and D_ROPE others, multiplies them with q and keeps an
online softmax in base 2. Where queries are few, programs of a query share its slots (`splits`), and
`merge` adds up what each has found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.packed_rows import (
    fence,
    load_factors,
    load_part,
    load_rope,
    place_rows,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def slots_of(ids, limits, query, num_rows, width, LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr):
    """The first row of a query's range, 0 of a list, and its slots in use.

    LIST: "range" with ends as `limits`, "lengths" with such limits, or "whole".
    """
    start = tl.zeros([], tl.int32)
    if LIST == "range":
        start = tl.minimum(tl.maximum(tl.load(ids + query), 0), num_rows)
        # No difference of what a caller gives: an end of INT32_MIN would wrap around.
        count = tl.maximum(tl.minimum(tl.load(limits + query), num_rows), start) - start
    elif LIST == "lengths":
        count = tl.minimum(tl.maximum(tl.load(limits + query), 0), width) * ROWS_OF_ID
    else:
        count = start + width * ROWS_OF_ID
    return start, count


@triton.jit
def row_numbers(
    ids, query, start, slot, count, num_rows, width, LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr
):
    """Rows (BLOCK_K,) int64 that a query's slots name, and which of them are valid."""
    used = slot < count
    if LIST == "range":
        row = start.to(tl.int64) + slot
    else:
        found = tl.load(ids + query.to(tl.int64) * width + slot // ROWS_OF_ID, mask=used, other=-1)
        row = found.to(tl.int64) * ROWS_OF_ID + slot % ROWS_OF_ID
        # An id of -1 names no row, whatever block it would begin.
        used = used & (found >= 0)
    return row, used & (row >= 0) & (row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def valid_ids(
    ids, limits, out, counts, num_rows, width: tl.int32, BLOCK: tl.constexpr, LIST: tl.constexpr,
    ROWS_OF_ID: tl.constexpr,
):  # fmt: skip
    """The ids (S, width) of valid slots without gaps, in their order, and how many, of S programs.

    Args:
        ids, limits: lists, by `slots_of`. out: (S, width), written where there is one.
    """
    query = tl.program_id(0).to(tl.int64)
    _, count = slots_of(ids, limits, query, num_rows, width, LIST, ROWS_OF_ID)
    before = tl.zeros([], tl.int32)
    for first in range(0, width, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        used = slot * ROWS_OF_ID < count
        found = tl.load(ids + query * width + slot, mask=used, other=-1)
        valid = (found >= 0) & (found.to(tl.int64) * ROWS_OF_ID < num_rows)
        number = tl.cumsum(valid.to(tl.int32), 0)
        tl.store(out + query * width + before + number - 1, found, mask=valid)
        before += tl.max(number, 0)
    tl.store(counts + query, before)


@triton.jit
def attend(
    state_max, state_sum, acc, q, q_rope, kv, stride, page_rows, num_rows, ids, limits, width,
    query, split, scale, BLOCK_K: tl.constexpr, D_V: tl.constexpr, D_ROPE: tl.constexpr,
    PARTS: tl.constexpr, FP8: tl.constexpr, FENCED: tl.constexpr, LIST: tl.constexpr,
    ROWS_OF_ID: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add a split's slots of one list to a program's state; return it, and whether it has any."""
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, ROWS_OF_ID)
    begin, end = part_of(count, split, tl.num_programs(1), BLOCK_K)
    FACTORS: tl.constexpr = FORM is not None and FORM.scale == "fp32"
    p = tl.zeros([q[0].shape[0], BLOCK_K], tl.float32 if FACTORS else q[0].dtype)
    for first in range(begin, end, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        row, valid = row_numbers(ids, query, start, slot, end, num_rows, width, LIST, ROWS_OF_ID)
        data, scales = place_rows(kv, row, stride, page_rows, FORM)
        rows = ()
        for n in tl.static_range(PARTS):
            rows = rows + (load_part(data, scales, valid, n, D_V // PARTS, FORM, FP8),)
        if FACTORS:
            factors = load_factors(scales, valid)
        rope = rows[0]
        if D_ROPE > 0:
            rope = load_rope(data, valid, D_V, D_ROPE, FORM)
        rescale = tl.full([q[0].shape[0]], 1.0, tl.float32)
        fence(FENCED)
        s = tl.zeros([q[0].shape[0], BLOCK_K], tl.float32)
        if D_ROPE > 0:
            s += tl.dot(q_rope, tl.trans(rope)) * scale
        for n in tl.static_range(PARTS):
            found = tl.dot(q[n], tl.trans(rows[n]))
            s += found * (factors[n] * scale)[None, :] if FACTORS else found * scale
        # Always so. Where Triton sees no product of a product, warps share keys: 64 heads are rows
        # of four warps only.
        if first < end:
            s = tl.where(valid[None, :], s, float("-inf"))
            new_max = tl.maximum(state_max, tl.max(s, 1))
            # A row without a valid key so far has maximum -inf; less 0 keeps exp2(-inf) = 0.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            found = tl.exp2(s - shift[:, None])
            rescale = tl.exp2(state_max - shift)
            state_sum = state_sum * rescale + tl.sum(found, 1)
            state_max = new_max
            p = found.to(p.dtype)
        added = ()
        for n in tl.static_range(PARTS):
            weights = (p * factors[n][None, :]).to(rows[n].dtype) if FACTORS else p
            added = added + (tl.dot(weights, rows[n], acc[n] * rescale[:, None]),)
        acc = added
    return state_max, state_sum, acc, begin < end


@triton.jit(do_not_specialize=["num_rows", "extra_rows"])
def forward(
    q, kv, stride, page_rows, num_rows, ids, limits, width: tl.int32, extra_kv, extra_stride,
    extra_page_rows, extra_rows, extra_ids, extra_limits, extra_width: tl.int32, sink, out, lse,
    max_logits, parts, num_heads: tl.int32, scale, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    D_V: tl.constexpr, D_ROPE: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, FENCED: tl.constexpr, SINK: tl.constexpr, LIST: tl.constexpr,
    ROWS_OF_ID: tl.constexpr, FORM: tl.constexpr, EXTRA: tl.constexpr, EXTRA_LIST: tl.constexpr,
    EXTRA_FORM: tl.constexpr,
):  # fmt: skip
    """O (S, H, D_V), lse and max_logits (S, H) of (S * ceil(H / BLOCK_H), splits) programs.

    Args:
        q: (S, H, D_V + D_ROPE). kv, extra_kv: rows at `stride` elements; of a FORM, a `RowFormat`,
            bytes of pages at `stride`, of `page_rows` rows each.
        ids: (S, width), or (S,), first rows of ranges. limits: (S,) by `slots_of`, or nothing.
        scale: of the logits in base 2.
        parts: (splits, S, H, D_V + 2) fp32 if SPLIT, there are several: sum of p v, of p, maximum.
            A split without a slot writes no sum of p v, and -1 for that of p.
    """
    blocks = tl.cdiv(num_heads, BLOCK_H)
    query = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < num_heads
    row = query.to(tl.int64) * num_heads + head
    source = q + row * (D_V + D_ROPE)
    columns: tl.constexpr = D_V // PARTS
    latent = ()
    acc = ()
    for n in tl.static_range(PARTS):
        place = source[:, None] + (n * columns + tl.arange(0, columns))[None, :]
        latent = latent + (tl.load(place, mask=there[:, None], other=0.0),)
        acc = acc + (tl.zeros([BLOCK_H, columns], tl.float32),)
    rope = latent[0]
    if D_ROPE > 0:
        others = D_V + tl.arange(0, D_ROPE)
        rope = tl.load(source[:, None] + others[None, :], mask=there[:, None], other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    split = tl.program_id(1)
    top, total, acc, worked = attend(
        top, total, acc, latent, rope, kv, stride, page_rows, num_rows, ids, limits, width, query,
        split, scale, BLOCK_K, D_V, D_ROPE, PARTS, FP8, FENCED, LIST, ROWS_OF_ID, FORM,
    )  # fmt: skip
    if EXTRA:
        # The first splits have slots of short lists: of this one the last.
        split = tl.num_programs(1) - 1 - split
        top, total, acc, more = attend(
            top, total, acc, latent, rope, extra_kv, extra_stride, extra_page_rows, extra_rows,
            extra_ids, extra_limits, extra_width, query, split, scale, BLOCK_K, D_V, D_ROPE, PARTS,
            FP8, FENCED, EXTRA_LIST, 1, EXTRA_FORM,
        )  # fmt: skip
        worked = worked | more
    if SPLIT:
        rows = (tl.num_programs(0) // blocks).to(tl.int64) * num_heads
        to = parts + (tl.program_id(1) * rows + row) * (D_V + 2)
        for n in tl.static_range(PARTS):
            place = to[:, None] + (n * columns + tl.arange(0, columns))[None, :]
            tl.store(place, acc[n], mask=there[:, None] & worked)
        tl.store(to + D_V, tl.where(worked, total, -1.0), mask=there)
        tl.store(to + D_V + 1, top, mask=there)
    else:
        write(top, total, acc, sink, out, lse, max_logits, row, head, there, D_V, PARTS, SINK)


@triton.jit
def part_of(count, split, splits, BLOCK_K: tl.constexpr):
    """Slots from the first to the second number that a split takes, whole blocks."""
    blocks = tl.cdiv(tl.cdiv(count, BLOCK_K), splits)
    begin = tl.minimum(split * blocks * BLOCK_K, count)
    return begin, tl.minimum(begin + blocks * BLOCK_K, count)


@triton.jit
def write(
    top, total, acc, sink, out, lse, max_logits, row, head, there, D_V: tl.constexpr,
    PARTS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """The results of rows from their maximum, sum and sum of p v."""
    empty = total == 0.0
    found = (top + tl.log2(total)) / LOG2_E
    factor = 1.0 / tl.where(empty, 1.0, total)
    if SINK:
        # exp(lse) / (exp(lse) + exp(sink)); 0 where the sink takes all.
        beside = tl.load(sink + head, mask=there, other=0.0)
        factor *= 1.0 / (1.0 + tl.exp2((beside - found) * LOG2_E))
        factor = tl.where(beside == float("inf"), 0.0, factor)
    factor = tl.where(empty, 0.0, factor)
    columns: tl.constexpr = D_V // PARTS
    for n in tl.static_range(PARTS):
        values = tl.where(factor[:, None] == 0.0, 0.0, acc[n] * factor[:, None])
        place = (out + row * D_V)[:, None] + (n * columns + tl.arange(0, columns))[None, :]
        tl.store(place, values.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(lse + row, tl.where(empty, float("inf"), found), mask=there)
    tl.store(max_logits + row, top / LOG2_E, mask=there)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge(
    parts, sink, out, lse, max_logits, rows, num_heads: tl.int32, splits, D_V: tl.constexpr,
    SINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the splits of a row, at most BLOCK, one a program."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    split = tl.arange(0, BLOCK)
    part = parts + (split * rows.to(tl.int64) + row) * (D_V + 2)
    sums = tl.load(part + D_V, mask=split < splits, other=-1.0)
    tops = tl.load(part + D_V + 1, mask=split < splits, other=float("-inf"))
    there = (sums < 0.0) == 0  # NaN is
    top = tl.max(tops, 0, keep_dims=True)
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * tl.where(there, sums, 0.0), 0, keep_dims=True)
    place = part[:, None] + tl.arange(0, D_V)[None, :]
    found = weight[:, None] * tl.load(place, mask=there[:, None], other=0.0)
    acc = tl.sum(found, 0, keep_dims=True)
    head = row % num_heads
    write(top, total, (acc,), sink, out, lse, max_logits, row, head, row < rows, D_V, 1, SINK)
