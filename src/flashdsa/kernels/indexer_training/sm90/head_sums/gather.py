"""Context of both roles, and role gather: rows of keys, and each query's Q and heads' numbers.

Row numbers are read a step of several tiles in advance, across the end of a query too. A query's Q
overwrites the previous one piece by piece, after the same pieces of its first tile. The role finds
where a query's list ends, and tells the consumers with Q.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import PipelineState, Ring, RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS, copy_piece, row_sources
from flashdsa.dsl.smem import load4
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.head_sums import plan as sizes
from flashdsa.kernels.indexer_training.sm90.list_end import WARPS, SlotList, find_end, look
from flashdsa.plan.row_tiles import CHUNK_COLUMNS, TILE_ROWS


class Context(NamedTuple):
    """One CTA's position in the launch."""

    memory: Memory
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    cta: Int32
    num_ctas: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> sizes.TargetPlan:
        return self.memory.plan

    @property
    def num_queries(self) -> Int32:
        return Int32(self.indices.shape[0])

    @property
    def topk(self) -> Int32:
        return Int32(self.indices.shape[1])


class Item(NamedTuple):
    """A stretch of a query's slots, of which a CTA has the sums."""

    query: Int32  # at least num_queries after the CTA's last item
    begin: Int32  # the first slot, of a whole tile
    end: Int32  # one past the last that may be valid
    rest: Int32  # the first slot after the query's last tile; topk if other CTAs' tiles follow

    @property
    def tiles(self) -> Any:
        """Number of tiles, at least one."""
        return tiles_of(self.end - self.begin)


class Share(NamedTuple):
    """The CTA's share of the tiles of a query in a turn."""

    query: Int32
    part: Int32
    parts: Int32


ENDS_STORED = 1
"""Named barrier of the role gather."""


@cute.jit
def share_of(ctx: Context, turn: Int32) -> Share:
    """The CTA's share in a turn of all CTAs.

    A turn is a query for each CTA. The last turn has fewer queries; equally many CTAs share each of
    them, by tiles.
    """
    first = turn * ctx.num_ctas
    left = ctx.num_queries - first
    query, part, parts = first + ctx.cta, Int32(0), Int32(1)
    if left > 0 and left < ctx.num_ctas:
        query, part, parts = first + ctx.cta % left, ctx.cta // left, ctx.num_ctas // left
    return Share(query, part, parts)


@cute.jit
def list_of(ctx: Context, query: Int32) -> SlotList:
    """The query's list; after the last query one without slots."""
    count = Int32(0)
    if query < ctx.num_queries:
        count = ctx.topk
        if ctx.topk_length.shape[0] > 0:
            given = (ctx.topk_length.iterator + query).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    line = ctx.indices.iterator + Int64(query) * ctx.topk
    return SlotList(line, count, ctx.num_keys, ctx.thread)


@cute.jit
def look_ahead(ctx: Context, turn: Int32) -> Int32:
    """This thread's first look at the list of the query of a turn."""
    return look(list_of(ctx, share_of(ctx, turn).query), 0)


