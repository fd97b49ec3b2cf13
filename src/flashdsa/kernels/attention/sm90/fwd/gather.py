"""Role gather: row numbers, masks, rows and Q for the consumers.

All four warps bring every half of a tile together: the consumers wait for the half that was freed
last, and one warp alone takes four times as long for it (10% of the kernel's time).
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.gmem import load_if
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core import gather
from flashdsa.kernels.attention.sm90.core import sources as sourcing
from flashdsa.kernels.attention.sm90.core import tile as tiles
from flashdsa.kernels.attention.sm90.fwd import draws as drawing
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.plan import THREAD_LISTS


class Gatherer(NamedTuple):
    """Fills q, k, masks and flags. Signals q_full, k0_full, k1_full, masks_full."""

    ctx: Context
    q_map: Any  # of `map_query`: (S, H, 576), of a group (S * H, 576)
    kv: cute.Tensor  # (S_kv, 576) bf16
    slots: cute.Tensor  # (queries or groups, any) int32: the rows that they name
    num_slots: cute.Tensor  # (queries or groups,) int32, or (0,): all of them
    members: Any  # of a group (groups, any) uint8: bit i, query i names the row; else None
    sources: Any  # of a joined plan `Sources`; else None
    draws: Any  # of items that are drawn `Draws`; else None
    out: cute.Tensor  # (S, H, 512) bf16

    @property
    def reads_sources(self) -> bool:
        """Whether slots are those of both sources' lists, and no union's."""
        return self.sources is not None and self.members is None

    @property
    def finds_ends(self) -> bool:
        """Whether it looks for the last slot of a list that names a row. The slots of a union all
        do; items that are drawn, and two sources, have lengths."""
        return self.sources is None and self.members is None and self.draws is None


class Cursor(NamedTuple):
    """A step: its item, its number in the item, and the item's length."""

    item: Int32
    list: Int32  # the row of `slots`
    step: Int32
    num_slots: Any  # Int32; of a joined plan `JoinedSlots`
    next_list: Any  # of the item after it; None if items are drawn
    next_slots: Any  # likewise
    next_end: Any  # this lane's slot of that list's last 32; None: its end is not looked for
    number: Any  # of the item among the CTA's, if items are drawn; else None
    line: Any  # Int64: address of the list, or of the packed one; None: lists are not packed


class Slots(NamedTuple):
    """This lane's slots of a step: lane, lane + 32, ..."""

    rows: list[Int32]  # of kv, negative: not valid; while they are asked for what names them
    members: list[Int32]  # bits, see Gatherer; [] without groups


