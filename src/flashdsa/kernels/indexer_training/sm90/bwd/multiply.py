"""Role multiply: q k, its gradient A, dQ, dK and dW, two warpgroups over each tile.

Each has a half of the group's blocks of 64 rows, whose dQ it keeps in registers, and a half of the
dims of dK, for which it needs the matrices A of all blocks. A = g w where q k is positive, and 0
elsewhere. The products of dQ run while a tile's dK is added, and while A of the next tile is
computed. All operands are tiles of 128-byte lines, swizzled.

64 dims of a tile's dK are added at a time. Lane j of a row's four has columns 2 j and 2 j + 1 of
each eight in an accumulator. Two neighbouring lanes exchange, so that each has four neighbouring
dims; then the lanes of two neighbouring rows, so that all eight have 128 bytes of one row, and then
of the other.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives as prims

from flashdsa.dsl import fragments, gmem, pipeline, swizzle, warp, warp_matrix
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.smem import shared_pointer
from flashdsa.dsl.wgmma import along_k, along_n, descriptor_behind, multiply_bf16
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd import load, parts
from flashdsa.kernels.indexer_training.sm90.bwd import plan as sizes
from flashdsa.plan.row_tiles import CHUNK_BYTES, ROW_BYTES
from flashdsa.plan.row_tiles import CHUNK_COLUMNS as CHUNK
from flashdsa.problem import INDEX_HEAD_DIM

PAIR = 2
"""Neighbouring keys of a thread in each eight."""
PIECE_KEYS = 16


@cute.jit
def gate(
    acc: cute.Tensor,
    weights: list[Float32],
    sums: cute.Tensor,
    matrix: Int32,
    gradients: Int32,
    thread: Int32,
    block: cutlass.Constexpr,
) -> None:
    """Write A of a block to its matrix, and add sum g relu(q k) to this thread's sums. `acc`: q k
    of the block's rows and the tile's keys. `weights`, `sums`: of this thread's rows of each own
    block. `matrix`: address. `gradients`: address of those of this warp's query. `block`: which of
    the own ones it is."""
    lane = thread % WARP_SIZE
    row = thread // WARP_SIZE * fragments.MMA_ROWS + lane % fragments.MMA_ROWS
    mine = gradients + lane % 4 * (PAIR * sizes.FP32)
    for piece in cutlass.range_constexpr(sizes.TILE_KEYS // PIECE_KEYS):
        words = []
        for eight in cutlass.range_constexpr(2 * piece, 2 * piece + 2):
            g = prims.load_ext(
                shared_pointer(mine + eight * 8 * sizes.FP32), dtype=Float32, count=PAIR
            )
            for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
                of_row = fragments.THREAD_ROWS * block + h
                values = []
                for i in cutlass.range_constexpr(PAIR):
                    product = acc[4 * eight + 2 * h + i]
                    # The gate is shut at 0, and for NaN.
                    open_gate = g[i] if product > 0.0 else Float32(0.0)
                    sums[of_row] = sums[of_row] + open_gate * product
                    values.append(open_gate * weights[of_row])
                words.append(warp_matrix.pack_bf16(*values))
        unit = 2 * piece + lane // fragments.MMA_ROWS
        warp_matrix.store_matrices(matrix + swizzle.swizzled_128(row, unit), words)


def clear(acc: Any, count: int) -> None:
    """Zeros."""
    for i in range(count):
        acc[i] = Float32(0.0)


STEP_LINES = fragments.MMA_K * ROW_BYTES
"""Bytes from 16 lines to the next ones, where K of a product is along the lines."""
STEP_COLUMNS = fragments.MMA_K * sizes.BF16
OF_SCORES = sizes.TILE_KEYS // 2
"""fp32 of q k, or of 64 dims of dK, in a thread."""
OF_DQ = INDEX_HEAD_DIM // 2


def issue_scores(acc: Any, q: Any, k: Any) -> None:
    """Issue acc = Q K^T of 64 rows and 64 keys, as one group; q, k: addresses."""
    warpgroup.fence()
    a, b = opaque(along_k(q)), opaque(along_k(k))
    for chunk in range(sizes.CHUNKS):
        for step in range(CHUNK // fragments.MMA_K):
            offset = chunk * CHUNK_BYTES + step * STEP_COLUMNS
            first, second = descriptor_behind(a, offset), descriptor_behind(b, offset)
            more = (chunk, step) != (0, 0)
            multiply_bf16(acc, sizes.TILE_KEYS, first, second, accumulate=more, transposes=(0, 0))
    warpgroup.commit_group()


def issue_dq(acc: Any, matrix: Any, k: Any) -> None:
    """Issue acc += A K of 64 rows, as one group; matrix, k: addresses."""
    warpgroup.fence()
    a, b = opaque(along_k(matrix)), opaque(along_n(k))
    for step in range(sizes.TILE_KEYS // fragments.MMA_K):
        first = descriptor_behind(a, step * STEP_COLUMNS)
        second = descriptor_behind(b, step * STEP_LINES)
        multiply_bf16(acc, INDEX_HEAD_DIM, first, second, accumulate=True, transposes=(0, 1))
    warpgroup.commit_group()


def issue_dk(acc: Any, matrices: Any, q: Any, blocks: int) -> None:
    """Issue acc = A^T Q of 64 keys and 64 dims, as one group. `matrices`: address of the group's
    matrices. `q`: of the chunk of those dims in the first block."""
    warpgroup.fence()
    a, b = opaque(along_n(matrices)), opaque(along_n(q))
    for block in range(blocks):
        for step in range(sizes.ROWS // fragments.MMA_K):
            first = descriptor_behind(a, block * sizes.MATRIX_BYTES + step * STEP_LINES)
            second = descriptor_behind(b, block * sizes.BLOCK_BYTES + step * STEP_LINES)
            more = (block, step) != (0, 0)
            multiply_bf16(acc, CHUNK, first, second, accumulate=more, transposes=(1, 1))
    warpgroup.commit_group()


LINE_DIMS = 32
"""128 bytes of dK."""
NEIGHBOUR, NEXT_ROW = 1, 4
"""Distances of lanes."""


@cute.jit
def four_neighbours(acc: cute.Tensor, pair: cutlass.Constexpr, h: cutlass.Constexpr) -> list[Any]:
    """The lane's 4 of 16 columns; even lanes own the first 8."""
    odd = cute.arch.lane_idx() % 2 == 1
    first, second = 8 * pair + 2 * h, 8 * pair + 4 + 2 * h
    got, kept = [], []
    for i in cutlass.range_constexpr(2):
        sent = acc[first + i] if odd else acc[second + i]
        got.append(cute.arch.shuffle_sync_bfly(sent, NEIGHBOUR))
        kept.append(acc[second + i] if odd else acc[first + i])
    left = [got[i] if odd else kept[i] for i in range(2)]
    right = [kept[i] if odd else got[i] for i in range(2)]
    return left + right


