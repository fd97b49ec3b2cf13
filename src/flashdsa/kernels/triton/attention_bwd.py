"""Sparse MLA's backward in Triton: first dQ by blocks of heads, then dKV by blocks of slots.

The first kernel recomputes P from lse, and leaves P and dS of lists of ids for the second one,
which multiplies those of all heads with q and dO: a query adds to a row's gradient once. The order
of these additions, and so their last bits, are the GPU's. ORDERED, rows of their own are written,
and `sum_rows` adds up those of a row in the order of queries and slots. dKV of ranges is
`attention_bwd_ranges`'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.attention import row_numbers, slots_of
from flashdsa.kernels.triton.packed_rows import fence


@triton.jit(do_not_specialize=["rows"])
def row_products(a, b, out, rows, BLOCK: tl.constexpr, D: tl.constexpr):
    """Sums of a * b (rows, D), fp32, BLOCK rows a program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    there = (row < rows)[:, None]
    x = tl.load(a + place, mask=there, other=0.0).to(tl.float32)
    y = tl.load(b + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(x * y, 1), mask=row < rows)


@triton.jit
def add_or_write(to, values, valid, ORDERED: tl.constexpr):
    """Add to rows that others add to; ORDERED write them."""
    if ORDERED:
        tl.store(to, values, mask=valid[:, None])
    else:
        tl.atomic_add(to, values, mask=valid[:, None], sem="relaxed")