@cute.jit
def count_slots(role: Gatherer, item: Int32) -> Any:
    """Slots of the item that may be valid; any number after the last item."""
    if cutlass.const_expr(role.reads_sources):
        return join_slots_of(role, item)
    count = Int32(role.slots.shape[1])
    if role.num_slots.shape[0] > 0:
        if item < role.ctx.num_items:
            given = (role.num_slots.iterator + item // role.ctx.blocks).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def join_slots_of(role: Gatherer, item: Int32) -> sourcing.JoinedSlots:
    """Likewise of a joined plan."""
    slots = sourcing.JoinedSlots(Int32(0), Int32(0), Int32(0))
    if item < role.ctx.num_items:
        slots = sourcing.join_slots(role.sources, item // role.ctx.blocks, role.ctx.plan.tile.keys)
    return slots


@cute.jit
def count_of_lists(role: Gatherer, order: drawing.Order) -> list[Int32]:
    """Slots of the thread's lists among those that are put in order; any number after the last."""
    ctx = role.ctx
    lists = [
        cutlass.min(order.first + turn * WARPGROUP_SIZE + ctx.thread, ctx.num_lists - 1)
        for turn in range(THREAD_LISTS)
    ]
    if cutlass.const_expr(role.reads_sources):
        return [one.end for one in sourcing.join_lists(role.sources, lists, ctx.plan.tile.keys)]
    counts = [Int32(role.slots.shape[1]) for _ in lists]
    if role.num_slots.shape[0] > 0:
        counts = sourcing.limited(counts, role.num_slots, lists)
    return counts


@cute.jit
def put_in_order(ctx: Context, order: drawing.Order, counts: list[Int32]) -> None:
    """Find the order of the last lists, of `count_of_lists`; all four warps call."""
    classes = []
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        of_list = drawing.class_of(counts[turn], ctx.plan.tile.step_keys)
        # What is no list comes last.
        exists = turn * WARPGROUP_SIZE + ctx.thread < order.count
        classes.append(of_list if exists else Int32(0))
    drawing.sort_lists(drawing.order_words(ctx), classes, ctx.thread)


@cute.jit
def item_at(role: Gatherer, order: drawing.Order, place: Int32) -> drawing.Drawn:
    """The item at a place: of a list's items one has its place after the other."""
    ctx = role.ctx
    item, slots, main = ctx.num_items, Int32(0), Int32(0)
    if place < ctx.num_items:
        number = place // ctx.blocks
        item = drawing.list_at(ctx, order, number) * ctx.blocks + (place - number * ctx.blocks)
        counted = count_slots(role, item)
        slots = sourcing.end_of(counted)
        if cutlass.const_expr(role.reads_sources):
            main = counted.main
    return drawing.Drawn(item, slots, main)


def slots_of_drawn(role: Gatherer, drawn: drawing.Drawn) -> Any:
    """Slots of an item that was drawn."""
    if not role.reads_sources:
        return drawn.slots
    split = sourcing.split_after(drawn.main, role.ctx.plan.tile.keys)
    return sourcing.JoinedSlots(drawn.main, split, drawn.slots)


def line_of(role: Gatherer, number: Int32) -> Any:
    """Pointer to a list; after the last one to that."""
    existing = cutlass.min(number, role.slots.shape[0] - 1)
    return role.slots.iterator + Int64(existing) * role.slots.shape[1]


def address_of_list(role: Gatherer, number: Int32) -> Any:
    """Its address; None of lists that are not packed."""
    return line_of(role, number).toint() if role.ctx.plan.packs else None


def names_row(role: Gatherer, slot: Int32) -> Any:
    """Whether a slot names a row of kv."""
    return (slot >= 0) & (slot < role.kv.shape[0])


@cute.jit
def ask_end(role: Gatherer, number: Int32, lane: Int32) -> Any:
    """Load this lane's slot of a list's last 32; nobody waits for it before `end_of_list`."""
    if cutlass.const_expr(not role.finds_ends):
        return None
    slot = cutlass.max(Int32(role.slots.shape[1]) - 1 - lane, Int32(0))
    return (line_of(role, number) + slot).load()


@cute.jit
def end_of_list(role: Gatherer, number: Int32, count: Any, asked: Any, lane: Int32) -> Any:
    """Slots up to the last step that names a row; with lengths `count`. `asked`: by `ask_end`."""
    if cutlass.const_expr(not role.finds_ends):
        return count
    end, step_keys = count, role.ctx.plan.tile.step_keys
    if role.num_slots.shape[0] == 0 and number < role.slots.shape[0]:
        more = Boolean(cute.arch.vote_any_sync(names_row(role, asked)) == 0)
        while more:
            # The step that has the last slot before `end`.
            last, named = (end - 1) // step_keys * step_keys, Boolean(False)
            for i in cutlass.range_constexpr(step_keys // WARP_SIZE):
                slot = cutlass.min(last + i * WARP_SIZE + lane, end - 1)
                named = named | names_row(role, (line_of(role, number) + slot).load())
            more = Boolean(cute.arch.vote_any_sync(named) == 0) & (last > 0)
            if more:
                end = last
    return end


@cute.jit
def first_cursor(role: Gatherer, lane: Int32) -> Cursor:
    """The CTA's first step."""
    ctx, item = role.ctx, role.ctx.first_item
    slots, number = count_slots(role, item), item // ctx.blocks
    line = address_of_list(role, number)
    if cutlass.const_expr(role.draws is not None):
        return Cursor(item, number, Int32(0), slots, None, None, None, Int32(0), line)
    following = item + ctx.num_ctas
    next_list = following // ctx.blocks
    next_slots, next_end = count_slots(role, following), ask_end(role, next_list, lane)
    return Cursor(item, number, Int32(0), slots, next_list, next_slots, next_end, None, line)


@cute.jit
def next_cursor(role: Gatherer, cursor: Cursor, lane: Int32) -> Cursor:
    """The step after a step: an item has one, even without a slot."""
    item, row, step = cursor.item, cursor.list, cursor.step + 1
    num_slots, next_slots, number = cursor.num_slots, cursor.next_slots, cursor.number
    next_list, next_end, line = cursor.next_list, cursor.next_end, cursor.line
    if step * role.ctx.plan.tile.step_keys >= sourcing.end_of(num_slots):
        if cutlass.const_expr(role.draws is None):
            item += role.ctx.num_ctas
            row = next_list
            step = Int32(0)
            num_slots = end_of_list(role, row, next_slots, next_end, lane)
            next_list = (item + role.ctx.num_ctas) // role.ctx.blocks
            next_slots = count_slots(role, item + role.ctx.num_ctas)
            next_end = ask_end(role, next_list, lane)
        else:
            number += 1
            drawn = drawing.read_drawn(role.ctx, number)
            item, num_slots = drawn.item, slots_of_drawn(role, drawn)
            row = item // role.ctx.blocks
            step = Int32(0)
        line = address_of_list(role, row)
    return Cursor(item, row, step, num_slots, next_list, next_slots, next_end, number, line)


@cute.jit
def pack_list(
    role: Gatherer, cursor: Cursor, slots: Slots, lane: Int32, order: Any
) -> tuple[Cursor, list[Int32]]:
    """At an item's first step: pack its list if it has gaps; return its cursor and this lane's rows
    of the step. `order`: of items that are drawn `Order`; else None."""
    line, num_slots, rows = cursor.line, cursor.num_slots, slots.rows
    if (cursor.step == 0) & (num_slots > role.ctx.plan.tile.step_keys):
        if drawing.has_gaps(rows):
            to, room = drawing.rows_of_out(role.ctx, role.out, cursor.item)
            of = drawing.List(line, num_slots, Int32(role.kv.shape[0]))
            packed = drawing.pack(role.ctx, of, to, room)
            line, num_slots = packed.line, packed.num_slots
            rows = drawing.load_ids(packed, lane, num_slots)
            if cutlass.const_expr(role.draws is not None):
                if num_slots <= role.ctx.plan.tile.step_keys:
                    # The step is the item's last one now: the next item was not drawn before it.
                    place = drawing.draw_place(role.ctx, role.draws, Boolean(True))
                    drawing.publish(role.ctx, cursor.number + 1, item_at(role, order, place))
    return cursor._replace(num_slots=num_slots, line=line), rows


@cute.jit
def ends_item(role: Gatherer, cursor: Cursor) -> Boolean:
    """Whether the step is an item's last one."""
    last = (cursor.step + 1) * role.ctx.plan.tile.step_keys >= sourcing.end_of(cursor.num_slots)
    return last & (cursor.item < role.ctx.num_items)


def lane_slots(role: Gatherer, cursor: Cursor, lane: Int32) -> list[Any]:
    """Numbers of the lane's slots of a step."""
    step_keys = role.ctx.plan.tile.step_keys
    return [cursor.step * step_keys + lane + i for i in range(0, step_keys, WARP_SIZE)]


@cute.jit
def ask_slots(role: Gatherer, cursor: Cursor, lane: Int32) -> Slots:
    """Load what names this lane's rows of the step; nobody waits for it before `rows_of`."""
    if cutlass.const_expr(role.reads_sources):
        slots = lane_slots(role, cursor, lane)
        lists = lists_of_cursor(role, cursor, slots)
        return Slots([sourcing.ask_listed(*one) for one in zip(lists, slots, strict=True)], [])
    exists = cursor.item < role.ctx.num_items
    query = cursor.list if exists else Int32(0)
    named, members = [], []
    for slot in lane_slots(role, cursor, lane):
        offset = Int64(query) * role.slots.shape[1] + slot
        is_there = Int32(exists & (slot < cursor.num_slots))
        at: Any = role.slots.iterator + offset
        if cutlass.const_expr(cursor.line is not None):
            at = cursor.line + slot * drawing.ID_BYTES
        named.append(load_if(is_there, at))
        if cutlass.const_expr(role.members is not None):
            members.append(load_if(is_there, role.members.iterator + offset, "u8"))
    return Slots(named, members)


@cute.jit
def lists_of_cursor(role: Gatherer, cursor: Cursor, slots: list[Int32]) -> list[sourcing.TileList]:
    """The list of each of the lane's slots of the step, without a slot past the last item."""
    query, end = cursor.list, sourcing.end_of(cursor.num_slots)
    if cursor.item >= role.ctx.num_items:
        query, end = Int32(0), Int32(0)
    return sourcing.lists_of_slots(role.sources, query, cursor.num_slots, slots, end)


@cute.jit
def rows_of(role: Gatherer, cursor: Cursor, asked: Slots, lane: Int32) -> Slots:
    """The rows that this lane's slots of the step name, by what was asked for."""
    if cutlass.const_expr(role.reads_sources):
        slots = lane_slots(role, cursor, lane)
        found = zip(lists_of_cursor(role, cursor, slots), slots, asked.rows, strict=True)
        return Slots([sourcing.row_of_listed(*one) for one in found], asked.members)
    rows = []
    for slot, named in zip(lane_slots(role, cursor, lane), asked.rows, strict=True):
        row = Int32(-1)
        if cursor.item < role.ctx.num_items:
            if slot < cursor.num_slots:
                row = named
                # A union has valid rows only, joint ones of two sources.
                if cutlass.const_expr(role.sources is None):
                    if row >= role.kv.shape[0]:
                        row = Int32(-1)
        rows.append(row)
    return Slots(rows, asked.members)


@cute.jit
def store_masks(
    role: Gatherer, slots: Slots, flags: Int32, lane: Int32, tile: cutlass.Constexpr
) -> None:
    """One warp: store which keys of the tile each query has, and flags of the step."""
    plan = role.ctx.plan
    mask_words = plan.tile.mask_words
    masks = role.ctx.memory.masks.array(Int32, tiles.TILES * plan.group * mask_words)
    for query in cutlass.range_constexpr(plan.group):
        for word in cutlass.range_constexpr(mask_words):
            number = tile * mask_words + word
            is_valid = slots.rows[number] >= 0
            if cutlass.const_expr(plan.group > 1):
                is_valid = (slots.members[number] >> query) & 1 == 1
            mask = cute.arch.vote_ballot_sync(is_valid)
            if lane == 0:
                masks[(tile * plan.group + query) * mask_words + word] = Int32(mask)
    if lane == 0:
        role.ctx.memory.flags.array(Int32, tiles.TILES)[tile] = flags
        role.ctx.memory.masks_full.arrive(tile)


@cute.jit
def first_row_of(role: Gatherer, cursor: Cursor, tile: cutlass.Constexpr) -> Any:
    """Pointer to the first row of the source of a tile of the step; of a union over two sources the
    function of a joint row that gives it."""
    if cutlass.const_expr(role.sources is None):
        return role.kv.iterator
    if cutlass.const_expr(not role.reads_sources):
        return partial(sourcing.source_of_row, role.sources)
    geometry = role.ctx.plan.tile
    slot = cursor.step * geometry.step_keys + tile * geometry.keys
    return sourcing.rows_of_tile(role.sources, cursor.num_slots, slot)


@cute.jit
def load_rows_of_query(role: Gatherer, cursor: Cursor) -> None:
    """One thread: load the item's rows of Q; those past the last one become zeros."""
    ctx = role.ctx
    ctx.memory.q_full.arrive_and_expect_tx()
    if cutlass.const_expr(ctx.plan.group > 1):
        gather.load_query(ctx, role.q_map, [cursor.item * tiles.ROWS])
    else:
        row = (cursor.item - cursor.list * ctx.blocks) * tiles.ROWS
        gather.load_query(ctx, role.q_map, [row, cursor.list])


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: gather every step of the CTA."""
    ctx = role.ctx
    tile = ctx.plan.tile
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    copies = gather.copies_of_thread(ctx)
    order: Any = None
    if cutlass.const_expr(role.draws is not None):
        order = drawing.order_of(ctx)
        counts = count_of_lists(role, order)
    cursor = first_cursor(role, lane)
    asked = ask_slots(role, cursor, lane)
    # The first ids come meanwhile.
    if ctx.thread == 0:
        load_rows_of_query(role, cursor)
    cute.arch.sync_warp()
    if cutlass.const_expr(role.draws is not None):
        is_due = ends_item(role, cursor)
        place = drawing.draw_place(ctx, role.draws, is_due)
        put_in_order(ctx, order, counts)
        if is_due:
            drawing.publish(ctx, cursor.number + 1, item_at(role, order, place))
    slots = rows_of(role, cursor, asked, lane)
    step, items = Int32(0), Int32(1)
    more = Boolean(cursor.item < ctx.num_items)
    while more:
        if cutlass.const_expr(ctx.plan.packs):
            cursor, packed = pack_list(role, cursor, slots, lane, order)
            slots = Slots(packed, slots.members)
        following = next_cursor(role, cursor, lane)
        more = following.item < ctx.num_items
        flags = Int32(0)
        if following.step == 0:
            last = Int32(tiles.LAST_STEP_OF_ITEM | tiles.LAST_STEP_OF_CTA)
            flags = Int32(tiles.LAST_STEP_OF_ITEM) if more else last
            if cutlass.const_expr(role.draws is not None):
                flags = flags | (cursor.item << ctx.plan.flag_bits)
            if cutlass.const_expr(role.sources is not None):
                if sourcing.end_of(cursor.num_slots) - cursor.step * tile.step_keys <= tile.keys:
                    flags = flags | tiles.HALF_STEP
        if cutlass.const_expr(role.draws is not None):
            is_due = ends_item(role, following)
            place = drawing.draw_place(ctx, role.draws, is_due)
        asked = ask_slots(role, following, lane)
        rows = [
            gather.row_of_turn(slots.rows, turn, copies.row)
            for turn in range(tiles.TILES * gather.turns_of(tile))
        ]
        if (cursor.step == 0) & (step > 0):
            if warp == 0:
                if lane == 0:
                    # q_free: both consumers have the last scores of the item before.
                    ctx.memory.q_free.wait_for(items - 1)
                    load_rows_of_query(role, cursor)
                cute.arch.sync_warp()
            items += 1
        phase = ctx.phase(step)
        for number in cutlass.range_constexpr(len(gather.halves_of_step(tile))):
            half = gather.halves_of_step(tile)[number]
            gather.acquire(ctx, half, phase)
            gather.copy_half(ctx, first_row_of(role, cursor, half.tile), rows, copies, number)
            # This follows the copies, which the consumers wait for longer.
            if cutlass.const_expr(number == 0 or number == 2):
                if warp == half.tile:
                    store_masks(role, slots, flags, lane, half.tile)
            # The place has come during the copies before, and the item comes during those after.
            if cutlass.const_expr(number == 1 and role.draws is not None):
                drawn = item_at(role, order, place)
        if cutlass.const_expr(role.draws is not None):
            if is_due:
                drawing.publish(ctx, following.number + 1, drawn)
        slots = rows_of(role, following, asked, lane)
        cursor = following
        step += 1
