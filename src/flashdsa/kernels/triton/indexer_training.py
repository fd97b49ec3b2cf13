"""Training of the indexer in Triton: sums over heads at given slots, and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.attention import part_of, row_numbers, slots_of
from flashdsa.kernels.triton.packed_rows import fence

COLUMNS = tl.constexpr(128)
STEP = tl.constexpr(64)
"""Columns of a target that are multiplied at once."""


@triton.jit
def add(to, values, valid, ORDERED: tl.constexpr):
    """Add to rows, which no other program adds to if ORDERED."""
    if ORDERED:
        before = tl.load(to, mask=valid[:, None], other=0.0)
        tl.store(to, before + values, mask=valid[:, None])
    else:
        tl.atomic_add(to, values, mask=valid[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def target(
    q, keys, lse, ids, limits, out, num_heads: tl.int32, num_rows, width: tl.int32, scale,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, LIST: tl.constexpr,
    FENCED: tl.constexpr,
):  # fmt: skip
    """Sums over heads of exp2(scale q . key - lse), (S, width) fp32, of (S, ceil(width / BLOCK_T))
    programs.

    Args:
        q: (S, num_heads, D). keys: (num_rows, D). lse: (S, num_heads) fp32, in base 2; +inf of a
            head that attends nowhere. ids: (S, width).
        limits: (S,) by `slots_of`; invalid slots get 0.
    """
    query = tl.program_id(0)
    slot = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, 1)
    row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, 1)
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, num_heads, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        there = head < num_heads
        place = query.to(tl.int64) * num_heads + head
        z = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
        for begin in range(0, D, STEP):
            column = begin + tl.arange(0, STEP)
            rows = tl.load(keys + row[:, None] * D + column, mask=valid[:, None], other=0.0)
            of_heads = tl.load(q + place[:, None] * D + column, mask=there[:, None], other=0.0)
            fence(FENCED)
            z = tl.dot(rows, tl.trans(of_heads), z)
        of_head = tl.load(lse + place, mask=there, other=float("inf"))
        terms = tl.exp2(z * scale - of_head)
        total += tl.sum(tl.where((of_head != float("inf"))[None, :], terms, 0.0), 1)
    to = out + query.to(tl.int64) * width + slot
    tl.store(to, tl.where(valid, total, 0.0), mask=slot < width)


@triton.jit(do_not_specialize=["num_rows", "parts"])
def scores(
    q, keys, weights, ids, limits, out, num_heads: tl.int32, num_rows, width: tl.int32, parts,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, LIST: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Sums over heads of weights relu(q . key), (S, width) fp32, of S times `parts` programs; -inf
    in invalid slots. Operands are those of `target`, with 128 columns."""
    query, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.arange(0, COLUMNS)
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, 1)
    begin, end = part_of(width, part, parts, BLOCK_T)
    for first_head in range(0, num_heads, BLOCK_H):
        tl.debug_barrier()  # other threads than those that wrote a sum may add to it
        head = first_head + tl.arange(0, BLOCK_H)
        there = head < num_heads
        place = query.to(tl.int64) * num_heads + head
        of_q = q + place[:, None] * COLUMNS + column[None, :]
        of_heads = tl.load(of_q, mask=there[:, None], other=0.0)
        weight = tl.load(weights + place, mask=there, other=0.0)
        for first in range(begin, end, BLOCK_T):
            slot = first + tl.arange(0, BLOCK_T)
            row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, 1)
            of_row = keys + row[:, None] * COLUMNS + column[None, :]
            rows = tl.load(of_row, mask=valid[:, None], other=0.0)
            fence(FENCED)
            z = tl.dot(rows, tl.trans(of_heads))
            terms = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
            total = tl.sum(tl.where(there[None, :], terms, 0.0), 1)
            to = out + query.to(tl.int64) * width + slot
            if first_head > 0:
                total += tl.load(to, mask=valid, other=0.0)
            tl.store(to, tl.where(valid, total, float("-inf")), mask=slot < end)


@triton.jit(do_not_specialize=["num_rows"])
def backward(
    q, keys, weights, ids, limits, grad, dq, dk, d_weights, num_heads: tl.int32,
    first_head: tl.int32, num_rows, width: tl.int32, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    LIST: tl.constexpr, ORDERED: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Gradients of sum_h weights relu(z), of (S, blocks of heads from `first_head`) programs.

    Args:
        q, keys, weights, ids, limits: as for `target`, of 128 columns.
        grad: (S, width) fp32, of the sums. dq: as q. d_weights: (S, num_heads) fp32.
        dk: (num_rows, 128) fp32, added to in the GPU's order; ORDERED (S, width, 128).
    """
    query = tl.program_id(0)
    head = first_head + tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there, column = head < num_heads, tl.arange(0, COLUMNS)
    place = query.to(tl.int64) * num_heads + head
    at = place[:, None] * COLUMNS + column
    of_heads = tl.load(q + at, mask=there[:, None], other=0.0)
    weight = tl.load(weights + place, mask=there, other=0.0)
    kind = keys.dtype.element_ty
    weight_high = weight.to(kind)
    weight_low = (weight - weight_high.to(tl.float32)).to(kind)
    by_high = tl.zeros([BLOCK_H, COLUMNS], tl.float32)
    by_low = tl.zeros([BLOCK_H, COLUMNS], tl.float32)
    of_weight = tl.zeros([BLOCK_H], tl.float32)
    zero = tl.zeros([BLOCK_T, BLOCK_H], kind)
    high, low, passed_high, passed_low = zero, zero, zero, zero
    start, count = slots_of(ids, limits, query, num_rows, width, LIST, 1)
    for first in range(0, count, BLOCK_T):
        slot = first + tl.arange(0, BLOCK_T)
        row, valid = row_numbers(ids, query, start, slot, count, num_rows, width, LIST, 1)
        of_row = row[:, None] * COLUMNS + column
        rows = tl.load(keys + of_row, mask=valid[:, None], other=0.0)
        of_slot = query.to(tl.int64) * width + slot
        g = tl.load(grad + of_slot, mask=valid, other=0.0)
        if first < count:  # always so: see `attend`; Triton 3.6 fails with the product before it
            fence(FENCED)
            z = tl.dot(rows, tl.trans(of_heads))
            # Comparisons and not products: what is not finite in a query without slots adds 0.
            gate = (z > 0.0) & valid[:, None]
            of_weight += tl.sum(tl.where(gate, g[:, None] * z, 0.0), 0)
            # Slots of one key may cancel, and heads may share a weight, whose rounding would make
            # all of dk too long: gradients and weights, in two parts, are as good as not rounded.
            rounded = g.to(kind)
            high = tl.where(gate, rounded[:, None], zero)
            low = tl.where(gate, (g - rounded.to(tl.float32)).to(kind)[:, None], zero)
            passed_high = tl.where(gate, weight_high[None, :], zero)
            passed_low = tl.where(gate, weight_low[None, :], zero)
        by_high = tl.dot(tl.trans(high), rows, by_high)
        by_low = tl.dot(tl.trans(low), rows, by_low)
        to = of_slot[:, None] * COLUMNS + column if ORDERED else of_row
        of_slots = tl.dot(passed_low, of_heads, tl.dot(passed_high, of_heads))
        add(dk + to, of_slots * g[:, None], valid, ORDERED)
    of_q = by_high + by_low
    of_q = tl.where(of_q == 0.0, 0.0, of_q * weight[:, None])
    tl.store(dq + at, of_q.to(dq.dtype.element_ty), mask=there[:, None])
    tl.store(d_weights + place, of_weight, mask=there)