@cute.jit
def item_at(ctx: Context, turn: Int32, first_look: Int32) -> Item:
    """The CTA's item in a turn. All threads of the gather call, and meet. `first_look`:
    `look_ahead` of the turn."""
    query, part, parts = share_of(ctx, turn)
    end = find_end(list_of(ctx, query), first_look)
    ends = ctx.memory.ends.array(Int32, WARPS, turn & 1)
    if ctx.thread % WARP_SIZE == 0:
        ends[ctx.thread // WARP_SIZE] = end
    # ENDS_STORED: every warp's end is stored. It lies in the place of the one two turns before,
    # which everybody has read: they read it before they came to the meeting of the turn between.
    cute.arch.barrier(barrier_id=ENDS_STORED, number_of_threads=WARPGROUP_SIZE)
    all_ends = load4(ends, 0)
    for warp in cutlass.range_constexpr(WARPS):
        end = cutlass.max(end, all_ends[warp])
    tiles = tiles_of(end)
    each = (tiles + parts - 1) // parts
    before = part * each
    if before >= tiles or part >= parts:
        query = ctx.num_queries
    behind = cutlass.min(before + each, tiles)
    rest = behind * TILE_ROWS if behind == tiles else ctx.topk
    return Item(query, before * TILE_ROWS, cutlass.min(behind * TILE_ROWS, end), rest)


@cute.jit
def tiles_of(num_slots: Int32) -> Int32:
    """Tiles of `num_slots` slots; a query has one, even without a slot."""
    return cutlass.max((num_slots + (TILE_ROWS - 1)) // TILE_ROWS, Int32(1))


@cute.jit
def tiles_on(at: PipelineState, tiles: cutlass.Constexpr, plan: cutlass.Constexpr) -> PipelineState:
    """The position in the ring of keys that many tiles further on."""
    for _ in cutlass.range_constexpr(tiles):
        at = at.advanced(plan.key_pieces)
    return at


@cute.jit
def read_row(ctx: Context, query: Int32, slot: Int32, num_slots: Int32) -> Int32:
    """The row that a slot names; -1 where it is not valid. `query`: any number. `num_slots`: of
    the query."""
    row = Int32(-1)
    if slot < num_slots and query < ctx.num_queries:
        row = (ctx.indices.iterator + (Int64(query) * ctx.topk + slot)).load()
        if row < 0 or row >= ctx.num_keys:
            row = Int32(-1)
    return row


LOG2_E = 1.4426950408889634


class Gatherer(NamedTuple):
    """Fills q, heads and k. Signals q_full, k_full."""

    ctx: Context
    q_map: Any  # (S, H, width), boxes of 1 x num_heads x 64
    keys: cute.Tensor  # (S_kv, width) bf16
    lse: cute.Tensor  # (S, H) fp32, natural
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none


class Cursor(NamedTuple):
    """A step: its item and its first slot; the next item's turn, and the first look at its list."""

    item: Item
    slot: Int32
    turn: Int32
    first_look: Int32


class Rings(NamedTuple):
    """Destination of the next piece of the keys, and of Q."""

    k: PipelineState
    q: PipelineState


@cute.jit
def following(ctx: Context, at: Cursor) -> Cursor:
    """The step after `at`: an item has one, even without a slot."""
    item, slot, turn, first_look = at.item, at.slot + sizes.STEP_SLOTS, at.turn, at.first_look
    if slot >= item.end:
        item = item_at(ctx, turn, first_look)
        slot = item.begin
        turn += 1
        first_look = look_ahead(ctx, turn)
    return Cursor(item, slot, turn, first_look)


@cute.jit
def read_rows(ctx: Context, at: Cursor) -> list[Int32]:
    """This lane's rows of the step, of slots lane, lane + 32, ...; -1 where not valid."""
    slot = at.slot + ctx.thread % WARP_SIZE
    return [
        read_row(ctx, at.item.query, slot + WARP_SIZE * i, at.item.end)
        for i in range(sizes.STEP_SLOTS // WARP_SIZE)
    ]


@cute.jit
def head_number(role: Gatherer, query: Int32) -> Float32:
    """lse' of head `thread`, in log2; infinite for a head past the last: it adds nothing."""
    head = role.ctx.thread
    number = Float32(float("inf"))
    if head < role.lse.shape[1] and query < role.ctx.num_queries:
        number = (role.lse.iterator + (Int64(query) * role.lse.shape[1] + head)).load()
        number = number * Float32(LOG2_E)
        if role.attn_sink.shape[0] > 0:
            number = log2_of_sum(number, (role.attn_sink.iterator + head).load() * LOG2_E)
    return number


@cute.jit
def log2_of_sum(a: Float32, b: Float32) -> Float32:
    """log2(2^a + 2^b), of infinite ones too."""
    larger, smaller = cute.arch.fmax(a, b), cute.arch.fmin(a, b)
    total = larger
    if smaller > -float("inf") and larger < float("inf"):
        total = larger + cute.math.log2(
            1.0 + cute.math.exp2(smaller - larger, fastmath=True), fastmath=True
        )
    return total


def words_of_item(ctx: Context, at: PipelineState) -> Any:
    """The words of the item whose Q begins at a state of its ring."""
    return ctx.memory.items.array(Int32, sizes.ITEM_WORDS, at.stage // ctx.plan.query_pieces)


@cute.jit
def store_item(ctx: Context, at: PipelineState, item: Item) -> None:
    """Thread 0 stores the item whose Q begins at `at`."""
    if ctx.thread == 0:
        words = words_of_item(ctx, at)
        for i in cutlass.range_constexpr(sizes.ITEM_WORDS):
            words[i] = item[i]


@cute.jit
def load_query_piece(
    role: Gatherer, item: Item, at: PipelineState, number: Float32, piece: cutlass.Constexpr
) -> PipelineState:
    """Copy a piece of the query's Q, and with the first one the item and its heads' numbers;
    return the next state. `number`: of head `thread`."""
    ctx, plan = role.ctx, role.ctx.plan
    ring = RingProducer(ctx.memory.q_full, ctx.memory.q_free)
    # q_free: every consumer has the products of what the slot held, and had read its heads and its
    # item before.
    ring.acquire(at)
    if cutlass.const_expr(piece == 0):
        if ctx.thread < plan.num_heads:
            heads = ctx.memory.heads.array(Float32, plan.queries * plan.num_heads)
            heads[at.stage // plan.query_pieces * plan.num_heads + ctx.thread] = number
        store_item(ctx, at, item)
    if ctx.thread == 0:
        barrier = ring.expect(at.stage)
        for i in cutlass.range_constexpr(plan.query_piece):
            place = at.stage * plan.query_piece_bytes + i * plan.query_chunk_bytes
            to = ctx.memory.q.bytes() + place
            column = (piece * plan.query_piece + i) * CHUNK_COLUMNS
            load_box(to, role.q_map, [Int32(column), Int32(0), item.query], barrier)
    else:
        ring.commit(at.stage)
    return at.advanced()


@cute.jit
def copy_tile(
    role: Gatherer, own: list[Int32], to: Int32, rings: Rings, item: Item, number: Float32,
    is_first: Any, tile: cutlass.Constexpr,
) -> Rings:  # fmt: skip
    """Copy a tile of the step, and meanwhile the query's Q if the tile `is_first`; return the next
    states. `own`: this lane's rows of the step. `to`: of this thread's 16 bytes in the ring's
    first row."""
    ctx, plan = role.ctx, role.ctx.plan
    ring = RingProducer(ctx.memory.k_full, ctx.memory.k_free)
    k, q = rings
    rows = []
    for part in cutlass.range_constexpr(TURNS):
        slot = tile * TILE_ROWS + part * ROWS_AT_ONCE
        lane = slot % WARP_SIZE + ctx.thread // UNITS
        rows.append(cute.arch.shuffle_sync(own[slot // WARP_SIZE], lane))
    sources = row_sources(role.keys, rows, ctx.thread % UNITS)
    for piece in cutlass.range_constexpr(plan.key_pieces):
        chunks = range(piece * plan.key_piece, (piece + 1) * plan.key_piece)
        k = copy_piece(ring, k, to, sources, rows, chunks)
        if cutlass.const_expr(tile == 0 and (chunks.stop % plan.query_piece) == 0):
            if is_first:
                of_query = chunks.stop // plan.query_piece - 1
                q = load_query_piece(role, item, q, number, of_query)
    return Rings(k, q)


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every step of the CTA."""
    ctx = role.ctx
    to = ctx.memory.k.address() + swizzled_128(ctx.thread // UNITS, ctx.thread % UNITS)
    rings = Rings(Ring(ctx.plan.key_slots).start(), Ring(ctx.plan.query_slots).start())
    # The CTA's first step.
    item = item_at(ctx, Int32(0), look_ahead(ctx, Int32(0)))
    at = Cursor(item, item.begin, Int32(1), look_ahead(ctx, Int32(1)))
    own = read_rows(ctx, at)
    number = head_number(role, at.item.query)
    more = Boolean(at.item.query < ctx.num_queries)
    while more:
        ahead = following(ctx, at)
        more = ahead.item.query < ctx.num_queries
        # The next step's row numbers, and the next query's heads, come during this step's copies.
        own_ahead = read_rows(ctx, ahead)
        number_ahead = number
        if ahead.slot == ahead.item.begin:
            number_ahead = head_number(role, ahead.item.query)
        is_first = at.slot == at.item.begin
        for tile in cutlass.range_constexpr(sizes.STEP_TILES):
            if tile == 0 or at.slot + tile * TILE_ROWS < at.item.end:
                rings = copy_tile(role, own, to, rings, at.item, number, is_first, tile)
        at, own, number = ahead, own_ahead, number_ahead
    # Tell the consumers that there is no further item, in the place of the next one's Q.
    ring = RingProducer(ctx.memory.q_full, ctx.memory.q_free)
    # As in `load_query_piece`.
    ring.acquire(rings.q)
    store_item(ctx, rings.q, at.item)
    ring.commit(rings.q.stage)
