"""Role gather, and Q: rows by bulk copies, one a lane; a warp has a piece of 32 keys of each step.
Scales that lie apart follow a row's data.

Rows keep their format in shared memory: the consumers bring them into registers. The pieces are a
ring for each consumer, which the two warps of its tiles fill: piece n is in stage n % stages. A
consumer releases both pieces of a tile, so no warp is a round before the other one, whichever of
them had a stage before.

Q in shared memory: chunks of 64 columns with the 128-byte swizzle, a row for each head.

Its latent columns are f16, times a power of two for each head, and those of 16 bytes of a key lie
in the order in which the products take these bytes (`products.py`). The RoPE columns stay bf16.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl import cp_async, pipeline, ptx, smem, swizzle, tma
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared import context, gather
from flashdsa.kernels.attention.sm90.decode.shared import words as bits

STORE_BYTES = 16
PAIR = 16
"""Columns that a thread takes together: twice 16 bytes of Q, 16 bytes of a key."""
UNIT = 8
CHUNK_PAIRS = CHUNK // PAIR


def tiles_of_consumer(num_tiles: Any, consumer: Any) -> Any:
    """Tiles of a consumer, of the CTA's `num_tiles`."""
    return (num_tiles + (CONSUMERS - 1) - consumer) // CONSUMERS


