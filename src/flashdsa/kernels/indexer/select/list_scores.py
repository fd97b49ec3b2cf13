"""Listing of the scores of a tile's pages, as they are computed."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.kernels.indexer.schedule.work_tile import WorkTile
from flashdsa.kernels.indexer.select.bins import sortable
from flashdsa.kernels.indexer.select.candidate_list import append, put
from flashdsa.kernels.indexer.sizes import FILLS
from flashdsa.kernels.indexer.smem_views import SelectBuffers


class Batch(NamedTuple):
    """Pages to list: those of the tile from its page `begin` on."""

    tile: WorkTile
    stage: Int32  # of the tile's queries, weights and description
    begin: Int32


class PageRange(NamedTuple):
    """Pages to score: those of a tile from its page `begin` to before its page `end`."""

    tile_stage: Int32  # of the tile's queries, weights and description
    first_page: Int32  # of the tile, in the row
    first_number: Int32  # of the tile's first page, among the CTA's pages
    begin: Int32
    end: Int32


class ListSink(NamedTuple):
    """Destination of scored tokens.

    A token's index in the list is that of its position in the part until the list is first
    compacted, so that no thread waits for a counter; afterwards the tokens that can win are
    appended.
    """

    select: SelectBuffers
    first_position: Int32  # of the part
    length: Int32  # tokens of the row
    floor: Uint32  # keys below it cannot win any more
    in_order: cutlass.Boolean


@cute.jit
def list_score(
    sink: ListSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Put a score into the list, if it can win; all lanes call.

    Args:
        valid: its page id is in the cache. present: the lane has a score.
    """
    key = sortable(score)
    valid = valid and position < sink.length
    if sink.in_order:
        if present:
            put(sink.select, position - sink.first_position, key, position, valid)
    else:
        wanted = present and valid and key >= sink.floor
        append(sink.select, key, Uint32(position), wanted)


@cute.jit
def first_room(
    room: Int32, in_order: cutlass.Boolean, tile: WorkTile, coord: Any, plan: cutlass.Constexpr
) -> Int32:
    """Pages that the calling CTA lists next: as many as `room` holds; before the first compaction
    of the list of a row that it has alone, the CTA's own number of pages."""
    if in_order and tile.num_pages > room and coord.num_parts == 1:
        cta, _, _ = cute.arch.block_idx()
        room = plan.first_fill_pages + cta % FILLS * plan.fill_step_pages
    return room