@cute.jit
def add_dims(
    to: cute.Pointer, acc: cute.Tensor, keys: Int32, thread: Int32, ordered: cutlass.Constexpr
) -> None:
    """Add the accumulators to rows of dK; a negative key has no row. `to`: first of the 64 dims in
    row 0 of dK; ordered: in the row of the tile's first key. `keys`: address of the tile's
    numbers. `ordered`: the list's own rows are written, and nothing is added."""
    lane = thread % WARP_SIZE
    is_next = lane // NEXT_ROW % 2 == 1
    dim = lane // NEXT_ROW % 2 * (LINE_DIMS // 2) + lane % 2 * 8 + lane % 4 // 2 * 4
    # The pair of rows that this lane shares: first the even one, then the odd one.
    even = thread // WARP_SIZE * fragments.MMA_ROWS + lane // (2 * NEXT_ROW) * 2
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        place = even + 8 * h
        of_pair = prims.load_ext(shared_pointer(keys + place * sizes.FP32), dtype=Int32, count=2)
        for line in cutlass.range_constexpr(CHUNK // LINE_DIMS):
            left = four_neighbours(acc, 2 * line, h)
            right = four_neighbours(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], NEXT_ROW)
                for i in range(4)
            ]
            of_even = [got[i] if is_next else left[i] for i in range(4)]
            of_odd = [right[i] if is_next else got[i] for i in range(4)]
            for values, other in ((of_even, 0), (of_odd, 1)):
                key = of_pair[other]
                at = to + (line * LINE_DIMS + dim)
                if cutlass.const_expr(ordered):
                    gmem.store4_if(key, at + Int64(place + other) * INDEX_HEAD_DIM, values)
                else:
                    gmem.add4_if(key, at + Int64(key) * INDEX_HEAD_DIM, values)


MATRICES_READY = 1
"""Named barrier of the role."""


class Multiplier(NamedTuple):
    """Reads q, k, gradients, rows; writes a, dQ, dK, dW. Signals k_free, q_free."""

    ctx: load.Context
    half: Int32  # of blocks, and of dims of dK
    weights: cute.Tensor  # (S * H,) fp32
    dq: cute.Tensor  # (S * H, 128) bf16
    dk: cute.Tensor  # (S_kv, 128) fp32; ordered: (groups * capacity, 128)
    dw: cute.Tensor  # (S * H,) fp32
    of_parts: parts.Parts

    @property
    def first_block(self) -> Any:
        """This warpgroup's first block."""
        return self.half * self.ctx.plan.own_blocks