def state_of_piece(plan: FewHeadsPlan, consumer: Any, number: Any) -> pipeline.PipelineState:
    """Stage, among those of both rings, and phase of a consumer's piece of that number."""
    return pipeline.Ring(plan.stages // CONSUMERS).state_of_part(consumer, number)


def first_of_lane(role: gather.Gatherer) -> Any:
    """Number of the lane's first slot."""
    return role.ctx.first_slot + role.ctx.thread


def ask_first(role: gather.Gatherer) -> Any:
    """Load what names the lane's first row; nobody waits for it before `gather_pieces`."""
    return gather.ask_slot(role, first_of_lane(role))


@cute.jit
def gather_pieces(role: gather.Gatherer, asked: Int32, before: Any = 0) -> Int32:
    """All four warps: gather every step of a stretch; return its tiles up to those of the last step
    with a valid slot, or of the first step. `asked`: result of `ask_first`. `before`: tiles that
    the warp's consumer had before."""
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    consumer = warp // ctx.plan.tile_pieces
    first = first_of_lane(role)
    row = gather.row_of_slot(role, first, asked)
    if ctx.num_tiles > consumer:
        # Asked for before it is known how many steps have a valid slot: one, at least.
        load_piece(role, row, Int32(before), first, lane)
    last = Int32(-1)
    if ctx.num_steps > 1:
        # Both wait for memory once, together.
        row, last = (
            gather.read_slot(role, first + ctx.plan.tile.step_keys),
            gather.last_slots(role, ctx.num_steps, lane),
        )
    num_tiles = gather.find_extent(role, last, lane, 1)
    for step in cutlass.range(1, tiles_of_consumer(num_tiles, consumer), unroll=1):
        slot = first + step * ctx.plan.tile.step_keys
        following = slot + ctx.plan.tile.step_keys
        asked = gather.ask_slot(role, following)
        load_piece(role, row, before + step, slot, lane)
        row = gather.row_of_slot(role, following, asked)
    return num_tiles


@cute.jit
def gather_tiles(role: gather.Gatherer, before: Int32) -> Int32:
    """All four warps: gather a stretch. Tiles that the warp's consumer had before it, and after."""
    num_tiles = gather_pieces(role, ask_first(role), before)
    warp = cute.arch.make_warp_uniform(role.ctx.thread // WARP_SIZE)
    return before + tiles_of_consumer(num_tiles, warp // role.ctx.plan.tile_pieces)


@cute.jit
def load_piece(role: gather.Gatherer, row: Int32, tile: Int32, slot: Int32, lane: Int32) -> None:
    """One warp: load its piece of a tile, and write which keys are valid. `row`: the lane's,
    negative where its slot is not valid. `tile`: its number among those of the warp's consumer.
    `slot`: the lane's."""
    ctx = role.ctx
    ring = pipeline.RingProducer(ctx.memory.full, ctx.memory.free)
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    tile_pieces = ctx.plan.tile_pieces
    piece = tile * tile_pieces + warp % tile_pieces
    state = state_of_piece(ctx.plan, warp // tile_pieces, piece)
    # free: the consumer has read the piece before in this stage, and its mask.
    ring.acquire(state)
    mask = cute.arch.vote_ballot_sync(row >= 0)
    if lane == 0:
        ctx.memory.masks.array(Int32, ctx.plan.stages)[state.stage] = Int32(mask)
    form, pitch = ctx.plan.form, ctx.plan.row_pitch
    if cutlass.const_expr(form.split):
        cute.arch.sync_warp()  # the arrivals of the lanes below speak for lane 0's mask, too
    offset = state.stage * ctx.plan.piece_bytes + lane * pitch
    if row >= 0:
        pages = gather.pages_of(role, slot)
        source, to = gather.row_address(role, row, pages), ctx.memory.k.bytes() + offset
        if cutlass.const_expr(form.split):
            barrier = ring.full.at(state.stage)
            ring.full.expect_tx(Int32(form.data_bytes), state.stage)
            tma.load_bytes(to, source, Int32(form.data_bytes), barrier)
            scales = gather.scales_address(role, row, pages)
            for word in cutlass.range_constexpr(form.scale_bytes // 4):
                at = ctx.memory.k.address() + offset
                cp_async.copy_word(at, scales, row, form.data_bytes + 4 * word, 4 * word)
            cp_async.arrive_when_copied(barrier)
        else:
            barrier = ring.expect(state.stage, form.row_bytes)
            tma.load_bytes(to, source, Int32(form.row_bytes), barrier)
    else:
        clear_row(ctx.memory.k.address() + offset, pitch)
        ring.commit(state.stage)


@cute.jit
def clear_row(to: Int32, pitch: cutlass.Constexpr) -> None:
    """Write zeros over a row that no slot names: 0 times its old bytes may be NaN."""
    for unit in cutlass.range(pitch // STORE_BYTES, unroll=1):
        smem.store_words(to + unit * STORE_BYTES, [Int32(0)] * 4)


@cute.jit
def load_query(ctx: context.Context, q: cute.Tensor, consumer: Int32, before: Any = 0) -> None:
    """Load Q from device memory, zeros past its heads, by both consumers. `q`: (S, H, d_qk) bf16.
    `before`: items whose Q was loaded before."""
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
        words += gather.load_or(of_pair, exists, 0, 4) + gather.load_or(
            of_pair, exists, UNIT * BF16, 4
        )
    rope: list[Any] = []
    if cutlass.const_expr(rope_units > 0):
        rope += gather.load_or(source + (form.columns + number % rope_units * UNIT), present, 0, 4)
    power = power_of_row(words, threads)
    factor = (power + bits.BIAS) << 7
    factor = factor | (factor << 16)
    words = [bits.to_f16(bits.scaled(word, factor)) for word in words]
    rope = [bits.scaled(word, factor) for word in rope]
    if number == 0:
        ctx.memory.row_unit.array(Float32, HEADS)[row] = bits.power_of_two(-power)
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
                    smem.store_words(to + swizzle.swizzled_128(row, unit), of_pair[half::2])
            else:
                smem.store_words(to + swizzle.swizzled_128(row, unit), of_pair[half::2])
    if cutlass.const_expr(rope_units > 0):
        if number < rope_units:
            chunk = base + form.columns // CHUNK * ctx.plan.operand_bytes
            smem.store_words(chunk + swizzle.swizzled_128(row, number), rope)
    cute.arch.fence_proxy("async.shared", space="cta")
    # q_full: all of Q is written.
    ctx.memory.q_full.arrive()
    ctx.memory.q_full.wait_for(before)


@cute.jit
def power_of_row(words: list[Int32], threads: cutlass.Constexpr) -> Int32:
    """Exponent of the power of two that takes a head's largest latent number to 2^14 to 2^15.
    `words`: the thread's, two bf16 each. `threads`: neighbouring ones that share the head."""
    sizes = [ptx.word("abs.bf16x2 {$w0}, {$r0};", word) for word in words]
    top = sizes[0]
    for size in sizes[1:]:
        top = ptx.word("max.bf16x2 {$w0}, {$r0}, {$r1};", top, size)
    top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
    for step in cutlass.range_constexpr(threads.bit_length() - 1):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
    return cutlass.min(bits.TOP_EXPONENT + bits.BIAS - (top >> 7), Int32(bits.MOST_POWER))
