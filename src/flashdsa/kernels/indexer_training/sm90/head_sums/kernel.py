"""Sums over heads at the slots of each query, for Hopper: a CTA takes a query at a time, or a part.

gather                | consumer 0                  | consumer 1
--------------------- | --------------------------- | ---------------------------
a tile's rows, piece  | K Q^T of tile 0             |
by piece; with a      | exponentials, sums          | K Q^T of tile 1
query's first, its Q  | K Q^T of tile 2             | exponentials, sums

Role add multiplies a tile with every head, and sums over heads for each of its keys. Keys are rows
of the products and heads are columns: a thread has two keys, and adds a quarter of the heads up in
its own registers. The warpgroups take tiles in turn, so that one's exponentials run during the
other's products.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import compile_options, grids, pipeline, registers, smem, warp
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.wgmma import along_k, descriptor_behind, multiply_bf16
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.head_sums import gather
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TargetPlan
from flashdsa.plan.row_tiles import CHUNK_BYTES, CHUNK_COLUMNS, ROW_BYTES, TILE_ROWS

MMA_BYTES = 32
"""Bytes of a row that one wgmma multiplies: 16 columns."""


def multiply_chunk(acc: Any, k: Any, q: Any, num_heads: int, clear: bool) -> None:
    """Issue acc += K Q^T over the 64 columns of a chunk; with `clear` acc = K Q^T. `acc`:
    num_heads / 2 fp32 in a thread. `k`, `q`: low words of the chunks' descriptors."""
    for step in range(ROW_BYTES // MMA_BYTES):
        offset, more = step * MMA_BYTES, not clear or step > 0
        both = descriptor_behind(k, offset), descriptor_behind(q, offset)
        multiply_bf16(acc, num_heads, *both, accumulate=more, transposes=(0, 0))


WARP_KEYS = 16
"""Keys of a warp among a wgmma's 64 rows."""
QUAD = 4
"""Lanes that share a key."""


class Adder(NamedTuple):
    """Reads q, heads and k; writes the sums. Signals q_free and k_free."""

    ctx: gather.Context
    out: cute.Tensor  # (S, topk) fp32, written
    scale: Float32  # of products, in log2
    number: Int32  # of this warpgroup among the consumers


class Place(NamedTuple):
    """Position of a tile in the rings, and whether it is this warpgroup's last of its item."""

    k: pipeline.PipelineState
    q: pipeline.PipelineState
    is_last: Any


@cute.jit
def release_piece(ctx: gather.Context, place: Place, piece: cutlass.Constexpr) -> None:
    """Arrive: this warp has read a piece of the keys, and with the last tile maybe one of Q."""
    plan = ctx.plan
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        ctx.memory.k_free.arrive(place.k.advanced(piece).stage)
        done = (piece + 1) * plan.key_piece
        if cutlass.const_expr(done % plan.query_piece == 0):
            if place.is_last:
                of_query = done // plan.query_piece - 1
                stage = place.q.advanced(of_query).stage
                ctx.memory.q_free.arrive(stage)


@cute.jit
def multiply_tile(ctx: gather.Context, acc: cute.Tensor, place: Place) -> None:
    """Compute the products of a tile, a group of wgmmas a piece; a piece is freed during the next
    one's."""
    plan, memory = ctx.plan, ctx.memory
    keys = pipeline.RingConsumer(memory.k_full, memory.k_free)
    queries = pipeline.RingConsumer(memory.q_full, memory.q_free)
    k_first, q_first = memory.k.address(), memory.q.address()
    for piece in cutlass.range_constexpr(plan.key_pieces):
        chunks = range(piece * plan.key_piece, (piece + 1) * plan.key_piece)
        of_query, in_query = divmod(chunks.start, plan.query_piece)
        k_at = place.k.advanced(piece)
        q_at = place.q.advanced(of_query)
        if cutlass.const_expr(in_query == 0):
            queries.wait(q_at)
        # k_full: the piece has been copied by threads; the fence shows it to wgmma.
        keys.wait(k_at)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for i, chunk in enumerate(chunks):
            k = along_k(k_first + k_at.stage * plan.key_piece_bytes + i * CHUNK_BYTES)
            q = along_k(
                q_first
                + q_at.stage * plan.query_piece_bytes
                + (in_query + i) * plan.query_chunk_bytes
            )
            multiply_chunk(acc, k, q, plan.num_heads, chunk == 0)
        warpgroup.commit_group()
        if cutlass.const_expr(piece > 0):
            warpgroup.wait_group(1)
            release_piece(ctx, place, piece - 1)
    warpgroup.wait_group(0)
    release_piece(ctx, place, plan.key_pieces - 1)


@cute.jit
def take_item(ctx: gather.Context, q_at: pipeline.PipelineState) -> gather.Item:
    """Wait for the item whose Q begins at a state of its ring."""
    # q_full: the gather has stored the item, and its heads.
    ctx.memory.q_full.wait(q_at.phase, q_at.stage)
    words = smem.load4(gather.words_of_item(ctx, q_at), 0)
    return gather.Item(words[0], words[1], words[2], words[3])


@cute.jit
def read_heads(ctx: gather.Context, heads: cute.Tensor, q_at: pipeline.PipelineState) -> None:
    """Read the query's numbers of this thread's heads, in the order of `sum_heads`."""
    plan = ctx.plan
    shared = ctx.memory.heads.array(Float32, plan.queries * plan.num_heads)
    first = q_at.stage // plan.query_pieces * plan.num_heads + ctx.thread % QUAD * 2
    for i in cutlass.range_constexpr(plan.num_heads // QUAD):
        heads[i] = shared[first + i // 2 * 8 + i % 2]


@cute.jit
def sum_heads(role: Adder, acc: cute.Tensor, heads: cute.Tensor) -> list[Float32]:
    """Sum over every head, for this thread's two keys; in all lanes of the quad."""
    plan = role.ctx.plan
    # Each key has two sums: each waits for the one before for half as long.
    sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
    for i in cutlass.range_constexpr(plan.num_heads // QUAD):
        for half in cutlass.range_constexpr(2):
            product = acc[i // 2 * 4 + 2 * half + i % 2]
            exponent = product * role.scale - heads[i]
            sums[half][i % 2] = sums[half][i % 2] + cute.math.exp2(exponent, fastmath=True)
    return [warp.neighbours_sum(one[0] + one[1], QUAD) for one in sums]


@cute.jit
def add_tile(
    role: Adder, acc: cute.Tensor, heads: cute.Tensor, place: Place, item: gather.Item, tile: Int32
) -> None:
    """Compute and write a tile's sums."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    half = lane % 2
    slot = (
        item.begin
        + tile * TILE_ROWS
        + ctx.thread // WARP_SIZE * WARP_KEYS
        + lane // QUAD
        + 8 * half
    )
    row = gather.read_row(ctx, item.query, slot, item.end)
    multiply_tile(ctx, acc, place)
    sums = sum_heads(role, acc, heads)
    if lane % QUAD < 2 and slot < ctx.topk:
        total = sums[1] if half == 1 else sums[0]
        # A selection: values that are not valid may be NaN.
        total = total if row >= 0 else Float32(0.0)
        (role.out.iterator + (Int64(item.query) * ctx.topk + slot)).store(total)


@cute.jit
def free_query(ctx: gather.Context, q_at: pipeline.PipelineState) -> None:
    """Free Q of an item with no tile for this warpgroup: it has read every piece of Q."""
    for piece in cutlass.range_constexpr(ctx.plan.query_pieces):
        at = q_at.advanced(piece)
        # Wait until Q has come: the arrival is for that phase.
        ctx.memory.q_full.wait(at.phase, at.stage)
        if ctx.thread % WARP_SIZE == 0:
            ctx.memory.q_free.arrive(at.stage)


@cute.jit
def fill_rest(role: Adder, item: gather.Item) -> None:
    """Fill the slots after the query's last tile, if the item has that."""
    ctx = role.ctx
    own = role.number * WARPGROUP_SIZE + ctx.thread
    line = role.out.iterator + Int64(item.query) * ctx.topk
    step = ctx.plan.consumers * WARPGROUP_SIZE
    for slot in cutlass.range(item.rest + own, ctx.topk, step, unroll=1):
        (line + slot).store(Float32(0.0))


@cute.jit
def add_all(role: Adder) -> None:
    """All four warps of a warpgroup: add its tiles of every item of the CTA."""
    ctx, plan = role.ctx, role.ctx.plan
    acc = cute.make_rmem_tensor(plan.num_heads // 2, Float32)
    heads = cute.make_rmem_tensor(plan.num_heads // QUAD, Float32)
    k_at, q_at = pipeline.Ring(plan.key_slots).start(), pipeline.Ring(plan.query_slots).start()
    for before in cutlass.range_constexpr(plan.consumers - 1):
        if role.number > before:
            k_at = gather.tiles_on(k_at, 1, plan)
    first = role.number
    item = take_item(ctx, q_at)
    while item.query < ctx.num_queries:
        read_heads(ctx, heads, q_at)
        tiles = item.tiles
        if first >= tiles:
            free_query(ctx, q_at)
        for tile in cutlass.range(first, tiles, plan.consumers, unroll=1):
            place = Place(k_at, q_at, tile + plan.consumers >= tiles)
            add_tile(role, acc, heads, place, item, tile)
            k_at = gather.tiles_on(k_at, plan.consumers, plan)
        fill_rest(role, item)
        # The turns continue across items.
        first = first - tiles % plan.consumers
        if first < 0:
            first += plan.consumers
        q_at = q_at.advanced(plan.query_pieces)
        item = take_item(ctx, q_at)


@cute.kernel
def head_sums_kernel(
    q_map: GridConstant[tensor_map.TensorMap], keys: cute.Tensor, indices: cute.Tensor,
    topk_length: cute.Tensor, lse: cute.Tensor, attn_sink: cute.Tensor, out: cute.Tensor,
    sm_scale: Float32, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA; arguments as in `launch_head_sums`."""
    memory = Memory.begin(plan)
    group = warp.warpgroup_idx()
    if group == 0:
        registers.take_registers(plan, "gather")
        ctx = locate(memory, indices, topk_length, keys)
        gather.gather_all(gather.Gatherer(ctx, q_map.get_ptr(), keys, lse, attn_sink))
    else:
        registers.take_registers(plan, "add")
        ctx = locate(memory, indices, topk_length, keys)
        add_all(Adder(ctx, out, sm_scale * gather.LOG2_E, group - 1))


@cute.jit
def locate(
    memory: Memory, indices: cute.Tensor, topk_length: cute.Tensor, keys: cute.Tensor
) -> gather.Context:
    """This thread's context."""
    thread, cta, num_ctas = grids.place_in_grid()
    num_keys = Int32(keys.shape[0])
    return gather.Context(
        memory, indices, topk_length, num_keys, cta, num_ctas, thread % WARPGROUP_SIZE
    )


@cute.jit
def launch_head_sums(
    plan: cutlass.Constexpr, stream: Any, q: cute.Tensor, keys: cute.Tensor, indices: cute.Tensor,
    topk_length: cute.Tensor, lse: cute.Tensor, attn_sink: cute.Tensor, out: cute.Tensor,
    sm_scale: Float32, num_ctas: Int32,
):  # fmt: skip
    """Launch on `stream`.

    Args:
        q: (S, H, width) bf16, H at most plan.num_heads. keys: (S_kv, width) bf16, S_kv at least 1.
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,): every slot counts.
        lse: (S, H) fp32, natural, without sinks.
        attn_sink: (H,) fp32, or (0,): none.
        out: (S, topk) fp32, written.
        num_ctas: at most the tiles of all queries; best the number that runs at once.
    """
    q_map = tensor_map.create_tensor_map_tiled_from_view(
        q,
        box_dims=(1, plan.num_heads, CHUNK_COLUMNS),
        stride_order=(2, 1, 0),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )
    made = head_sums_kernel(q_map, keys, indices, topk_length, lse, attn_sink, out, sm_scale, plan)
    grids.launch_plan(made, plan, num_ctas, stream, use_pdl=False)


def compile_head_sums(plan: TargetPlan) -> Any:
    """Compile `launch_head_sums`."""
    queries, heads, keys, topk, lengths, sinks = fake.symbols(6)
    rows = fake.bf16(queries, heads, plan.width), fake.bf16(keys, plan.width)
    slots = fake.words(queries, topk), fake.words(lengths)
    numbers = fake.numbers(queries, heads), fake.numbers(sinks), fake.numbers(queries, topk)
    x = *rows, *slots, *numbers, Float32(1.0), Int32(1)
    return compile_options.compile_launch(SM90, launch_head_sums, plan, *x)