class Own(NamedTuple):
    """Values of an item that a thread keeps."""

    dq: list[Any]  # 64 fp32 of each own block
    sums: cute.Tensor  # of its rows: g relu(q k)
    weights: list[Float32]  # of its rows


class Place(NamedTuple):
    """Addresses of a tile's parts in shared memory."""

    k: Int32
    gradients: Int32
    rows: Int32
    matrices: Int32


@cute.jit
def place_of(ctx: load.Context, stage: Int32, number: Int32) -> Place:
    """Addresses of the CTA's tile of that number."""
    memory, plan = ctx.memory, ctx.plan
    return Place(
        memory.k.address() + stage * sizes.BLOCK_BYTES,
        memory.gradients.address() + stage * plan.gradient_bytes,
        memory.rows.address() + stage * (sizes.TILE_KEYS * sizes.FP32),
        memory.a.address() + number % sizes.MATRIX_BUFFERS * (plan.blocks * sizes.MATRIX_BYTES),
    )


@cute.jit
def wait_for_tile(ctx: load.Context, number: Int32) -> Int32:
    """Wait for a tile; return its stage."""
    ring = pipeline.RingConsumer(ctx.memory.k_full, ctx.memory.k_free)
    state = ring.state(number)
    # k_full[stage]: threads have copied the tile; the fence shows it to wgmma.
    ring.wait(state)
    cute.arch.fence_proxy("async.shared", space="cta")
    return state.stage


@cute.jit
def first_row(role: Multiplier, block: cutlass.Constexpr) -> Int32:
    """This thread's first row in an own block, counted from the group's first row."""
    ctx = role.ctx
    own = ctx.thread // WARP_SIZE * fragments.MMA_ROWS + ctx.thread % WARP_SIZE // 4
    return (role.first_block + block) * sizes.ROWS + own


