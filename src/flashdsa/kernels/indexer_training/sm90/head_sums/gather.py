"""Context of both roles, and role gather: rows of keys, and each query's Q and heads' numbers.

Row numbers are read a step of several tiles in advance, across the end of a query too. A query's Q
overwrites the previous one piece by piece, after the same pieces of its first tile.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.pipeline import Barriers, PipelineState, Ring, RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS, copy_piece, row_sources
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import STEP_SLOTS, STEP_TILES, TargetPlan
from flashdsa.plan.row_tiles import CHUNK_COLUMNS, TILE_ROWS


class TargetMemory(Memory):
    """Regions and barriers of `TargetPlan`."""

    q: Region
    k: Region
    heads: Region
    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    k_free: Barriers


class Context(NamedTuple):
    """One CTA's position in the launch."""

    memory: TargetMemory
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    cta: Int32
    num_ctas: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> TargetPlan:
        """The compile-time plan."""
        return self.memory.plan

    @property
    def num_queries(self) -> Int32:
        """Queries of the launch."""
        return Int32(self.indices.shape[0])

    @property
    def topk(self) -> Int32:
        """Slots of a query."""
        return Int32(self.indices.shape[1])


class Item(NamedTuple):
    """A stretch of a query's slots, of which a CTA has the sums."""

    query: Int32  # at least num_queries after the CTA's last item
    begin: Int32  # the first slot, of a whole tile
    end: Int32  # one past the last that may be valid
    tiles: Int32  # at least one
    is_last: Boolean  # no tile of the query follows


@cute.jit
def item_at(ctx: Context, turn: Int32) -> Item:
    """The CTA's item in a turn of all CTAs.

    A turn is a query for each CTA. The last turn has fewer queries; equally many CTAs share each of
    them, by tiles.
    """
    first = turn * ctx.num_ctas
    left = ctx.num_queries - first
    query, part, parts = first + ctx.cta, Int32(0), Int32(1)
    if left > 0 and left < ctx.num_ctas:
        query, part, parts = first + ctx.cta % left, ctx.cta // left, ctx.num_ctas // left
    num_slots = slots_of(ctx, query)
    tiles = tiles_of(num_slots)
    each = (tiles + parts - 1) // parts
    before = part * each
    if before >= tiles or part >= parts:
        query = ctx.num_queries
    behind = cutlass.min(before + each, tiles)
    end = cutlass.min(behind * TILE_ROWS, num_slots)
    return Item(query, before * TILE_ROWS, end, behind - before, behind == tiles)


@cute.jit
def slots_of(ctx: Context, query: Int32) -> Int32:
    """Slots of the query that may be valid; any number after the last query."""
    count = ctx.topk
    if ctx.topk_length.shape[0] > 0:
        if query < ctx.num_queries:
            given = (ctx.topk_length.iterator + query).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


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
    """The row that a slot names; -1 where it is not valid.

    Args:
        query: any number. num_slots: of the query.
    """
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
    """A step: its item, its first slot, and the next item, of turn `turn`."""

    item: Item
    slot: Int32
    next: Item
    turn: Int32


class Rings(NamedTuple):
    """Destination of the next piece of the keys, and of Q."""

    k: PipelineState
    q: PipelineState


@cute.jit
def following(ctx: Context, at: Cursor) -> Cursor:
    """The step after `at`: an item has one, even without a slot."""
    item, slot, behind, turn = at.item, at.slot + STEP_SLOTS, at.next, at.turn
    if slot >= item.end:
        item, slot, turn = behind, behind.begin, turn + 1
        behind = item_at(ctx, turn)
    return Cursor(item, slot, behind, turn)


@cute.jit
def read_rows(ctx: Context, at: Cursor) -> list[Int32]:
    """This lane's rows of the step, of slots lane, lane + 32, ...; -1 where not valid."""
    slot = at.slot + ctx.thread % WARP_SIZE
    return [
        read_row(ctx, at.item.query, slot + WARP_SIZE * i, at.item.end)
        for i in range(STEP_SLOTS // WARP_SIZE)
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


@cute.jit
def load_query_piece(
    role: Gatherer, query: Int32, at: PipelineState, number: Float32, piece: cutlass.Constexpr
) -> PipelineState:
    """Copy a piece of the query's Q, and with the first one its heads' numbers; return the next
    state.

    Args:
        number: of head `thread`.
    """
    ctx, plan = role.ctx, role.ctx.plan
    ring = RingProducer(ctx.memory.q_full, ctx.memory.q_free)
    # q_free: every consumer has the products of what the slot held, and had read its heads before.
    ring.acquire(at)
    if cutlass.const_expr(piece == 0):
        if ctx.thread < plan.num_heads:
            heads = ctx.memory.heads.array(Float32, plan.queries * plan.num_heads)
            heads[at.stage // plan.query_pieces * plan.num_heads + ctx.thread] = number
    if ctx.thread == 0:
        barrier = ring.expect(at.stage)
        for i in cutlass.range_constexpr(plan.query_piece):
            place = at.stage * plan.query_piece_bytes + i * plan.query_chunk_bytes
            to = ctx.memory.q.bytes() + place
            column = (piece * plan.query_piece + i) * CHUNK_COLUMNS
            load_box(to, role.q_map, [Int32(column), Int32(0), query], barrier)
    else:
        ring.commit(at.stage)
    return at.advanced()


@cute.jit
def copy_tile(
    role: Gatherer,
    own: list[Int32],
    to: Int32,
    rings: Rings,
    query: Int32,
    number: Float32,
    is_first: Any,
    tile: cutlass.Constexpr,
) -> Rings:
    """Copy a tile of the step, and meanwhile the query's Q if the tile `is_first`; return the next
    states.

    Args:
        own: this lane's rows of the step. to: of this thread's 16 bytes in the ring's first row.
    """
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
                q = load_query_piece(role, query, q, number, of_query)
    return Rings(k, q)


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every step of the CTA."""
    ctx = role.ctx
    to = ctx.memory.k.address() + swizzled_128(ctx.thread // UNITS, ctx.thread % UNITS)
    rings = Rings(Ring(ctx.plan.key_slots).start(), Ring(ctx.plan.query_slots).start())
    first = item_at(ctx, Int32(0))
    at = Cursor(first, first.begin, item_at(ctx, Int32(1)), Int32(1))
    own = read_rows(ctx, at)
    number = head_number(role, first.query)
    more = Boolean(first.query < ctx.num_queries)
    while more:
        ahead = following(ctx, at)
        more = ahead.item.query < ctx.num_queries
        # The next step's row numbers, and the next query's heads, come during this step's copies.
        own_ahead = read_rows(ctx, ahead)
        number_ahead = number
        if ahead.slot == ahead.item.begin:
            number_ahead = head_number(role, ahead.item.query)
        query, is_first = at.item.query, at.slot == at.item.begin
        for tile in cutlass.range_constexpr(STEP_TILES):
            if tile == 0 or at.slot + tile * TILE_ROWS < at.item.end:
                rings = copy_tile(role, own, to, rings, query, number, is_first, tile)
        at, own, number = ahead, own_ahead, number_ahead
