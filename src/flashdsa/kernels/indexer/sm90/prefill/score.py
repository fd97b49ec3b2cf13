"""Scores of a segment: 64 keys against all heads of a tile's queries, on the tensor cores.

score[t] = scale[t] * sum_h weight[h] * relu(q[h] . k[t]). Keys are the rows of a product. Its
columns are in such an order (see `query_map`, kernel.py) that a lane has all heads of its queries:
lane j of a quad has query j of each four. So weights stay in registers and no lane needs another
one's sums.

relu(x) is (x + |x|) / 2, with the half in the weight, as in the paged indexer; sums are added in
that one's order, so that both give the same bits.

The warpgroups multiply bf16 keys in turns, so that one adds up while the other multiplies.
Otherwise both do the same at the same time, and tensor cores wait for sums. Products of e4m3 keys
take half as long, and turns cost them more than they gain.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import pipeline, wgmma
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.warp import kept, uniform
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.prefill import keep, teams, tiles
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP, SPAN_BYTES, TILE_KEYS

MMA_BYTES = 32
"""Bytes of a row that one wgmma multiplies."""
CHUNK_STEPS = SPAN_BYTES // MMA_BYTES
"""Wgmmas along a span."""
ATOM_BYTES = 1024
"""Eight rows of 128 bytes: the stride between swizzle atoms."""
OPCODES = {
    "float8_e4m3fn": ("wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3", ()),
    "bfloat16": ("wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16", (0, 0)),
}
"""Instruction by dtype, and whether either operand is transposed where that can be said."""
FIRST_TURN = 6
"""The named barrier of warpgroup 0's turns; warpgroup 1's is the next one."""


def of_tile(plan: Any) -> int:
    """fp32 of a product in a thread."""
    return int(plan.columns // 2)


def low_word(address: Any) -> Any:
    """Low word of the descriptor of rows at a shared memory address."""
    return Int32(wgmma.matrix_descriptor(address, 16, ATOM_BYTES, "SW128"))


def descriptor(low: Any, offset: int) -> Any:
    """The descriptor `offset` bytes after that of `low`. Only low words differ."""
    high = (ATOM_BYTES >> 4 | 1 << 30) << 32
    return Int64(Uint32(low + Int32(offset >> 4))) | Int64(high)


def multiply(accumulator: Any, keys: Any, queries: Any, plan: Any) -> None:
    """Start keys x queries as one group, or in turns as two groups: the second is the last wgmma.
    `keys`, `queries`: low words of descriptors."""
    warpgroup.fence()
    opcode, transposes = OPCODES[plan.dtype]
    steps = [(chunk, step) for chunk in range(plan.chunks) for step in range(CHUNK_STEPS)]
    for chunk, step in steps:
        if plan.in_turns and (chunk, step) == steps[-1]:
            warpgroup.commit_group()
        values = wgmma.mma_async(
            opcode.format(plan.columns),
            [accumulator[i] for i in range(of_tile(plan))],
            descriptor(keys, chunk * plan.key_chunk_bytes + step * MMA_BYTES),
            descriptor(queries, chunk * plan.query_chunk_bytes + step * MMA_BYTES),
            accumulate=(chunk, step) != (0, 0),
            transposes=transposes,
        )
        for i in range(of_tile(plan)):
            accumulator[i] = values[i]
    warpgroup.commit_group()


def wait_for_turn(barrier: Int32) -> None:
    """Wait until the other warpgroup has passed the turn on. barrier: of the calling one."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_SIZE)


