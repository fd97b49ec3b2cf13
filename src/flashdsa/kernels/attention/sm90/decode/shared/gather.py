"""Rows that a query's slots name, and the last step with a valid slot."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl import gmem, ptx, static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core import sources, tile
from flashdsa.kernels.attention.sm90.core.sources import num_rows, rows_of_tile
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.row_formats import RowFormat

Asked = tuple[list[Int32], list[Int32]]
"""Words that name a lane's rows of the first step and of the last one; they may be under way."""


class Gatherer(NamedTuple):
    """Fills k and masks, and q if it has a map of it. Signals that they have come."""

    ctx: Context
    q_map: Any  # of `map_query`; None: Q is loaded elsewhere
    kv: cute.Tensor  # (S_kv, d_qk) bf16, (S_kv, 656) packed, or packed pages
    indices: cute.Tensor  # (S, topk) int32
    sources: Any = None  # of a joined plan `Sources`
    batch: Any = None  # of stream-K tiles `Batch`
    of_form: static.Static = static.Static(None)  # format of packed rows; None: the plan's first

    @property
    def form(self) -> RowFormat:
        form: RowFormat = self.of_form.value or self.ctx.plan.form
        return form


@cute.jit
def early_gatherer(item: Context, gathers: Boolean, x: Operands, sources: Any) -> Gatherer:
    """The role of each warp before roles begin, to ask for what names the first rows. Every warp
    asks, those that do not gather for nothing: behind a branch all would wait for what some have
    asked for."""
    end = item.end_slot if gathers else Int32(0)
    return Gatherer(item._replace(end_slot=end), None, x.kv, x.indices, sources)


def of_extra(role: Gatherer) -> Gatherer:
    """The role for rows of the plan's other format."""
    return role._replace(of_form=static.Static(role.ctx.plan.extra_form))


def of_first(role: Gatherer) -> Gatherer:
    """The role for rows of the plan's first format."""
    return role._replace(of_form=static.Static(None))


def has_extra_form(role: Gatherer, slot: Any) -> Any:
    """Whether the source of a tile, whose first slot is given, has the plan's other format."""
    of_main = role.kv.shape[2] != role.ctx.plan.form.row_bytes
    return Boolean(slot >= role.ctx.joined.split) ^ Boolean(of_main)


def list_of_slot(role: Gatherer, slot: Any) -> Any:
    """The list of the source of a slot's tile, of a joined plan."""
    ctx = role.ctx
    return sources.list_of_tile(role.sources, ctx.query, ctx.joined, slot, ctx.end_slot)


@cute.jit
def ask_slot(role: Gatherer, slot: Int32) -> Int32:
    """Load what names a slot's row; nobody waits for it before `row_of_slot`."""
    exists = slot < role.ctx.end_slot
    if cutlass.const_expr(role.sources is not None):
        return sources.ask_listed(list_of_slot(role, slot), slot)
    offset = Int64(role.ctx.query) * role.indices.shape[1] + slot
    return gmem.load_if(Int32(exists), role.indices.iterator + offset)


@cute.jit
def row_of_slot(role: Gatherer, slot: Int32, asked: Int32) -> Int32:
    """The kv row that a slot names, negative where it is not valid. `asked`: by `ask_slot`."""
    if cutlass.const_expr(role.sources is not None):
        return sources.row_of_listed(list_of_slot(role, slot), slot, asked)
    row = Int32(-1)
    if slot < role.ctx.end_slot:
        row = asked
        if row >= num_rows(role.kv):
            row = Int32(-1)
    return row


def read_slot(role: Gatherer, slot: Int32) -> Int32:
    """The same, of a slot that is asked for here."""
    return row_of_slot(role, slot, ask_slot(role, slot))


@cute.jit
def first_row_of(role: Gatherer, slot: Int32) -> Any:
    """Pointer to the first row of the source of a tile, whose first slot is given."""
    if cutlass.const_expr(role.sources is None):
        return role.kv.iterator
    return rows_of_tile(role.sources, role.ctx.joined, slot)


def lane_slots(role: Gatherer, step: Int32, lane: Int32) -> list[Any]:
    """Numbers of the lane's slots of a step of the CTA."""
    step_keys = role.ctx.plan.tile.step_keys
    first = role.ctx.first_slot + step * step_keys + lane
    return [first + i for i in range(0, step_keys, WARP_SIZE)]


def lists_of_slots(role: Gatherer, slots: list[Any]) -> list[Any]:
    """The list of each of the lane's slots of a step of a joined plan."""
    ctx = role.ctx
    return sources.lists_of_slots(role.sources, ctx.query, ctx.joined, slots, ctx.end_slot)


@cute.jit
def ask_slots(role: Gatherer, step: Int32, lane: Int32) -> list[Int32]:
    """Load what names this lane's rows of a step; nobody waits for it before `rows_of_slots`."""
    slots = lane_slots(role, step, lane)
    if cutlass.const_expr(role.sources is None):
        return [ask_slot(role, slot) for slot in slots]
    lists = lists_of_slots(role, slots)
    return [sources.ask_listed(*one) for one in zip(lists, slots, strict=True)]


@cute.jit
def rows_of_slots(role: Gatherer, step: Int32, asked: list[Int32], lane: Int32) -> list[Int32]:
    """Rows that this lane's slots of a step name; `asked`: result of `ask_slots`."""
    slots = lane_slots(role, step, lane)
    if cutlass.const_expr(role.sources is None):
        return [row_of_slot(role, slot, one) for slot, one in zip(slots, asked, strict=True)]
    lists = lists_of_slots(role, slots)
    return [sources.row_of_listed(*one) for one in zip(lists, slots, asked, strict=True)]


