"""P and dS of the backward, for Hopper: a CTA takes two row blocks of a group at a time.

gather           | warpgroup 1               | warpgroup 2
---------------- | ------------------------- | -------------------------
a tile's rows,   | S, dP of its 64 rows      |
chunk by chunk   | P, dS -> workspace        | S, dP of its 64 rows
                 | S, dP of the next tile    | P, dS -> workspace

Role gather copies the rows of the lists into the ring of keys, a chunk of 64 columns at a time.

Role score has Q in shared memory and dO in registers: S = Q K^T and dP = dO V^T, V being K's first
columns. P and dS go straight to the workspace: a quad has 8 keys of 4 neighbouring rows once the
warp has transposed its accumulators, which are of rows in the order of `row_of`. dS is made from P
in fp32. The two warpgroups run on their own; the second one starts when the first has issued a
tile's products, so that one's softmax runs during the other's products.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl import fragments, gmem, grids, ptx, registers, swizzle, wgmma
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import Barriers, PipelineState, Ring, RingConsumer, RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS, row_sources
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.dsl.warp_matrix import pack_bf16, transpose_8x8
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import FIRST, is_taken
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.mend import flat
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import (
    ITEM_BLOCKS,
    QUERIES,
    WARP_ROWS,
    ScoresPlan,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import MATRICES, P_MATRIX, matrix_offset
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES

STEPS = CHUNK // fragments.MMA_K
"""wgmmas of a chunk."""
A_WORDS = 4
"""Words of A in a thread, two bf16 each, of one wgmma."""
SECOND_STARTS, Q_READY = 1, 2
"""Named barriers; Q_READY is the first of two, one for each warpgroup."""


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are first_item, first_item + num_ctas, ...
    An item is two neighbouring row blocks of a group: item i has the row blocks 2 i and 2 i + 1."""

    memory: Memory
    lists: Lists
    row_blocks: Int32  # of a group
    first_item: Int32
    num_ctas: Int32
    num_items: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> ScoresPlan:
        return self.memory.plan

    def group_of(self, item: Int32) -> Int32:
        return item * ITEM_BLOCKS // self.row_blocks


@cute.jit
def tiles_of(ctx: Context, group: Int32) -> Int32:
    """Tiles of the group's list."""
    keys = ctx.plan.tile.keys
    return (ctx.lists.counts[group] + (keys - 1)) // keys


@cute.jit
def release(ctx: Context, free: Barriers, stage: Int32) -> None:
    """Arrive once for the warp, whose lanes have synchronised after their reads."""
    if ctx.thread % WARP_SIZE == 0:
        free.arrive(stage)


class Gatherer(NamedTuple):
    """Fills k. Signals k_full."""

    ctx: Context
    kv: cute.Tensor  # (S_kv, 576) bf16


@cute.jit
def copy_tile(
    role: Gatherer, rows: list[Int32], to: Int32, unit: Int32, at: PipelineState
) -> PipelineState:
    """Copy this thread's part of a tile; return the ring's next state."""
    tile = role.ctx.plan.tile
    ring = RingProducer(role.ctx.memory.k_full, role.ctx.memory.k_free)
    sources = row_sources(role.kv, rows, unit)
    for chunk in cutlass.range_constexpr(tile.chunks):
        # k_free: both consumers have read what the slot held before.
        ring.acquire(at)
        for turn in cutlass.range_constexpr(TURNS):
            place = turn * ROWS_AT_ONCE * ROW_BYTES, chunk * ROW_BYTES
            copy_units(to + at.stage * tile.chunk_bytes, sources[turn], rows[turn], [place])
        arrive_when_copied(ring.full.at(at.stage))
        at = at.advanced()
    return at


