"""Sparse MLA's backward in Triton: dQ by a program of heads, dKV by additions to its rows.

A program takes BLOCK_H heads of a query and BLOCK_K slots at a time, recomputes P from lse, and
adds dS^T Q + [P^T dO, 0] to the slots' rows in fp32. The order of these additions, and so their
last bits, are the GPU's. ORDERED, it adds to rows that are the slots' own, a launch for each block
of heads, and `sum_rows` adds up those of a row in the order of queries and slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.attention import row_numbers, slots_of


@triton.jit
def add(to, values, valid, ORDERED: tl.constexpr):
    """Add to rows, which no other program adds to if ORDERED."""
    if ORDERED:
        before = tl.load(to, mask=valid[:, None], other=0.0)
        tl.store(to, before + values, mask=valid[:, None])
    else:
        tl.atomic_add(to, values, mask=valid[:, None], sem="relaxed")


@triton.jit
def differentiate(
    dq, dq_rope, q, q_rope, do, lse2, delta, kv, dkv, ids, limits, query, num_rows, width, slots,
    scale, sm_scale, BLOCK_K: tl.constexpr, D_V: tl.constexpr, D_ROPE: tl.constexpr,
    LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Add a list's slots to dQ, and their gradients to `dkv`."""
    column = tl.arange(0, D_V)
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, ROWS_OF_ID)
    for first in range(0, count, BLOCK_K):
        slot = first + tl.arange(0, BLOCK_K)
        row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, ROWS_OF_ID)
        place = row[:, None] * (D_V + D_ROPE)
        rows = tl.load(kv + place + column[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(rows))
        if D_ROPE > 0:
            others = D_V + tl.arange(0, D_ROPE)
            rope = tl.load(kv + place + others[None, :], mask=valid[:, None], other=0.0)
            s = tl.dot(q_rope, tl.trans(rope), s)
        p = tl.where(valid[None, :], tl.exp2(s * scale - lse2[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(rows))
        ds = tl.where(valid[None, :], p * (dp - delta[:, None]) * sm_scale, 0.0).to(rows.dtype)
        dq = tl.dot(ds, rows, dq)
        of_rows = tl.dot(tl.trans(ds), q)
        of_rows = tl.dot(tl.trans(p.to(rows.dtype)), do, of_rows)
        to = dkv + place
        if ORDERED:
            to = dkv + (query.to(tl.int64) * slots + slot)[:, None] * (D_V + D_ROPE)
        add(to + column[None, :], of_rows, valid, ORDERED)
        if D_ROPE > 0:
            dq_rope = tl.dot(ds, rope, dq_rope)
            add(to + others[None, :], tl.dot(tl.trans(ds), q_rope), valid, ORDERED)
    return dq, dq_rope


@triton.jit(do_not_specialize=["first_head", "num_rows", "slots", "extra_rows", "extra_slots"])
def backward(
    q, do, lse, delta, dq, dkv, dextra_kv, kv, ids, limits, extra_kv, extra_ids, extra_limits,
    num_heads, first_head, num_rows, width, slots, extra_rows, extra_width, extra_slots, scale,
    sm_scale, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, D_V: tl.constexpr,
    D_ROPE: tl.constexpr, LIST: tl.constexpr, ROWS_OF_ID: tl.constexpr, EXTRA: tl.constexpr,
    EXTRA_LIST: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """dQ (S, H, D_V + D_ROPE), and dKV added, of (S, blocks of heads from `first_head`) programs.

    Args:
        q, kv, extra_kv, ids, limits, scale: as for `forward`. do: (S, H, D_V).
        lse: (S, H) fp32, in base 2, with the sink; +inf where there is no key. delta: (S, H) fp32,
            sum of O dO.
        dkv, dextra_kv: fp32, as kv and extra_kv; ORDERED (S, slots, D_V + D_ROPE).
    """
    query = tl.program_id(0)
    head = first_head + tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < num_heads
    row = query.to(tl.int64) * num_heads + head
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
        of_latent, dq_rope, latent, rope, grad, lse2, total, kv, dkv, ids, limits, query, num_rows,
        width, slots, scale, sm_scale, BLOCK_K, D_V, D_ROPE, LIST, ROWS_OF_ID, ORDERED,
    )  # fmt: skip
    if EXTRA:
        of_latent, dq_rope = differentiate(
            of_latent, dq_rope, latent, rope, grad, lse2, total, extra_kv, dextra_kv, extra_ids,
            extra_limits, query, extra_rows, extra_width, extra_slots, scale, sm_scale, BLOCK_K,
            D_V, D_ROPE, EXTRA_LIST, 1, ORDERED,
        )  # fmt: skip
    kind = dq.dtype.element_ty
    tl.store(dq + place + column[None, :], of_latent.to(kind), mask=there[:, None])
    if D_ROPE > 0:
        tl.store(dq + place + others[None, :], dq_rope.to(kind), mask=there[:, None])


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