def read_slots(role: Gatherer, step: Int32, lane: Int32) -> list[Int32]:
    """The same, of slots that are asked for here."""
    return rows_of_slots(role, step, ask_slots(role, step, lane), lane)


def last_step(num_steps: Any) -> Any:
    """The last of so many steps; 0 of none."""
    return cutlass.max(num_steps - 1, Int32(0))


def all_of(slots: list[Any]) -> Any:
    """Bitwise and: negative if none of the lane's slots is valid."""
    together = slots[0]
    for slot in slots[1:]:
        together = together & slot
    return together


def ask_ends(role: Gatherer, lane: Int32) -> Asked:
    """Load what names this lane's rows of the first and the last step, in one wait for memory."""
    first = ask_slots(role, Int32(0), lane)
    return first, ask_slots(role, last_step(role.ctx.num_steps), lane)


def slots_of_ends(role: Gatherer, asked: Asked, lane: Int32) -> tuple[list[Int32], Int32]:
    """Rows of the first step, and `all_of` those of the last one; `asked`: result of `ask_ends`."""
    slots = rows_of_slots(role, Int32(0), asked[0], lane)
    last = rows_of_slots(role, last_step(role.ctx.num_steps), asked[1], lane)
    return slots, all_of(last)


@cute.jit
def last_slots(role: Gatherer, num_steps: Int32, lane: Int32) -> Int32:
    """`all_of` this lane's slots of the last of `num_steps` steps."""
    return all_of(read_slots(role, last_step(num_steps), lane))


@cute.jit
def find_extent(role: Gatherer, last: Int32, lane: Int32, least: cutlass.Constexpr = 0) -> Int32:
    """All warps: return the tiles up to those of the last step with a valid slot; tell the
    consumers. `last`: `last_slots` of all steps, if they are more than `least`. `least`: minimum of
    the result's steps, their slots valid or not, if the CTA has them."""
    ctx = role.ctx
    num_steps = ctx.num_steps
    more = Boolean(num_steps > least)
    while more:
        if cute.arch.vote_any_sync(last >= 0):
            more = Boolean(False)
        else:
            num_steps -= 1
            more = num_steps > least
            last = last_slots(role, num_steps, lane)
    num_tiles = cutlass.min(num_steps * tile.TILES, ctx.num_tiles)
    if ctx.thread == 0:
        ctx.memory.extent.array(Int32, 1)[0] = num_tiles
        ctx.memory.extent_full.arrive()
    return num_tiles


class Pages(NamedTuple):
    """Packed pages of a source."""

    first: Any  # pointer
    stride: Int64  # bytes from a page to the next one
    rows: Int32  # of a page

    @property
    def rows_log2(self) -> Any:
        """Rounded down."""
        return Int32(31) - Int32(cute.arch.clz(self.rows))


@cute.jit
def pages_of(role: Gatherer, slot: Int32) -> Any:
    """Pages of the source of a tile, whose first slot is given; None of rows without pages."""
    if cutlass.const_expr(not role.ctx.plan.paged):
        return None
    first, stride, rows = role.kv.iterator, Int64(role.kv.stride[0]), Int32(role.kv.shape[1])
    if cutlass.const_expr(role.sources is not None):
        extra = role.sources.extra.kv
        if slot >= role.ctx.joined.split:
            first, stride, rows = extra.iterator, Int64(extra.stride[0]), Int32(extra.shape[1])
    return Pages(first, stride, rows)


@cute.jit
def place_of(pages: Pages, row: Int32) -> tuple[Int32, Int32]:
    """The page of a row, and the row's number in it. Rows of a page are a power of two almost
    always: a division takes twenty instructions."""
    page = row >> pages.rows_log2
    if pages.rows & (pages.rows - 1) != 0:
        page = row // pages.rows
    return page, row - page * pages.rows


def row_address(role: Gatherer, row: Any, pages: Any = None) -> Any:
    """Address of a packed row's data; meaningless if the row is negative."""
    if pages is None:
        return role.kv.iterator + Int64(row) * role.form.row_bytes
    return pages.first + offset_in_pages(role, row, pages)


def offset_in_pages(role: Gatherer, row: Any, pages: Pages) -> Int64:
    """Bytes from the first page to a packed row's data."""
    form = role.form
    page, number = place_of(pages, row)
    return Int64(page) * pages.stride + number * (form.data_bytes if form.split else form.row_bytes)


def scales_address(role: Gatherer, row: Any, pages: Any) -> Any:
    """Address of a packed row's scales, less `scales_at` if they follow its codes."""
    form = role.form
    if not form.split:
        return row_address(role, row, pages)
    page, number = place_of(pages, row)
    at = pages.rows * form.data_bytes + number * form.scale_bytes
    return pages.first + (Int64(page) * pages.stride + at)


def load_or(address: Any, row: Any, offset: int, words: int, otherwise: int = 0) -> list[Any]:
    """Load 1, 2 or 4 words `offset` bytes after an address of device memory; `otherwise` for a
    negative row. The first-level cache has no room: rows are read once."""
    results = ", ".join(f"{{$w{i}}}" for i in range(words))
    form = f"v{words}.b32 {{{results}}}" if words > 1 else f"b32 {results}"
    others = "".join(f"mov.b32 {{$w{i}}}, {otherwise}; " for i in range(words))
    return ptx.words(
        "{ .reg .pred valid; setp.ge.s32 valid, {$r1}, 0; "
        + others
        + f"@valid ld.global.nc.L1::no_allocate.L2::128B.{form}, "
        f"[{{$r0}} + {offset}]; }}",
        words,
        address,
        row,
    )