@cute.jit
def read_rows(ctx: Context, line: cute.Pointer, tile: Int32, own: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + (tile * ctx.plan.tile.keys + own)
    return [(first + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every tile of the CTA."""
    ctx = role.ctx
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.memory.k.address() + swizzle.swizzled_128(own, unit)
    at = Ring(ctx.plan.slots).start()
    for item in cutlass.range(ctx.first_item, ctx.num_items, ctx.num_ctas, unroll=1):
        group = ctx.group_of(item)
        tiles = tiles_of(ctx, group)
        line = ctx.lists.rows.iterator + Int64(group) * ctx.lists.rows.shape[1]
        rows = read_rows(ctx, line, Int32(0), own)
        for tile in cutlass.range(tiles, unroll=1):
            # The next tile's numbers come while this tile's rows are waited for.
            ahead = read_rows(ctx, line, cutlass.min(tile + 1, tiles - 1), own)
            at = copy_tile(role, rows, to, unit, at)
            rows = ahead


def multiply_chunk(plan: ScoresPlan, s: Any, dp: Any, q: Any, do: Any, k: Any, chunk: int) -> None:
    """Issue S += Q K^T and dP += dO V^T over the columns of a chunk; the first one clears both.
    `q`: low word of Q's first chunk. `do`: this thread's words of dO. `k`: low word of the chunk.
    """
    for step in range(STEPS):
        offset = step * fragments.MMA_K * BF16
        b = wgmma.descriptor_behind(k, offset)
        a = wgmma.descriptor_behind(q, chunk * ROWS * ROW_BYTES + offset)
        more, keys = (chunk, step) != (0, 0), plan.tile.keys
        wgmma.multiply_bf16(s, keys, a, b, accumulate=more, transposes=(0, 0))
        if chunk < plan.tile.value_chunks:
            first = A_WORDS * (chunk * STEPS + step)
            a = [do[first + i] for i in range(A_WORDS)]
            wgmma.multiply_bf16(dp, keys, a, b, accumulate=more, transposes=(0,))


class Scorer(NamedTuple):
    """Reads k; writes q and the workspace. Signals k_free."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    delta: cute.Tensor  # (S * H,) fp32
    workspace: cute.Tensor  # (row blocks, bytes) uint8
    heads: Int32
    sm_scale: Float32
    block_of_item: Int32  # this warpgroup's, 0 or 1


class Rows(NamedTuple):
    """This thread's values of its two rows, and the destination of its part of a tile."""

    do: cute.Tensor  # (128,) Int32: wgmma's A of all columns
    lse_log2: list[Float32]
    scaled_delta: list[Float32]  # delta * sm_scale
    members: Any  # pointer to this lane's first entry in the group's list
    member: Int32  # the query of the warp's first row
    matrices: Any  # pointer to this thread's part of the first tile's P


def row_of(mma_row: Any) -> Any:
    """The block's row that is row `mma_row` of the MMA, so that each quad has four neighbours."""
    of_half = mma_row % 8
    return mma_row // WARP_ROWS * WARP_ROWS + of_half // 2 * 4 + mma_row // 8 % 2 * 2 + of_half % 2


@cute.jit
def load_q(role: Scorer, first_row: Int32, to: Int32) -> None:
    """Load this warpgroup's 64 rows of Q; those past the last one are copies of it."""
    tile, last = role.ctx.plan.tile, role.q.shape[0] - 1
    places = [(chunk * ROWS * ROW_BYTES, chunk * ROW_BYTES) for chunk in range(tile.chunks)]
    for turn in cutlass.range_constexpr(ROWS * UNITS // WARPGROUP_SIZE):
        place = turn * WARPGROUP_SIZE + role.ctx.thread
        mma_row, unit = place // UNITS, place % UNITS
        row = cutlass.min(first_row + row_of(mma_row), last)
        source = role.q.iterator + (Int64(row) * tile.d_qk + unit * (COPY_BYTES // BF16))
        copy_units(to + swizzle.swizzled_128(mma_row, unit), source, Int32(0), places)
    cute.arch.cp_async_commit_group()


@cute.jit
def load_do(role: Scorer, do: cute.Tensor, rows: list[Int32]) -> None:
    """Load dO of this thread's two rows, as wgmma takes A from registers."""
    tile, lane = role.ctx.plan.tile, role.ctx.thread % WARP_SIZE
    sources = [
        cute.recast_ptr(role.do.iterator + (Int64(row) * tile.d_v + lane % 4 * 2), dtype=Int32)
        for row in rows
    ]
    for step in cutlass.range_constexpr(tile.value_chunks * STEPS):
        for i in cutlass.range_constexpr(A_WORDS):
            words = (step * fragments.MMA_K + i // 2 * 8) * BF16 // 4
            do[A_WORDS * step + i] = (sources[i % 2] + words).load()


@cute.jit
def start_item(role: Scorer, item: Int32, do: cute.Tensor) -> Rows:
    """Load Q to shared memory, the rest to registers; return when all of the warpgroup has."""
    ctx = role.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    block = item * ITEM_BLOCKS + role.block_of_item
    own = Q_READY + role.block_of_item
    # The warpgroup's products with the item before are done, in all four warps.
    cute.arch.barrier(barrier_id=own, number_of_threads=WARPGROUP_SIZE)
    load_q(role, block * ROWS, ctx.memory.q.address() + role.block_of_item * ctx.plan.q_bytes)
    last = role.q.shape[0] - 1
    mma_row = warp * WARP_ROWS + lane // 4
    rows = [cutlass.min(block * ROWS + row_of(mma_row + 8 * half), last) for half in range(2)]
    load_do(role, do, rows)
    lse = [role.lse[row] * Float32(LOG2_E) for row in rows]
    delta = [role.delta[row] * role.sm_scale for row in rows]
    group = ctx.group_of(item)
    capacity = ctx.lists.rows.shape[1]
    in_group = block % ctx.row_blocks * ROWS + warp * WARP_ROWS
    members = ctx.lists.members.iterator + (Int64(group) * capacity + lane)
    # Row row_of(16 w + 4 c) of the block, where quads' lane c has its four rows.
    unit = 2 * warp + lane % 4 // 2
    matrices = role.workspace.iterator + (
        matrix_offset(ctx.plan.tile, Int64(block), 0, role.workspace.shape[1], P_MATRIX)
        + swizzle.swizzled_128(lane // 4, unit)
        + lane % 2 * 8
    )
    cute.arch.cp_async_wait_group(0)
    # cp.async wrote Q through the generic proxy -> wgmma reads it through the asynchronous one.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=own, number_of_threads=WARPGROUP_SIZE)
    return Rows(do, lse, delta, members, in_group // role.heads, matrices)


@cute.jit
def read_members(role: Scorer, rows: Rows, tile: Int32) -> list[Int32]:
    """Bit k of word h: this thread's query names key 32 h + k of the tile."""
    keys = role.ctx.plan.tile.keys
    found = []
    for word in cutlass.range_constexpr(keys // WARP_SIZE):
        bits = Int32((rows.members + (tile * keys + word * WARP_SIZE)).load())
        found.append(Int32(cute.arch.vote_ballot_sync((bits >> rows.member) & 1 == 1)))
    return found


@cute.jit
def issue_products(
    role: Scorer, s: cute.Tensor, dp: cute.Tensor, do: cute.Tensor, at: PipelineState
) -> None:
    """Issue S and dP of a tile, a group of wgmmas a batch; free all chunks but the last one's."""
    ctx = role.ctx
    ring = RingConsumer(ctx.memory.k_full, ctx.memory.k_free)
    q = wgmma.along_k(ctx.memory.q.address() + role.block_of_item * ctx.plan.q_bytes)
    keys = ctx.memory.k.address()
    size = ctx.plan.batch_chunks
    for batch in cutlass.range_constexpr(ctx.plan.tile.chunks // size):
        chunks = range(batch * size, (batch + 1) * size)
        places = [at.advanced(chunk) for chunk in chunks]
        for place in places:
            # k_full: the chunk has been copied by threads; the fence shows it to wgmma.
            ring.wait(place)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for chunk, place in zip(chunks, places, strict=True):
            k = wgmma.along_k(keys + place.stage * ctx.plan.tile.chunk_bytes)
            multiply_chunk(ctx.plan, s, dp, q, do, k, chunk)
        warpgroup.commit_group()
        if cutlass.const_expr(batch > 0):
            warpgroup.wait_group(1)
            release_batch(ctx, at, batch - 1)


@cute.jit
def release_batch(ctx: Context, at: PipelineState, batch: cutlass.Constexpr) -> None:
    """Arrive: this warp has read a batch's chunks."""
    cute.arch.sync_warp()
    size = ctx.plan.batch_chunks
    for chunk in cutlass.range_constexpr(batch * size, (batch + 1) * size):
        release(ctx, ctx.memory.k_free, at.advanced(chunk).stage)


@cute.jit
def write_tile(
    role: Scorer, rows: Rows, s: cute.Tensor, dp: cute.Tensor, named: list[Int32], tile: Int32
) -> None:
    """Write P and dS of the tile to the workspace; exact zeros where a key is not named."""
    lane, keys = role.ctx.thread % WARP_SIZE, role.ctx.plan.tile
    scale = role.sm_scale
    scale_log2 = scale * Float32(LOG2_E)
    masks = [word >> (lane % 4 * 2) for word in named]
    matrices = cute.recast_ptr(rows.matrices + Int64(tile) * (MATRICES * keys.p_bytes), dtype=Int32)
    for block in cutlass.range_constexpr(keys.keys // 8):
        mask = masks[block // 4] >> (block % 4 * 8)
        words = []
        for half in cutlass.range_constexpr(2):
            p, ds = [], []
            for i in cutlass.range_constexpr(2):
                place = 4 * block + 2 * half + i
                exponent = s[place] * scale_log2 - rows.lse_log2[half]
                p_value = cute.math.exp2(exponent, fastmath=True)
                ds_value = p_value * (dp[place] * scale - rows.scaled_delta[half])
                # A selection: values of keys that are not named may be NaN.
                mine = (mask >> i) & 1 == 1
                p.append(p_value if mine else Float32(0.0))
                ds.append(ds_value if mine else Float32(0.0))
            words.append((transpose_8x8(pack_bf16(*p)), transpose_8x8(pack_bf16(*ds))))
        to = matrices + block * 8 * ROW_BYTES // 4
        gmem.store2(to, words[0][0], words[1][0])
        gmem.store2(to + keys.p_bytes // 4, words[0][1], words[1][1])


@cute.jit
def score_all(role: Scorer) -> None:
    """All four warps of a warpgroup: score every tile of its row blocks."""
    ctx, of_keys = role.ctx, role.ctx.plan.tile
    s = cute.make_rmem_tensor(of_keys.keys // 2, Float32)
    dp = cute.make_rmem_tensor(of_keys.keys // 2, Float32)
    do = cute.make_rmem_tensor(of_keys.value_chunks * STEPS * A_WORDS, Int32)
    at = Ring(ctx.plan.slots).start()
    number = Int32(0)
    for item in cutlass.range(ctx.first_item, ctx.num_items, ctx.num_ctas, unroll=1):
        rows = start_item(role, item, do)
        for tile in cutlass.range(tiles_of(ctx, ctx.group_of(item)), unroll=1):
            if number == 0 and role.block_of_item == 1:
                cute.arch.barrier(
                    barrier_id=SECOND_STARTS, number_of_threads=ITEM_BLOCKS * WARPGROUP_SIZE
                )
            named = read_members(role, rows, tile)
            issue_products(role, s, dp, do, at)
            # The first warpgroup, once: arrive without a branch, as wgmmas are under way.
            ptx.run(
                "{ .reg .pred first; setp.eq.b32 first, {$r0}, 0; "
                f"@first bar.arrive {SECOND_STARTS}, {ITEM_BLOCKS * WARPGROUP_SIZE}; }}",
                number | role.block_of_item,
            )
            warpgroup.wait_group(0)
            release_batch(ctx, at, of_keys.chunks // ctx.plan.batch_chunks - 1)
            write_tile(role, rows, s, dp, named, tile)
            at = at.advanced(of_keys.chunks)
            number += 1


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: cute.Tensor  # (S, H, 576) bf16
    kv: cute.Tensor  # (S_kv, 576) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32, natural, sinks in it
    delta: cute.Tensor  # (S, H) fp32
    lists: Lists  # five tensors: of `workspace.py`
    workspace: cute.Tensor  # (row blocks of all groups, bytes) uint8, written
    queries: Int32  # of a group, at most QUERIES
    heads: Int32  # H, a divisor of 128; queries * H is 128 or 256
    sm_scale: Float32
    num_ctas: Any  # Int32: at most pairs of row blocks; best the number that runs at once
    choice: cute.Tensor  # (1,) int32: the kernel has work if it is FIRST


@cute.kernel
def scores_kernel(x: Operands, plan: cutlass.Constexpr):
    """One CTA; `x`: with the heads' rows one after another, and without num_ctas."""
    memory = Memory.begin(plan)
    grids.follow_grid()
    group = warpgroup_idx()
    if group == 0:
        registers.take_registers(plan, "gather")
        gather_all(Gatherer(locate(memory, x), x.kv))
    else:
        registers.take_registers(plan, "score")
        rows = x.q, x.do, x.lse, x.delta
        score_all(Scorer(locate(memory, x), *rows, x.workspace, x.heads, x.sm_scale, group - 1))


@cute.jit
def locate(memory: Memory, x: Operands) -> Context:
    """This thread's context."""
    thread, cta, num_ctas = grids.place_in_grid()
    row_blocks = x.queries * x.heads // ROWS
    num_items = Int32(x.lists.counts.shape[0]) * row_blocks // ITEM_BLOCKS
    if not is_taken(x.choice, Int32(FIRST)):
        num_items = Int32(0)
    return Context(memory, x.lists, row_blocks, cta, num_ctas, num_items, thread % WARPGROUP_SIZE)


@cute.jit
def launch_scores(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`; arguments: those of `Operands`."""
    first = Operands._fields.index("lists")
    end = first + len(Lists._fields)
    lists = Lists(*arguments[first:end])
    fields: tuple[Any, ...] = (*arguments[:first], lists, *arguments[end:])
    given, tile = Operands(*fields), plan.tile
    x = given._replace(
        q=flat(given.q, tile.d_qk), do=flat(given.do, tile.d_v), lse=flat(given.lse),
        delta=flat(given.delta), num_ctas=None,
    )  # fmt: skip
    grids.launch_plan(scores_kernel(x, plan), plan, given.num_ctas, stream)


def compile_scores(plan: ScoresPlan) -> Any:
    """Compile `launch_scores`."""
    heads, keys, queries, blocks, block_bytes = fake.symbols(5)
    d_qk, d_v, of_rows = plan.tile.d_qk, plan.tile.d_v, fake.numbers(queries, heads)
    q, do = fake.bf16(queries, heads, d_qk), fake.bf16(queries, heads, d_v)
    workspace = fake.fake_tensor(Uint8, (blocks, block_bytes))
    of_kernel = workspace, Int32(1), Int32(1), Float32(1.0), Int32(1), fake.words(1)
    x = q, fake.bf16(keys, d_qk), do, of_rows, of_rows, *fake_lists(QUERIES), *of_kernel
    return compile_launch(SM90, launch_scores, plan, *x)