@cute.jit
def read_weights(role: Multiplier, group: Int32) -> list[Float32]:
    """Weights of this thread's rows; 0 of a query that has no gradient, or is past the last."""
    ctx = role.ctx
    plan = ctx.plan
    present = ctx.lists.present[group]
    weights = []
    for block in cutlass.range_constexpr(plan.own_blocks):
        for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
            row = first_row(role, block) + 8 * h
            weight = Float32(0.0)
            if (present >> (row // plan.num_heads)) & 1 == 1:
                at = Int64(group) * plan.rows + row
                weight = (role.weights.iterator + at).load()
            weights.append(weight)
    return weights


@cute.jit
def gate_block(
    role: Multiplier, own: Own, acc: cute.Tensor, place: Place, block: cutlass.Constexpr
) -> None:
    """Compute A of an own block, and its part of dW."""
    ctx = role.ctx
    row = (role.first_block + block) * sizes.ROWS + ctx.thread // WARP_SIZE * fragments.MMA_ROWS
    gradients = place.gradients + row // ctx.plan.num_heads * (sizes.TILE_KEYS * sizes.FP32)
    matrix = place.matrices + (role.first_block + block) * sizes.MATRIX_BYTES
    gate(acc, own.weights, own.sums, matrix, gradients, ctx.thread, block)


@cute.jit
def publish(ctx: load.Context) -> None:
    """Publish both warpgroups' matrices: written by threads, shown to wgmma by the fence."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(
        barrier_id=MATRICES_READY, number_of_threads=sizes.MULTIPLIERS * WARPGROUP_SIZE
    )


@cute.jit
def start_item(role: Multiplier, own: Own, accs: Any, number: Int32) -> None:
    """Compute A of the item's first tile."""
    ctx = role.ctx
    place = place_of(ctx, wait_for_tile(ctx, number), number)
    q = ctx.memory.q.address() + role.first_block * sizes.BLOCK_BYTES
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        issue_scores(accs[block], q + block * sizes.BLOCK_BYTES, place.k)
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        warpgroup.wait_group(ctx.plan.own_blocks - 1 - block)
        gate_block(role, own, accs[block], place, block)
    publish(ctx)


@cute.jit
def multiply_tile(
    role: Multiplier, own: Own, accs: Any, to: cute.Pointer, number: Int32, last: cutlass.Constexpr
) -> None:
    """Compute dQ and dK of the CTA's tile of that number, and A of the next one, unless it is the
    last.

    The first accumulators have q k of the next tile for the first block. The others have this
    tile's dK, and then q k for the second block.

    Args:
        to: as for `add_dims`.
    """
    ctx = role.ctx
    plan = ctx.plan
    ring = pipeline.RingConsumer(ctx.memory.k_full, ctx.memory.k_free)
    state = ring.state(number)
    place = place_of(ctx, state.stage, number)
    q = ctx.memory.q.address()
    own_q = q + role.first_block * sizes.BLOCK_BYTES
    matrix = place.matrices + role.first_block * sizes.MATRIX_BYTES
    scores, dk = accs
    issue_dk(dk, place.matrices, q + role.half * CHUNK_BYTES, plan.blocks)
    ahead = place
    if cutlass.const_expr(not last):
        ahead = place_of(ctx, wait_for_tile(ctx, number + 1), number + 1)
        issue_scores(scores, own_q, ahead.k)
    issue_dq(own.dq[0], matrix, place.k)
    warpgroup.wait_group(1 if last else 2)
    add_dims(to, dk, place.rows, ctx.thread, plan.ordered)
    if cutlass.const_expr(plan.own_blocks > 1):
        if cutlass.const_expr(not last):
            issue_scores(dk, own_q + sizes.BLOCK_BYTES, ahead.k)
        issue_dq(own.dq[1], matrix + sizes.MATRIX_BYTES, place.k)
    if cutlass.const_expr(not last):
        # Scores and dQ of each own block are in flight.
        warpgroup.wait_group(2 * plan.own_blocks - 1)
        gate_block(role, own, scores, ahead, 0)
        if cutlass.const_expr(plan.own_blocks > 1):
            warpgroup.wait_group(1)
            gate_block(role, own, dk, ahead, 1)
        publish(ctx)
    warpgroup.wait_group(0)
    ring.release(state.stage)


@cute.jit
def store_item(role: Multiplier, own: Own, item: load.Item) -> None:
    """Write dQ and dW of this warpgroup's blocks, of a part to its rows. Rows past the last one are
    not written."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    first = Int64(item.group) * ctx.plan.rows
    of_part = Int64(item.part) * ctx.plan.rows
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
            row = first_row(role, block) + 8 * h
            total = warp.neighbours_sum(own.sums[fragments.THREAD_ROWS * block + h], 4)
            if item.part >= 0:
                at = role.of_parts.dq.iterator + ((of_part + row) * INDEX_HEAD_DIM + lane % 4 * 2)
                for eight in cutlass.range_constexpr(INDEX_HEAD_DIM // 8):
                    two = [own.dq[block][4 * eight + 2 * h + i].bitcast(Int32) for i in range(2)]
                    gmem.store2(at + 8 * eight, *two)
                if lane % 4 == 0:
                    (role.of_parts.dw.iterator + (of_part + row)).store(total)
            elif first + row < role.dq.shape[0]:
                at = role.dq.iterator + ((first + row) * INDEX_HEAD_DIM + lane % 4 * 2)
                to = cute.recast_ptr(at, dtype=Int32)
                for eight in cutlass.range_constexpr(INDEX_HEAD_DIM // 8):
                    values = [own.dq[block][4 * eight + 2 * h + i] for i in range(2)]
                    (to + 4 * eight).store(warp_matrix.pack_bf16(*values))
                if lane % 4 == 0:
                    (role.dw.iterator + (first + row)).store(total)


@cute.jit
def place_of_dk(role: Multiplier, group: Int32, tile: Int32) -> cute.Pointer:
    """First of this warpgroup's dims in row 0 of dK; ordered: in the row of the tile's first
    key."""
    to = role.dk.iterator + role.half * CHUNK
    if cutlass.const_expr(role.ctx.plan.ordered):
        line = Int64(group) * role.ctx.lists.rows.shape[1]
        to = to + (line + tile * sizes.TILE_KEYS) * INDEX_HEAD_DIM
    return to


@cute.jit
def multiply_all(role: Multiplier) -> None:
    """Multiply every tile of the CTA's items."""
    ctx = role.ctx
    own_blocks = ctx.plan.own_blocks
    accs = [cute.make_rmem_tensor(OF_SCORES, Float32) for _ in range(2)]
    dq = [cute.make_rmem_tensor(OF_DQ, Float32) for _ in range(own_blocks)]
    sums = cute.make_rmem_tensor(fragments.THREAD_ROWS * own_blocks, Float32)
    number, items = Int32(0), Int32(0)
    for index in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        item = load.locate_item(ctx, index)
        own = Own(dq, sums, read_weights(role, item.group))
        for acc in dq:
            clear(acc, OF_DQ)
        clear(sums, fragments.THREAD_ROWS * own_blocks)
        if item.count > 0:
            # q_full: threads have copied Q; the fence shows it to wgmma.
            ctx.memory.q_full.wait_round(items)
            cute.arch.fence_proxy("async.shared", space="cta")
            items += 1
            start_item(role, own, accs, number)
            tile = item.first
            for _ in cutlass.range(item.count - 1, unroll=1):
                to = place_of_dk(role, item.group, tile)
                multiply_tile(role, own, accs, to, number, False)
                tile = load.tile_after(item, tile)
                number += 1
            multiply_tile(role, own, accs, place_of_dk(role, item.group, tile), number, True)
            number += 1
            pipeline.arrive_warp(ctx.memory.q_free, 0, ctx.thread)
        store_item(role, own, item)
