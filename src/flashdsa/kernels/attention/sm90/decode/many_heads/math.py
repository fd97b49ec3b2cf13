"""Role math: each consumer computes S^T and P^T of every other tile, and has half of O's dims.

Both take the tiles' P in order, so consumer 1 is behind consumer 0: while one computes
exponentials, the other one multiplies. Maxima follow the tiles in the same order: consumer 1 knows
those of tile 0 before it computes P of tile 1, and consumer 0 those of tile 1 before P of the next
step.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import F16_KIND, MMA_ROWS, THREAD_ROWS, pack
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import RingConsumer
from flashdsa.dsl.wgmma import along_k
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.gather import load_query
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILES
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import head_of
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import WARPS
from flashdsa.kernels.attention.sm90.decode.key_rows.scales import (
    LANE_ROWS,
    load_scale,
    load_scales,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import STATE
from flashdsa.kernels.attention.sm90.decode.many_heads.products import (
    COUNT,
    load_block,
    multiply_tile,
    multiply_values,
    states_of_tile,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.softmax import (
    MOVED,
    SEEN,
    Heads,
    Place,
    address_of_moves,
    adopt_moves,
    any_of_consumer,
    exponentiate,
    factors_of_heads,
    load_pairs,
    mask_keys,
    moves_of,
    new_heads,
    power_for,
    state_of,
    store_p,
    subtract_tops,
    update_maxima,
)
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    steps_of,
    wait_for_extent,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import F16
from flashdsa.kernels.attention.sm90.decode.shared.query import convert_query
from flashdsa.kernels.attention.sm90.decode.shared.words import BIAS, power_of_two


class Registers(NamedTuple):
    """Registers of a thread."""

    s: cute.Tensor  # S^T of a tile
    out: cute.Tensor  # O^T: the blocks of this consumer's dims, COUNT fp32 each
    heads: Heads


@cute.jit
def consume(role: Math) -> Registers:
    """Take every step of the CTA."""
    ctx = role.ctx
    if ctx.thread < STATE and role.consumer == 0:
        state_of(ctx)[ctx.thread] = Float32(0.0)
    if ctx.num_steps > 0:
        ask_query(role)
        take_query(role, 0)
    out = cute.make_rmem_tensor(ctx.plan.blocks * COUNT, Float32)
    s = cute.make_rmem_tensor(COUNT, Float32)
    out.fill(0.0)
    s.fill(0.0)
    r = Registers(s, out, new_heads())
    num_tiles = wait_for_extent(ctx)
    for step in cutlass.range(steps_of(num_tiles), unroll=1):
        take_step(role, r, step, num_tiles - step * TILES, Boolean(step == 0))
    return r


@cute.jit
def ask_query(role: Math) -> None:
    """One thread asks for Q; nobody reads the one before any more."""
    ctx = role.ctx
    # Consumer 0 stores the factors meanwhile.
    if role.consumer == 1 and ctx.thread == 0:
        ctx.memory.q_full.arrive_and_expect_tx()
        load_query(ctx, role.q, [ctx.head, ctx.query])


def take_query(role: Math, number: Any) -> None:
    """Wait for Q, and convert it.

    Args:
        number: of the items whose Q was converted before.
    """
    role.ctx.memory.q_full.wait_for(number)
    convert_query(role.ctx, role.consumer, Int32(number))


@cute.jit
def take_step(role: Math, r: Registers, step: Int32, num_tiles: Int32, is_first: Boolean) -> None:
    """Take a step. `num_tiles`: from this step on; 1: consumer 1 has no tile. `is_first`: O is
    0."""
    ctx = role.ctx
    if role.consumer < num_tiles:
        place = compute_scores(role, r, step * TILES + role.consumer)
        adopt_first(role, r, step)
        compute_p(role, r, place, step)
    else:
        adopt_first(role, r, step)
        # Both barriers of P complete a phase for each step, and each phase is awaited.
        ctx.memory.p_free.wait_round(step - 1, role.consumer)
        ctx.memory.p_full.arrive(role.consumer)
    add_tile(role, r, step, 0, is_first)
    if num_tiles > 1:
        add_tile(role, r, step, 1, Boolean(False))
    else:
        skip_tile(ctx, step)
    warpgroup.wait_group(0)
    # p_free: the other consumer may write P of its next tile.
    ctx.memory.p_free.arrive(1 - role.consumer)


@cute.jit
def adopt_first(role: Math, r: Registers, step: Int32) -> None:
    """Consumer 1: adopt the moves before tile 0 of a step."""
    if role.consumer == 1:
        # p_full: maxima of tile 0 are stored.
        role.ctx.memory.p_full.wait_round(step, 0)
        adopt_moves(role.ctx, r.heads, 0)


@cute.jit
def compute_scores(role: Math, r: Registers, tile: Int32) -> Place:
    """Compute S^T of a tile of the CTA."""
    ctx, plan = role.ctx, role.ctx.plan
    # Or addresses would be computed once, and spill.
    thread = opaque(ctx.thread)
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    # A warp has 16 keys, of one of the pieces, as rows of S^T.
    key = warp % 2 * MMA_ROWS
    ring = RingConsumer(ctx.memory.full, ctx.memory.free)
    states = states_of_tile(plan, tile)
    for state in states:
        ring.wait(state)
    stage = states[0].stage
    if warp >= WARPS // 2:
        stage = states[1].stage
    mask = ctx.memory.masks.array(Int32, plan.stages)[stage]
    piece = ctx.memory.k.address() + stage * plan.piece_bytes
    keys = piece + (key + lane % 16) * plan.row_pitch + lane // 16 * 16
    row = piece + (key + lane // 4) * plan.row_pitch
    scales = load_scales(plan, row)
    powers = [power_for(of_key) for of_key in scales]
    units = [power_of_two(power) for power in powers]
    pairs = [
        pack(scales[0][group] * units[0], scales[1][group] * units[1], F16_KIND)
        for group in range(plan.form.num_scales)
    ]
    both = [((power + BIAS) << 7) * 0x10001 for power in powers]
    multiply_tile(plan, r.s, along_k(ctx.memory.q.address()), keys, pairs, both)
    return Place(row, key + lane // 4, mask, powers)


def f16_pair(value: Any) -> Any:
    """An fp32 as two equal f16."""
    return pack(value, value, F16_KIND)


@cute.jit
def compute_p(role: Math, r: Registers, place: Place, step: Int32) -> None:
    """Compute P^T of the consumer's tile of a step from S^T, and store it."""
    ctx, consumer = role.ctx, role.consumer
    tops = load_pairs(ctx.memory.maxima.address(), ctx.thread % WARP_SIZE)
    factors = factors_of_heads(ctx, role.output.scale)
    largest = subtract_tops(r.s, place, factors, tops)
    mask_keys(r.s, place)
    is_first = state_of(ctx)[SEEN] == 0.0
    power = cutlass.min(place.powers[0], place.powers[1])
    is_far = (largest > ctx.plan.lazy_log2) | (power < r.heads.power[0])
    is_far = is_far | (is_first & (place.mask != 0))
    # p_free: the other consumer has read P, scales and moves of the step before.
    ctx.memory.p_free.wait_round(step - 1, consumer)
    has_moved = any_of_consumer(ctx, is_far, step, consumer)
    if has_moved:
        update_maxima(ctx, r.s, r.heads, tops, power, is_first, consumer)
    if ctx.thread == 0:
        moves_of(ctx, consumer)[MOVED] = Float32(1.0) if has_moved else Float32(0.0)
    scales = load_scale_of_lane(ctx, place.row)
    p = exponentiate(r.s, r.heads.totals)
    store_p(ctx.thread, p, ctx.memory.p.address() + consumer * ctx.plan.operand_bytes)
    store_scales(ctx, scales, r.heads.power[0], consumer)
    # The products read P through the asynchronous proxy.
    cute.arch.fence_proxy("async.shared", space="cta")
    ctx.memory.p_full.arrive(consumer)
    # p_full: all threads of this consumer have stored theirs.
    ctx.memory.p_full.wait_round(step, consumer)


