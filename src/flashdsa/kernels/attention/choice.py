"""Choice between two groupings of a launch: from its lists, on the device.

Both groupings are launched, and the kernels of the one that is not taken have no work. The first is
taken if its queries have so much in common that its lists are short: `ratio` times what their
queries name, divided by the queries of a group, at most. A sample can say before they are made that
they will not be (`sample.py`)."""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.grids import follow_grid
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE

THREADS = 1024
FIRST, SECOND = 0, 1


@cute.jit
def is_taken(choice: cute.Tensor, number: Int32) -> Boolean:
    """Whether a grouping has work.

    Args:
        choice: (1,) int32, FIRST or SECOND; or (0,): only one grouping.
        number: the grouping's, FIRST or SECOND.
    """
    taken = Boolean(True)
    if choice.shape[0] > 0:
        taken = choice[0] == number
    return taken


@cute.kernel
def choice_kernel(
    counts: cute.Tensor,
    named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    queries: cutlass.Constexpr,
    most_keys: Any,
    sampled: Any,
    tile_keys: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_choice`."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    judged = cutlass.const_expr(most_keys is not None)
    number = 3 if judged else 2
    sums = cutlass.memory.SmemAllocator().allocate_array(Float32, number * THREADS // WARP_SIZE)
    keys, slots, too_long = Float32(0), Float32(0), Float32(0)
    groups, made = Int32(counts.shape[0]), Boolean(True)
    if cutlass.const_expr(sampled is not None):
        made = is_taken(sampled, Int32(FIRST))
        groups = groups if made else Int32(0)
    for group in cutlass.range(thread, groups, THREADS, unroll=4):
        of_group, of_queries = counts[group], named[group]
        if cutlass.const_expr(tile_keys > 1):
            of_group = (of_group + (tile_keys - 1)) // tile_keys
            of_tiles = queries * tile_keys
            of_queries = (of_queries + (of_tiles - 1)) // of_tiles * queries
        keys += Float32(of_group)
        slots += Float32(of_queries)
        if cutlass.const_expr(most_keys is not None):
            too_long += Float32(1.0) if counts[group] > most_keys else Float32(0.0)
    for i, own in enumerate((keys, slots, too_long)[:number]):
        total = neighbours_sum(own, WARP_SIZE)
        if thread % WARP_SIZE == 0:
            (sums + (thread // WARP_SIZE * number + i)).store(total)
    cute.arch.sync_threads()
    if thread < WARP_SIZE:
        totals = [
            neighbours_sum((sums + (number * thread + i)).load(), WARP_SIZE) for i in range(number)
        ]
        if thread == 0:
            taken = totals[0] * queries <= ratio * totals[1]
            if cutlass.const_expr(judged):
                taken = taken and totals[2] == Float32(0.0)
            choice[0] = Int32(FIRST) if made and taken else Int32(SECOND)


@cute.jit
def launch_choice(
    counts: cute.Tensor,
    named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    queries: cutlass.Constexpr,
    stream: Any,
    most_keys: Any = None,
    sampled: Any = None,
    tile_keys: cutlass.Constexpr = 1,
):
    """Launch on `stream`.

    Args:
        counts, named: of the first grouping's lists, (groups,) int32: keys, and what the queries of
            a group name, one by one. choice: (1,) int32, written.
        ratio: of a list's length to that of one query's, up to which the first grouping is taken.
        queries: of a group of the first grouping.
        most_keys: of a list: it is not taken if one has more; None: then too.
        sampled: a choice; the lists are made if it is FIRST. None: they are made.
        tile_keys: lists are compared in whole tiles of so many keys, those of a group's queries as
            if they were equally long.
    """
    made = choice_kernel(counts, named, choice, ratio, queries, most_keys, sampled, tile_keys)
    made.launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)
