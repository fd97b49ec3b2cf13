"""Q in shared memory: chunks of 64 columns with the 128-byte swizzle, a row for each head.

Its latent columns are f16, times a power of two for each head, and those of 16 bytes of a key lie
in the order in which the products take these bytes (`products.py`). The RoPE columns stay bf16.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.smem import store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.gather import load_or
from flashdsa.kernels.attention.sm90.decode.shared.words import (
    BIAS,
    MOST_POWER,
    TOP_EXPONENT,
    one_word,
    power_of_two,
    scaled,
    to_f16,
)

PAIR = 16
"""Columns that a thread takes together: twice 16 bytes of Q, 16 bytes of a key."""
UNIT = 8
CHUNK_PAIRS = CHUNK // PAIR


@cute.jit
def load_query(ctx: Context, q: cute.Tensor, consumer: Int32, before: Any = 0) -> None:
    """Load Q from device memory, zeros past its heads, by both consumers.

    Args:
        q: (S, H, d_qk) bf16. before: items whose Q was loaded before.
    """
    tile = ctx.plan.tile
    form = ctx.plan.form
    rope_units = form.rope // UNIT
    threads = CONSUMERS * WARPGROUP_SIZE // HEADS
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    row, number = thread // threads, thread % threads
    # A head past the last is read like a row of kv that is not valid.
    present = ctx.head + row
    if present >= q.shape[1]:
        present = Int32(-1)
    source = q.iterator + (Int64(ctx.query) * q.shape[1] + ctx.head + row) * tile.d_qk
    all_pairs = form.columns // PAIR
    pairs = -(-all_pairs // threads)
    words: list[Any] = []
    for i in cutlass.range_constexpr(pairs):
        of_pair = source + (number + i * threads) * PAIR
        exists = present
        if cutlass.const_expr((i + 1) * threads > all_pairs):
            exists = present if number + i * threads < all_pairs else Int32(-1)
        words += load_or(of_pair, exists, 0, 4) + load_or(of_pair, exists, UNIT * BF16, 4)
    rope: list[Any] = []
    if cutlass.const_expr(rope_units > 0):
        rope += load_or(source + (form.columns + number % rope_units * UNIT), present, 0, 4)
    power = power_of_row(words, threads)
    factor = (power + BIAS) << 7
    factor = factor | (factor << 16)
    words = [to_f16(scaled(word, factor)) for word in words]
    rope = [scaled(word, factor) for word in rope]
    if number == 0:
        ctx.memory.row_unit.array(Float32, HEADS)[row] = power_of_two(-power)
    base = ctx.memory.q.address()
    for i in cutlass.range_constexpr(pairs):
        pair = number + i * threads
        to = base + pair // CHUNK_PAIRS * ctx.plan.operand_bytes
        of_pair = words[PAIR // 2 * i : PAIR // 2 * (i + 1)]
        for half in cutlass.range_constexpr(2):
            unit = pair % CHUNK_PAIRS * 2 + half
            # The first two of four e4m3 in a word of a key are of one 16 bytes of Q, the others of
            # the next.
            if cutlass.const_expr((i + 1) * threads > all_pairs):
                if pair < all_pairs:
                    store_words(to + swizzled_128(row, unit), of_pair[half::2])
            else:
                store_words(to + swizzled_128(row, unit), of_pair[half::2])
    if cutlass.const_expr(rope_units > 0):
        if number < rope_units:
            chunk = base + form.columns // CHUNK * ctx.plan.operand_bytes
            store_words(chunk + swizzled_128(row, number), rope)
    cute.arch.fence_proxy("async.shared", space="cta")
    # q_full: all of Q is written.
    ctx.memory.q_full.arrive()
    ctx.memory.q_full.wait_for(before)


@cute.jit
def power_of_row(words: list[Int32], threads: cutlass.Constexpr) -> Int32:
    """Exponent of the power of two that takes a head's largest latent number to 2^14 to 2^15.

    Args:
        words: the thread's, two bf16 each. threads: neighbouring ones that share the head.
    """
    sizes = [one_word("abs.bf16x2 {$w0}, {$r0};", word) for word in words]
    top = sizes[0]
    for size in sizes[1:]:
        top = one_word("max.bf16x2 {$w0}, {$r0}, {$r1};", top, size)
    top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
    for step in cutlass.range_constexpr(threads.bit_length() - 1):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
    return cutlass.min(TOP_EXPONENT + BIAS - (top >> 7), Int32(MOST_POWER))