def load_scale_of_lane(ctx: Context, row: Int32) -> list[Any]:
    """Load the scale of group lane % 4 of both keys that four lanes have."""
    group = ctx.thread % 4
    return [
        load_scale(ctx.plan, row + LANE_ROWS * h * ctx.plan.row_pitch, group)
        for h in range(THREAD_ROWS)
    ]


@cute.jit
def store_scales(ctx: Context, scales: list[Any], power: Int32, consumer: Int32) -> None:
    """Store the scales of `load_scale_of_lane` times 2^power, in f16.

    Those that a lane takes for its products, of keys 2 i, 2 i + 1 and of each 8 further on, lie
    together.
    """
    # Or the address would be computed once, and spill.
    thread = opaque(ctx.thread)
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    key = lane // 4
    place = (key // 2 * (2 * WARPS) + 2 * warp) * 2 + key % 2
    to = ctx.memory.table.address() + consumer * ctx.plan.table_bytes
    to = to + (lane % 4 * ctx.plan.tile.keys + place) * F16
    unit = power_of_two(power)
    for h in cutlass.range_constexpr(THREAD_ROWS):
        store_half(to + 2 * h * F16, f16_pair(scales[h] * unit))


def store_half(address: Any, word: Any) -> None:
    """Store the low 16 bits of a word to shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }",
        read_only_args=[address, word],
    )


@cute.jit
def add_tile(
    role: Math, r: Registers, step: Int32, tile: cutlass.Constexpr, is_first: Boolean
) -> None:
    """Issue the products of a tile of a step. `is_first`: O is 0."""
    ctx, plan = role.ctx, role.ctx.plan
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    states = states_of_tile(plan, step * TILES + tile)
    if tile != role.consumer:
        # The other consumer's tile: its rows have come.
        for state in states:
            RingConsumer(ctx.memory.full, ctx.memory.free).wait(state)
    columns = ctx.memory.k.address() + lane * plan.row_pitch + warp * 16
    columns = columns + role.consumer * (plan.blocks * ROWS)
    pieces = [columns + state.stage * plan.piece_bytes for state in states]
    loaded = plan.blocks if plan.releases_early else 1
    blocks = [load_block(pieces, block) for block in range(loaded)]
    if cutlass.const_expr(plan.releases_early):
        release_tile(ctx, step * TILES + tile)
    if cutlass.const_expr(tile == 1):
        if role.consumer == 0:
            # p_full: P of tile 1 and its moves are stored.
            ctx.memory.p_full.wait_round(step, 1)
            adopt_moves(ctx, r.heads, 1)
    if (moves_of(ctx, tile)[MOVED] != 0.0) & (is_first == 0):
        warpgroup.wait_group(0)
        factors = load_pairs(address_of_moves(ctx, tile), lane)
        for i in cutlass.range_constexpr(cute.size(r.out)):
            r.out[i] = r.out[i] * factors[head_of(i % COUNT)]
    groups = plan.blocks * ROWS // plan.form.group
    table = ctx.memory.table.address() + role.consumer * (groups * plan.tile.keys * F16)
    multiply_values(
        plan,
        r.out,
        blocks,
        pieces,
        along_k(ctx.memory.p.address() + tile * plan.operand_bytes),
        table + tile * plan.table_bytes + lane % 4 * (4 * WARPS * F16),
        first=tile == 0,
    )
    if cutlass.const_expr(not plan.releases_early):
        release_tile(ctx, step * TILES + tile)


@cute.jit
def skip_tile(ctx: Context, step: Int32) -> None:
    """Release the pieces of tile 1 of a step, which has no keys."""
    for state in states_of_tile(ctx.plan, step * TILES + 1):
        RingConsumer(ctx.memory.full, ctx.memory.free).wait(state)
    release_tile(ctx, step * TILES + 1)
    ctx.memory.p_full.wait_round(step, 1)


@cute.jit
def release_tile(ctx: Context, tile: Int32) -> None:
    """Release the pieces of a tile, whose words are in registers."""
    # Bulk copies overwrite memory that threads have read.
    cute.arch.fence_proxy("async.shared", space="cta")
    for state in states_of_tile(ctx.plan, tile):
        ctx.memory.free.arrive(state.stage)