def pass_turn(barrier: Int32) -> None:
    """Let the other warpgroup multiply. barrier: its own."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_SIZE)


class ScoreContext(NamedTuple):
    """Waits for key_full and query_full, arrives at key_empty and query_empty."""

    memory: Memory
    ranges: tiles.Ranges
    weights: cute.Tensor  # (S, H) fp32, device memory
    scores: Any  # pointer to fp32 bits: this CTA's workspace, or (S, row_scores)
    group: Int32  # the calling warpgroup, 0 or 1

    @property
    def plan(self) -> Any:
        return self.memory.plan


class Prepared(NamedTuple):
    """Values of a tile that a thread keeps."""

    weights: cute.Tensor  # halves of the weights of column 8 c + 2 j + o, at 2 c + o
    starts: list[Int32]  # of its queries' ranges
    lengths: list[Int32]
    queries: Int32  # low word of the columns' descriptor
    window: cute.Tensor  # (2 groups,) fp32: factor and offset of each; see teams.py


@cute.jit
def prepare(ctx: ScoreContext, tile: tiles.Tile, number: Int32, lane: Int32) -> Prepared:
    """Wait for the tile's queries; load weights and ranges of this lane's queries into
    registers."""
    plan = ctx.plan
    weights = cute.make_rmem_tensor(plan.columns // QUERY_GROUP, Float32)
    last = ctx.ranges.num_queries - 1
    starts, lengths = [], []
    for group in cutlass.range_constexpr(plan.groups):
        query = tile.first_query + QUERY_GROUP * group + lane % QUERY_GROUP
        start, end = tiles.range_of(ctx.ranges, query)
        starts.append(start)
        lengths.append(end - start)
        row = ctx.weights.iterator + Int64(cutlass.min(query, last)) * plan.num_heads
        for four in cutlass.range_constexpr(plan.num_heads // 4):
            of_four = cute.make_tensor((row + 4 * four).align(16), cute.make_layout(4)).load()
            for i in cutlass.range_constexpr(4):
                weights[group * plan.num_heads + 4 * four + i] = of_four[i] * 0.5
    ring = pipeline.RingConsumer(ctx.memory.query_full, ctx.memory.query_empty)
    state = ring.state(number)
    # query_full[stage]: TMA has brought the columns. They may be read until every warp arrives at
    # query_empty[stage].
    ring.wait(state)
    stage_bytes = plan.chunks * plan.query_chunk_bytes
    queries = uniform(low_word(ctx.memory.queries.address() + state.stage * stage_bytes))
    window = cute.make_rmem_tensor(2 * plan.groups, Float32)
    return Prepared(weights, starts, lengths, queries, window)


@cute.jit
def release_queries(ctx: ScoreContext, number: Int32, lane: Int32) -> None:
    """Release the queries after the tile's last product."""
    ring = pipeline.RingConsumer(ctx.memory.query_full, ctx.memory.query_empty)
    cute.arch.sync_warp()
    if lane == 0:
        ring.release(ring.state(number).stage)