@triton.jit
def differentiate(
    dq, dq_rope, q, q_rope, do, lse2, delta, kv, parts, plane, slots, ids, limits, query, num_rows,
    width, there, scale, sm_scale, BLOCK_K: tl.constexpr, STEP: tl.constexpr, D_V: tl.constexpr,
    D_ROPE: tl.constexpr, LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Add a list's slots to dQ, and leave their P and dS in rows of `parts`, one a head, and of
    those `plane` elements behind: up to a multiple of STEP, 0 where a slot is not valid. Those of
    ranges are not kept."""
    column = tl.arange(0, D_V)
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, ROWS_OF_ID)
    end = tl.cdiv(count, STEP) * STEP
    kind: tl.constexpr = kv.dtype.element_ty
    ds = tl.zeros([q.shape[0], BLOCK_K], kind)
    # ptxas waits for each wgmma that adds to what a loop carries as it is.
    one = count.to(tl.float32) / count.to(tl.float32)
    for first in range(0, end, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, ROWS_OF_ID)
        place = row[:, None] * (D_V + D_ROPE)
        rows = tl.load(kv + place + column[None, :], mask=valid[:, None], other=0.0)
        rope = rows
        if D_ROPE > 0:
            others = D_V + tl.arange(0, D_ROPE)
            rope = tl.load(kv + place + others[None, :], mask=valid[:, None], other=0.0)
        if first < end:  # always so: see `attend`; Triton 3.6 fails with products before it
            fence(FENCED)
            s = tl.dot(q, tl.trans(rows)) * scale
            if D_ROPE > 0:
                s += tl.dot(q_rope, tl.trans(rope)) * scale
            dp = tl.dot(do, tl.trans(rows))
            p = tl.where(valid[None, :], tl.exp2(s - lse2[:, None]), 0.0)
            ds = tl.where(valid[None, :], p * (dp - delta[:, None]) * sm_scale, 0.0).to(kind)
            if LIST != "range":
                to = parts[:, None] + slot[None, :]
                tl.store(to, p.to(kind), mask=there[:, None])
                tl.store(to + plane, ds, mask=there[:, None])
        if D_ROPE > 0:
            if count > 0:  # a branch again: two that run on make ptxas wait, too
                dq_rope = tl.dot(ds, rope, dq_rope * one)
        dq = tl.dot(ds, rows, dq * one)
    return dq, dq_rope


@triton.jit(do_not_specialize=["num_rows", "extra_rows"])
def of_queries(
    q, do, lse, delta, dq, parts, extra_parts, kv, ids, limits, extra_kv, extra_ids, extra_limits,
    num_heads: tl.int32, num_rows, width: tl.int32, slots, extra_rows, extra_width: tl.int32,
    extra_slots, scale, sm_scale, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    STEP: tl.constexpr, D_V: tl.constexpr, D_ROPE: tl.constexpr, LIST: tl.constexpr,
    ROWS_OF_ID: tl.constexpr, EXTRA: tl.constexpr, EXTRA_LIST: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """dQ (S, H, D_V + D_ROPE) of S * ceil(H / BLOCK_H) programs.

    Args:
        q, kv, extra_kv, ids, limits, scale: as for `forward`. do: (S, H, D_V).
        lse: (S, H) fp32, in base 2, with the sink; +inf where there is no key. delta: (S, H) fp32,
            sum of O dO.
        parts, extra_parts: (2, S, H, slots), P and dS in the rows' dtype; slots are multiples of
            STEP, of ranges 0.
    """
    blocks = tl.cdiv(num_heads, BLOCK_H)
    query = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < num_heads
    row = query.to(tl.int64) * num_heads + head
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * num_heads
    column = tl.arange(0, D_V)
    place = row[:, None] * (D_V + D_ROPE)
    latent = tl.load(q + place + column[None, :], mask=there[:, None], other=0.0)
    grad = tl.load(do + row[:, None] * D_V + column[None, :], mask=there[:, None], other=0.0)
    rope = latent
    dq_rope = tl.zeros([1, 1], tl.float32)
    if D_ROPE > 0:
        others = D_V + tl.arange(0, D_ROPE)
        rope = tl.load(q + place + others[None, :], mask=there[:, None], other=0.0)
        dq_rope = tl.zeros([BLOCK_H, D_ROPE], tl.float32)
    lse2 = tl.load(lse + row, mask=there, other=float("inf"))
    total = tl.load(delta + row, mask=there, other=0.0)
    of_latent = tl.zeros([BLOCK_H, D_V], tl.float32)
    of_latent, dq_rope = differentiate(
        of_latent, dq_rope, latent, rope, grad, lse2, total, kv, parts + row * slots, rows * slots,
        slots, ids, limits, query, num_rows, width, there, scale, sm_scale, BLOCK_K, STEP, D_V,
        D_ROPE, LIST, ROWS_OF_ID, FENCED,
    )  # fmt: skip
    if EXTRA:
        of_latent, dq_rope = differentiate(
            of_latent, dq_rope, latent, rope, grad, lse2, total, extra_kv,
            extra_parts + row * extra_slots, rows * extra_slots, extra_slots, extra_ids,
            extra_limits, query, extra_rows, extra_width, there, scale, sm_scale, BLOCK_K, STEP,
            D_V, D_ROPE, EXTRA_LIST, 1, FENCED,
        )  # fmt: skip
    kind = dq.dtype.element_ty
    tl.store(dq + place + column[None, :], of_latent.to(kind), mask=there[:, None])
    if D_ROPE > 0:
        tl.store(dq + place + others[None, :], dq_rope.to(kind), mask=there[:, None])


@triton.jit(do_not_specialize=["num_rows", "own_slots"])
def of_rows(
    q, do, parts, dkv, ids, limits, num_heads: tl.int32, num_rows, width: tl.int32, slots,
    own_slots, BLOCKS: tl.int32, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, D_V: tl.constexpr,
    D_ROPE: tl.constexpr, LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr, ORDERED: tl.constexpr,
    FENCED: tl.constexpr,
):  # fmt: skip
    """dS^T Q + [P^T dO, 0] added to dkv's rows, of S * BLOCKS programs, which take blocks of
    BLOCK_K slots by turns.

    Args:
        q, do, parts, ids, limits: as for `of_queries`.
        dkv: (num_rows, D_V + D_ROPE) fp32; ORDERED (S, own_slots, D_V + D_ROPE).
    """
    query, number = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    first_row = query.to(tl.int64) * num_heads
    plane = (tl.num_programs(0) // BLOCKS).to(tl.int64) * num_heads * slots
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, ROWS_OF_ID)
    column, others = tl.arange(0, D_V), D_V + tl.arange(0, D_ROPE if D_ROPE > 0 else 16)
    for first in range(number * BLOCK_K, count, BLOCKS * BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, ROWS_OF_ID)
        if tl.max(valid.to(tl.int32)) > 0:
            latent = tl.zeros([BLOCK_K, D_V], tl.float32)
            rope = tl.zeros([BLOCK_K, D_ROPE if D_ROPE > 0 else 16], tl.float32)
            # A loop for each: of two products that follow each other Triton converts the first.
            for first_head in range(0, num_heads, BLOCK_H):
                head = first_head + tl.arange(0, BLOCK_H)
                there = (head < num_heads)[:, None]
                at = (first_row + head)[:, None]
                ds = tl.load(parts + plane + at * slots + slot[None, :], mask=there, other=0.0)
                of_q = q + at * (D_V + D_ROPE)
                of_latent = tl.load(of_q + column[None, :], mask=there, other=0.0)
                fence(FENCED)
                latent = tl.dot(tl.trans(ds), of_latent, latent)
                if D_ROPE > 0:
                    of_rope = tl.load(of_q + others[None, :], mask=there, other=0.0)
                    rope = tl.dot(tl.trans(ds), of_rope, rope)
            for first_head in range(0, num_heads, BLOCK_H):
                head = first_head + tl.arange(0, BLOCK_H)
                there = (head < num_heads)[:, None]
                at = (first_row + head)[:, None]
                p = tl.load(parts + at * slots + slot[None, :], mask=there, other=0.0)
                grad = tl.load(do + at * D_V + column[None, :], mask=there, other=0.0)
                fence(FENCED)
                latent = tl.dot(tl.trans(p), grad, latent)
            if ORDERED:
                row = query.to(tl.int64) * own_slots + slot
            to = dkv + row[:, None] * (D_V + D_ROPE)
            add_or_write(to + column[None, :], latent, valid, ORDERED)
            if D_ROPE > 0:
                add_or_write(to + others[None, :], rope, valid, ORDERED)


@triton.jit
def sum_rows(
    parts, order, starts, dkv, D_V: tl.constexpr, D_ROPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Add parts (slots, D_V + D_ROPE) to dkv's rows, one a program: those that `order` has from
    the row's start to the next one's."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        width: tl.constexpr = D_V + D_ROPE
        add_parts(parts, order, begin, end, dkv + row * width, width, D_V, BLOCK)
        if D_ROPE > 0:
            to = dkv + row * width + D_V
            add_parts(parts + D_V, order, begin, end, to, width, D_ROPE, BLOCK)


@triton.jit
def add_parts(parts, order, begin, end, to, width, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Add columns of parts to a row's."""
    column = tl.arange(0, COLUMNS)
    total = tl.load(to + column)
    for first in range(begin, end, BLOCK):
        number = first + tl.arange(0, BLOCK)
        there = number < end
        slot = tl.load(order + number, mask=there, other=0)
        place = parts + slot[:, None] * width + column[None, :]
        total += tl.sum(tl.load(place, mask=there[:, None], other=0.0), 0)
    tl.store(to + column, total)
