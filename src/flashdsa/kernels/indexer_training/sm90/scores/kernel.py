"""The indexer's scores at given slots, for Hopper: a CTA is a warpgroup with a query of its own.

Nothing but Q is shared: each warp reads its keys from device memory into the registers that wgmma
reads, a tile before the products, and several CTAs of an SM hide each other's waits.

Keys are rows of the products and heads are columns: a lane has two keys, g and g + 8 of its warp's
16, and of each a quarter of the columns and of the heads. It reads 16 neighbouring bytes of a row
of the keys, eight columns, where A of a wgmma has two pairs of columns of it, and two of the next
wgmma. So the eight columns 32 i + 8 c .. of Q, c the lane in its quad, go to where wgmma 2 i takes
columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, and wgmma 2 i + 1 the same of its own.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives as prims

from flashdsa.dsl import compile_options, grids, ptx, swizzle, wgmma
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.smem import load_words, shared_pointer, store_float
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.union_slots import slots_of
from flashdsa.kernels.indexer_training.sm90.list_end import WARPS, SlotList, find_end, look
from flashdsa.kernels.indexer_training.sm90.scores.plan import BF16, FP32, TILE_KEYS, ScoresPlan
from flashdsa.plan.row_tiles import ROW_BYTES
from flashdsa.problem import INDEX_HEAD_DIM

UNIT_BYTES = 16
UNITS = INDEX_HEAD_DIM * BF16 // UNIT_BYTES
"""16-byte pieces of a row."""
QUAD = 4
"""Lanes that share rows of a product."""


def load_unit(pointer: Any) -> Any:
    """16 bytes of device memory as four words; the second-level cache gets 128.

    NOTE: not `.nc`, which ptxas moves over barriers.
    """
    return ptx.words("ld.global.L2::128B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", 4, pointer)


@cute.jit
def store_query(
    q: cute.Tensor, query: Int32, to: Int32, thread: Int32, num_heads: cutlass.Constexpr
) -> None:
    """All threads: copy this one's part of Q; heads past the last become zeros. `q`: (S, H, 128)
    bf16, H at most num_heads. `to`: shared memory address."""
    heads = Int32(q.shape[1])
    first = q.iterator + Int64(query) * heads * INDEX_HEAD_DIM
    for number in cutlass.range_constexpr(num_heads * UNITS // WARPGROUP_SIZE):
        unit = thread + number * WARPGROUP_SIZE
        head, in_row = unit // UNITS, unit % UNITS
        words = [Int32(0)] * 4
        if head < heads:
            words = load_unit(first + unit * (UNIT_BYTES // BF16))
        eight, lane = in_row // QUAD, in_row % QUAD
        chunk = to + eight // 2 * (num_heads * ROW_BYTES) + lane * 4
        for pair in cutlass.range_constexpr(4):
            place = eight % 2 * 4 + pair
            prims.store_ext(words[pair], shared_pointer(chunk + swizzle.swizzled_128(head, place)))


WARP_KEYS = 16
HEADS_APART = 8
"""Columns of a product from a lane's two to its next two."""
HALF = 8
"""Keys between the two of a lane."""
LOADS = UNITS // QUAD
"""16-byte pieces of a row that a lane reads."""
WORDS = 2 * LOADS * 4
"""Words of a lane's two rows."""
MMA_BYTES = 32
"""Bytes of a row of Q that one wgmma multiplies: 16 columns."""


class Stretch(NamedTuple):
    """A query of which a CTA has tiles."""

    indices: cute.Tensor  # (S, topk) int32
    keys: cute.Tensor  # (S_kv, 128) bf16
    query: Int32
    slots: Int32  # of the query, that may be valid
    thread: Int32

    @property
    def first_key(self) -> Int32:
        """This lane's first key of a tile."""
        return self.thread // WARP_SIZE * WARP_KEYS + self.thread % WARP_SIZE // QUAD

    @property
    def list(self) -> SlotList:
        line = self.indices.iterator + Int64(self.query) * self.indices.shape[1]
        return SlotList(line, self.slots, Int32(self.keys.shape[0]), self.thread)


@cute.jit
def read_slots(ctx: Stretch, tile: Int32) -> list[Int32]:
    """Read the slots of this lane's two keys; -1 after the last one in use.

    The values are not used here: their first use waits until they have come.
    """
    first = tile * TILE_KEYS + ctx.first_key
    line = ctx.indices.iterator + Int64(ctx.query) * ctx.indices.shape[1]
    slots = []
    for half in cutlass.range_constexpr(2):
        slot = Int32(-1)
        if first + half * HALF < ctx.slots:
            slot = (line + (first + half * HALF)).load()
        slots.append(slot)
    return slots