@cute.jit
def score_segment(
    ctx: ScoreContext,
    prepared: Prepared,
    tile: tiles.Tile,
    number: Int32,
    begin: Int32,
    end: Int32,
    thread: Int32,
) -> None:
    """Score this warpgroup's key tiles among `begin` to `end` - 1 of the tile: every other one.
    number: of the tile's first key tile, among the CTA's; its samples come before it."""
    plan = ctx.plan
    lane, warp = thread % WARP_SIZE, thread % WARPGROUP_SIZE // WARP_SIZE
    ring = pipeline.RingConsumer(ctx.memory.key_full, ctx.memory.key_empty)
    start = tiles.first_turn(begin, plan)
    first = uniform(start + ((ctx.group - number - start) & 1))
    state = ring.state(number + first)
    accumulator = cute.make_rmem_tensor(of_tile(plan), Float32)
    keys = uniform(low_word(ctx.memory.keys.address()))
    keeper, bins = keep.keeper_of(ctx.ranges, prepared, tile, lane, ctx.memory), Int32(0)
    if cutlass.const_expr(not plan.scores_only):
        own = keeper.first_query(lane) * (4 * plan.bins)
        bins = ctx.memory.histogram.address() + own - Int32(teams.FIRST_BIN_OFFSET)
        if cutlass.const_expr(not plan.shared):
            if begin == 0 and first >= end:
                teams.sample_nothing(ctx.memory, thread // WARP_SIZE, lane, plan)
    own_turn, other_turn = Int32(0), Int32(0)
    if cutlass.const_expr(plan.in_turns):
        own_turn = kept(FIRST_TURN + ctx.group, lane)
        other_turn = kept(FIRST_TURN + 1 - ctx.group, lane)
    bins, lane = kept(bins, lane), kept(lane, lane)
    walk = tiles.walk_of(tile, first, plan)
    row = warp * 16 + lane // QUERY_GROUP
    key = walk.key + row  # of the tile: this lane's first one
    to = target_of(ctx, tile, begin, keeper.first_query(lane))
    to = to + Int64(keeper.place(walk.place + row))
    if begin > 0 and first > begin:
        delay_second_group(plan)
    for i in cutlass.range(first, end, 2, unroll=1):
        stage = state.stage
        # key_full[stage], the round's phase: TMA has brought keys and scales.
        ring.wait(pipeline.PipelineState(stage, state.phase))
        if cutlass.const_expr(plan.in_turns):
            wait_for_turn(own_turn)
        multiply(
            accumulator,
            keys + stage * (plan.chunks * plan.key_chunk_bytes // 16),
            prepared.queries,
            plan,
        )
        scales = load_scales(ctx, stage, key & (TILE_KEYS - 1))
        if cutlass.const_expr(plan.is_fp8):
            cute.arch.fence_proxy("async.shared", space="cta")  # scales are read, see key_empty
        if cutlass.const_expr(plan.in_turns):
            warpgroup.wait_group(1)
            pass_turn(other_turn)  # while the last wgmma runs
        warpgroup.wait_group(0)
        # key_empty[stage]: the product is done and all lanes of this warp have the scales. The
        # fourth warp's arrival completes the phase, and TMA may write.
        cute.arch.sync_warp()
        if lane == 0:
            ring.release(stage + nothing_when_loaded(scales))
        state = state.advanced(2)
        words = keeper.keep(accumulator, scales, key, to)
        key_step, step = tiles.steps_from(walk, key, i, plan)
        key += key_step
        to = to + Int64(tiles.entries_of(step, plan))
        if cutlass.const_expr(not plan.scores_only):
            if i < 2 - plan.sample_tiles:  # turns of the first segment
                # The tile's first keys may belong to either warpgroup; the other one may have none.
                writes = first == start and warp == 0
                of_all = thread // WARP_SIZE
                teams.take_sample(ctx.memory, words, prepared.window, of_all, lane, writes, plan)
                if i == 1 - plan.sample_tiles:
                    delay_second_group(plan)
            if is_counted(i, plan):
                teams.count_words(words, prepared.window, bins, plan)


def is_counted(turn: Int32, plan: Any) -> Any:
    """Whether a turn's scores are counted: not those of a sample beside the tile's keys."""
    return turn >= 0 if plan.shared else True


def delay_second_group(plan: Any) -> None:
    """Delay the second of two warpgroups that have just left a barrier together: else both would
    multiply at the same time, and then both add up. A delay only: it orders nothing, and nothing
    relies on it."""
    if plan.delay_ns:
        cute.arch.inline_ptx(f"nanosleep.u32 {plan.delay_ns};", read_only_args=[])


def nothing_when_loaded(scales: list[Float32]) -> Int32:
    """0, known only when the scales are in registers: a load's bits shifted out. ptxas issues an
    arrival after loads whose values are needed later, but does not wait for them: they could still
    be on their way when TMA overwrites what they read."""
    bits = scales[0].bitcast(Int32) ^ scales[1].bitcast(Int32)
    return cute.arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 0;", write_only_types=[Int32], read_only_args=[bits]
    )


def load_scales(ctx: ScoreContext, stage: Int32, row: Int32) -> list[Float32]:
    """Load the scales of this lane's two keys; 1 where keys have none."""
    plan = ctx.plan
    if not plan.is_fp8:
        return [Float32(1.0), Float32(1.0)]
    scales = ctx.memory.scales.array(Float32, plan.stages * TILE_KEYS)
    at = stage * TILE_KEYS + row
    return [scales[at], scales[at + keep.ROWS_APART]]


def target_of(ctx: ScoreContext, tile: tiles.Tile, begin: Int32, query: Int32) -> Any:
    """Destination of the score of the tile's first entry for one of its queries."""
    plan = ctx.plan
    if plan.scores_only:
        row = Int64(tile.first_query + query) * tiles.row_scores(ctx.ranges, plan)
        return ctx.scores + (row + tiles.entries_of(tile.first_key, plan))
    words = tiles.scores_at(tile, plan)
    return ctx.scores + (query * plan.row_words + words - begin * TILE_KEYS)
