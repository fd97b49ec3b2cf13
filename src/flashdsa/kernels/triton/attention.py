"""Sparse MLA in Triton: the forward over one or two lists of rows, and the merge of its splits.

A program takes BLOCK_H heads of a query and BLOCK_K slots at a time: it gathers their rows,
multiplies them with q in two parts (D_V columns that are V, too, and D_ROPE others) and keeps an
online softmax in base 2. Where queries are few, programs of a query share its slots (`splits`), and
`merge` adds up what each has found.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_numbers(
    ids, query, slot, count, num_rows, width, RANGE: tl.constexpr, ROWS_OF_ID: tl.constexpr
):
    """Rows (BLOCK_K,) int64 that a query's slots name, and which of them are valid."""
    used = slot < count
    if RANGE:
        row = tl.load(ids + query).to(tl.int64) + slot
    else:
        found = tl.load(ids + query.to(tl.int64) * width + slot // ROWS_OF_ID, mask=used, other=-1)
        row = found.to(tl.int64) * ROWS_OF_ID + slot % ROWS_OF_ID
        # An id of -1 names no row, whatever block it would begin.
        used = used & (found >= 0)
    return row, used & (row >= 0) & (row < num_rows)


@triton.jit
def attend(
    state_max, state_sum, acc, q, q_rope, kv, stride, ids, query, begin, end, count, num_rows,
    width, scale, BLOCK_K: tl.constexpr, D_V: tl.constexpr, D_ROPE: tl.constexpr,
    RANGE: tl.constexpr, ROWS_OF_ID: tl.constexpr,
):  # fmt: skip
    """Add the slots from `begin` to `end` of one list to a program's state."""
    column = tl.arange(0, D_V)
    for first in range(begin, end, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        row, valid = row_numbers(ids, query, slot, count, num_rows, width, RANGE, ROWS_OF_ID)
        valid = valid & (slot < end)
        place = kv + row[:, None] * stride
        rows = tl.load(place + column[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(rows))
        if D_ROPE > 0:
            rope = D_V + tl.arange(0, D_ROPE)
            others = tl.load(place + rope[None, :], mask=valid[:, None], other=0.0)
            s = tl.dot(q_rope, tl.trans(others), s)
        s = tl.where(valid[None, :], s * scale, float("-inf"))
        new_max = tl.maximum(state_max, tl.max(s, 1))
        # A row without a valid key so far has maximum -inf; subtracting 0 keeps exp2(-inf) = 0.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(state_max - shift)
        state_sum = state_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(rows.dtype), rows, acc * rescale[:, None])
        state_max = new_max
    return state_max, state_sum, acc


@triton.jit
def forward(
    q, kv, ids, counts, extra_kv, extra_ids, extra_counts, sink, out, lse, max_logits, parts,
    num_heads, num_rows, width, stride, extra_rows, extra_width, extra_stride, scale,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, D_V: tl.constexpr, D_ROPE: tl.constexpr,
    RANGE: tl.constexpr, ROWS_OF_ID: tl.constexpr, EXTRA: tl.constexpr, EXTRA_RANGE: tl.constexpr,
    SINK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """O (S, H, D_V), lse and max_logits (S, H) of (S, ceil(H / BLOCK_H), SPLITS) programs.

    Args:
        q: (S, H, D_V + D_ROPE). kv, extra_kv: rows at `stride` elements.
        ids: (S, width), or with RANGE (S,) the first rows. counts: (S,) int32, slots in use.
        scale: of the logits in base 2.
        parts: (SPLITS, S, H, D_V + 2) fp32 with more than one split: sum of p v, of p, maximum.
    """
    query, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < num_heads
    row = query.to(tl.int64) * num_heads + head
    column = tl.arange(0, D_V)
    source = q + row[:, None] * (D_V + D_ROPE)
    latent = tl.load(source + column[None, :], mask=there[:, None], other=0.0)
    rope = latent
    if D_ROPE > 0:
        others = D_V + tl.arange(0, D_ROPE)
        rope = tl.load(source + others[None, :], mask=there[:, None], other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D_V], tl.float32)
    count = tl.load(counts + query)
    begin, end = part_of(count, split, SPLITS, BLOCK_K)
    top, total, acc = attend(
        top, total, acc, latent, rope, kv, stride, ids, query, begin, end, count, num_rows, width,
        scale, BLOCK_K, D_V, D_ROPE, RANGE, ROWS_OF_ID,
    )  # fmt: skip
    if EXTRA:
        count = tl.load(extra_counts + query)
        begin, end = part_of(count, split, SPLITS, BLOCK_K)
        top, total, acc = attend(
            top, total, acc, latent, rope, extra_kv, extra_stride, extra_ids, query, begin, end,
            count, extra_rows, extra_width, scale, BLOCK_K, D_V, D_ROPE, EXTRA_RANGE, 1,
        )  # fmt: skip
    if SPLITS > 1:
        rows = tl.num_programs(0).to(tl.int64) * num_heads
        to = parts + (split * rows + row) * (D_V + 2)
        tl.store(to[:, None] + column[None, :], acc, mask=there[:, None])
        tl.store(to + D_V, total, mask=there)
        tl.store(to + D_V + 1, top, mask=there)
    else:
        write(top, total, acc, sink, out, lse, max_logits, row, head, there, D_V, SINK)


@triton.jit
def part_of(count, split, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Slots from the first to the second number that a split takes, whole blocks."""
    blocks = tl.cdiv(tl.cdiv(count, BLOCK_K), SPLITS)
    begin = tl.minimum(split * blocks * BLOCK_K, count)
    return begin, tl.minimum(begin + blocks * BLOCK_K, count)


@triton.jit
def write(
    top, total, acc, sink, out, lse, max_logits, row, head, there, D_V: tl.constexpr,
    SINK: tl.constexpr,
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
    column = tl.arange(0, D_V)
    values = tl.where(factor[:, None] == 0.0, 0.0, acc * factor[:, None])
    to = out + row[:, None] * D_V + column[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=there[:, None])
    tl.store(lse + row, tl.where(empty, float("inf"), found), mask=there)
    tl.store(max_logits + row, top / LOG2_E, mask=there)


@triton.jit
def merge(
    parts, sink, out, lse, max_logits, rows, num_heads, D_V: tl.constexpr, SINK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the splits of a row, one a program."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, D_V)
    top = tl.full([1], float("-inf"), tl.float32)
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(parts + (split * rows + row) * (D_V + 2) + D_V + 1))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D_V], tl.float32)
    for split in range(SPLITS):
        part = parts + (split * rows + row) * (D_V + 2)
        weight = tl.exp2(tl.load(part + D_V + 1) - shift)
        total += weight * tl.load(part + D_V)
        acc += weight[:, None] * tl.load(part[:, None] + column[None, :])
    write(top, total, acc, sink, out, lse, max_logits, row, row % num_heads, row < rows, D_V, SINK)
