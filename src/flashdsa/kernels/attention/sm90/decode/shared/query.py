"""Q for packed rows: its latent columns in f16, times a power of two for each head.

A row's largest latent number becomes one from 2^14 to 2^15, so that the loss is negligible; the
RoPE columns after them stay bf16, times the same power. Scores are multiplied by `row_unit`, its
inverse.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import quad_reduce
from flashdsa.dsl.smem import load_words, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import Q_CHUNK_BYTES, ROWS
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, meet_consumers
from flashdsa.kernels.attention.sm90.decode.shared.words import (
    BIAS,
    MOST_POWER,
    TOP_EXPONENT,
    as_float,
    one_word,
    scaled,
    to_f16,
)

QUARTERS = 4
"""Threads of a row."""
UNITS = 8
"""16-byte pieces of a row of a chunk."""
BATCH = 4
"""16-byte pieces that a thread has under way."""
BATCHES = UNITS // BATCH
"""Batches of a chunk."""


def chunks_of_thread(ctx: Context) -> int:
    """Latent chunks of a thread."""
    return ctx.plan.tile.value_chunks // QUARTERS


def unit_addresses(ctx: Context, row: Any, quarter: Any, batch: Any) -> list[Any]:
    """Addresses of a thread's 16-byte pieces of that batch; a row's four threads use different
    banks."""
    chunk = quarter * chunks_of_thread(ctx) + batch // BATCHES
    base = ctx.memory.q.address() + chunk * Q_CHUNK_BYTES
    first = batch % BATCHES * BATCH
    return [base + swizzled_128(row, (2 * quarter) ^ (first + i)) for i in range(BATCH)]


@cute.jit
def convert_query(ctx: Context, consumer: Any, number: Int32) -> None:
    """Convert Q by both consumers together. All of them have the new form afterwards.

    The code is loops, as code that runs once costs most: it is fetched.

    Args:
        number: of the items whose Q was converted before.
    """
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    row, quarter = thread // QUARTERS, thread % QUARTERS
    batches = chunks_of_thread(ctx) * BATCHES
    top = Int32(0)
    for batch in cutlass.range(batches, unroll=1):
        for address in unit_addresses(ctx, row, quarter, batch):
            words = load_words(address, Int32)
            for w in range(4):
                size = one_word("abs.bf16x2 {$w0}, {$r0};", words[w])
                top = one_word("max.bf16x2 {$w0}, {$r0}, {$r1};", top, size)
    top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
    top = quad_reduce(top, cutlass.max)
    power = cutlass.min(TOP_EXPONENT + BIAS - (top >> 7), Int32(MOST_POWER))
    factor = (power + BIAS) << 7
    factor = factor | (factor << 16)
    for batch in cutlass.range(batches, unroll=1):
        addresses = unit_addresses(ctx, row, quarter, batch)
        units = []
        for address in addresses:
            words = load_words(address, Int32)
            units.append([to_f16(scaled(words[w], factor)) for w in range(4)])
        for address, unit in zip(addresses, units, strict=True):
            store_words(address, unit)
    if cutlass.const_expr(ctx.plan.tile.has_rope):
        rope = ctx.plan.tile.value_chunks
        for i in cutlass.range_constexpr(UNITS // QUARTERS):
            unit = (UNITS // QUARTERS) * quarter + i
            address = ctx.memory.q.address() + rope * Q_CHUNK_BYTES + swizzled_128(row, unit)
            words = load_words(address, Int32)
            store_words(address, [scaled(words[w], factor) for w in range(4)])
    if quarter == 0:
        ctx.memory.row_unit.array(Float32, ROWS)[row] = as_float((BIAS - power) << 23)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_consumers(ctx.memory.q_converted, number)