@cute.jit
def rows_of(ctx: Stretch, slots: list[Int32]) -> list[Int32]:
    """Rows of the two keys; negative where a slot is not valid."""
    keys = Int32(ctx.keys.shape[0])
    rows = []
    for half in cutlass.range_constexpr(2):
        slot = slots[half]
        rows.append(slot if slot < keys else Int32(-1))
    return rows


@cute.jit
def load_keys(ctx: Stretch, rows: list[Int32], words: cute.Tensor) -> None:
    """Load this lane's words of its two keys; where a slot is not valid those of row 0."""
    for half in cutlass.range_constexpr(2):
        row = cutlass.max(rows[half], Int32(0))
        first = ctx.keys.iterator + (
            Int64(row) * INDEX_HEAD_DIM + ctx.thread % QUAD * (UNIT_BYTES // BF16)
        )
        for number in cutlass.range_constexpr(LOADS):
            unit = load_unit(first + number * (QUAD * UNIT_BYTES // BF16))
            for word in cutlass.range_constexpr(4):
                words[(half * LOADS + number) * 4 + word] = unit[word]


def multiply(acc: Any, words: Any, q: Any, num_heads: int) -> None:
    """Compute acc = K Q^T of the tile, as one group of wgmmas; wait for it. `acc`: num_heads / 2
    fp32. `words`: of `load_keys`. `q`: shared memory address of `store_query`'s."""
    warpgroup.fence()
    for number in range(LOADS):
        low = wgmma.along_k(q + number // 2 * (num_heads * ROW_BYTES))
        for step in range(2):
            first, second = (
                [words[(half * LOADS + number) * 4 + 2 * step + i] for i in range(2)]
                for half in range(2)
            )
            a = [first[0], second[0], first[1], second[1]]
            b = wgmma.descriptor_behind(low, (number % 2 * 2 + step) * MMA_BYTES)
            more = (number, step) != (0, 0)
            wgmma.multiply_bf16(acc, num_heads, a, b, accumulate=more, transposes=(0,))
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def sum_heads(acc: cute.Tensor, weights: Int32, num_heads: cutlass.Constexpr) -> list[Float32]:
    """sum weights relu(acc) over every head, for this lane's two keys; in all lanes of the quad.
    `weights`: shared memory address of those of this lane's first two heads."""
    # Each key has two sums: each waits for the one before for half as long.
    sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
    for eight in cutlass.range_constexpr(num_heads // HEADS_APART):
        two = prims.load_ext(
            shared_pointer(weights + eight * (HEADS_APART * FP32)), dtype=Float32, count=2
        )
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                positive = cute.arch.fmax(acc[4 * eight + 2 * half + i], Float32(0.0))
                sums[half][i] = positive * two[i] + sums[half][i]
    return [neighbours_sum(one[0] + one[1], QUAD) for one in sums]


@cute.jit
def write_scores(
    ctx: Stretch, out: cute.Tensor, tile: Int32, rows: list[Int32], sums: list[Float32]
) -> None:
    """Write a tile's scores: two lanes of each quad write one each."""
    lane = ctx.thread % QUAD
    slot = tile * TILE_KEYS + ctx.first_key + lane * HALF
    if lane < 2 and slot < ctx.indices.shape[1]:
        # A selection: values that are not valid may be NaN.
        row = rows[1] if lane == 1 else rows[0]
        score = sums[1] if lane == 1 else sums[0]
        score = score if row >= 0 else -Float32(float("inf"))
        (out.iterator + (Int64(ctx.query) * ctx.indices.shape[1] + slot)).store(score)


@cute.jit
def store_end(ctx: Stretch, first: Int32, to: Int32) -> None:
    """All threads: write the warps' ends of the list to four words of shared memory. `first`:
    `look(ctx.list, 0)`."""
    end = find_end(ctx.list, first)
    if ctx.thread % WARP_SIZE == 0:
        prims.store_ext(end, shared_pointer(to + ctx.thread // WARP_SIZE * FP32))


@cute.jit
def load_end(at: Int32) -> Int32:
    """Read the list's end from the words of `store_end`, after a barrier."""
    ends = load_words(at, Int32)
    end = ends[0]
    for warp in cutlass.range_constexpr(1, WARPS):
        end = cutlass.max(end, ends[warp])
    return end


@cute.kernel
def scores_kernel(
    q: cute.Tensor, keys: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor,
    weights: cute.Tensor, out: cute.Tensor, parts: Int32, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA; arguments as in `launch_scores`."""
    thread, cta, _ = grids.place_in_grid()
    memory = Memory.allocate(plan)
    shared = memory.q.address()
    query, part = cta // parts, cta % parts
    ctx = Stretch(indices, keys, query, slots_of(indices, topk_length, query), thread)
    last = look(ctx.list, 0)
    first, second, third = [read_slots(ctx, part + i * parts) for i in range(3)]
    words = cute.make_rmem_tensor(WORDS, Int32)
    store_query(q, query, shared, thread, plan.num_heads)
    at_weights, at_end = memory.weights.address(), memory.ends.address()
    store_end(ctx, last, at_end)
    rows = rows_of(ctx, first)
    load_keys(ctx, rows, words)
    # All threads: write the query's weights to shared memory, 0 of a head past the last.
    if thread < plan.num_heads:
        weight = Float32(0.0)
        if thread < weights.shape[1]:
            weight = (weights.iterator + (Int64(query) * weights.shape[1] + thread)).load()
        store_float(at_weights + thread * FP32, weight)
    # Every thread's part of Q and every warp's end is written; the fence shows Q to wgmma.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    ctx = ctx._replace(slots=load_end(at_end))
    tiles = (ctx.slots + (TILE_KEYS - 1)) // TILE_KEYS
    own_weights = at_weights + thread % QUAD * (2 * FP32)
    # A value not known to be 0 when this is compiled. wgmma needs words of a thread's two rows
    # alternately; without an instruction between a load and that order ptxas moves what was loaded
    # right after the load, and waits for it at that point.
    zero = Int32(indices.shape[1]) >> 31
    acc = cute.make_rmem_tensor(plan.num_heads // 2, Float32)
    # Two tiles in the loop: in one, slots would move to the registers of the tile before, and a
    # move waits for what was loaded.
    for tile in cutlass.range(part, tiles, parts, unroll=2):
        # Slots come from device memory, which takes longer than a tile: they are asked for two
        # tiles before their keys.
        fourth = read_slots(ctx, tile + 3 * parts)
        fragments = [words[i] ^ zero for i in range(WORDS)]
        # The next tile's keys take the registers at once, and come during this one's products.
        next_rows = rows_of(ctx, second)
        load_keys(ctx, next_rows, words)
        # ptxas would move the loads after the products but for this.
        cute.arch.sync_warp()
        multiply(acc, fragments, shared, plan.num_heads)
        write_scores(ctx, out, tile, rows, sum_heads(acc, own_weights, plan.num_heads))
        rows, second, third = next_rows, third, fourth
    if part == 0:
        line = out.iterator + Int64(query) * indices.shape[1]
        for slot in cutlass.range(
            tiles * TILE_KEYS + thread, indices.shape[1], WARPGROUP_SIZE, unroll=1
        ):
            (line + slot).store(-Float32(float("inf")))


@cute.jit
def launch_scores(
    plan: cutlass.Constexpr, stream: Any, q: cute.Tensor, keys: cute.Tensor, indices: cute.Tensor,
    topk_length: cute.Tensor, weights: cute.Tensor, out: cute.Tensor, parts: Int32,
):  # fmt: skip
    """Launch on `stream`.

    Args:
        q: (S, H, 128) bf16, H at most plan.num_heads. keys: (S_kv, 128) bf16, S_kv at least 1.
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,): every slot counts.
        weights: (S, H) fp32. out: (S, topk) fp32, written.
        parts: CTAs that share a query's slots, at least 1.
    """
    made = scores_kernel(q, keys, indices, topk_length, weights, out, parts, plan)
    room: Any = {"sm_ctas": plan.ctas, "carveout": plan.carveout}
    grids.launch_ctas(made, indices.shape[0] * parts, plan.threads, stream, **room)


def compile_scores(plan: ScoresPlan) -> Any:
    """Compile `launch_scores`."""
    queries, heads, keys, topk, lengths = fake.symbols(5)
    rows = fake.bf16(queries, heads, INDEX_HEAD_DIM), fake.bf16(keys, INDEX_HEAD_DIM)
    slots = fake.words(queries, topk), fake.words(lengths)
    numbers = fake.numbers(queries, heads), fake.numbers(queries, topk)
    x = *rows, *slots, *numbers, Int32(1)
    return compile_options.compile_launch(SM90, launch_scores, plan, *x)
