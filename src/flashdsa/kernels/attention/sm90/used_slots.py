"""Slots of each list up to the last one that names a row.

A warp has a list and reads it from its end on, until a step has such a slot. Most lists are full:
one step, and no more than 32 sectors of memory a list. Further steps are longer: each waits for
memory once.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import follow_grid, launch_ctas
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.attention.union_slots import length_of

WARPS = 4
"""Warps of a CTA, each with a list."""
FIRST_TURNS, TURNS = 8, 32
"""Slots that a lane reads together, in a list's first step and in each further one."""


class Lists(NamedTuple):
    """Lists of all queries over one source."""

    indices: cute.Tensor  # (S, any) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_ids: Int32  # a slot names a row if 0 <= id < num_ids
    used: cute.Tensor  # (S,) int32, written


@cute.jit
def last_used(x: Lists, line: Any, end: Int32, lane: Int32, turns: cutlass.Constexpr) -> Int32:
    """One past the last slot that names a row, of the `turns` * 32 before `end`; 0: none does."""
    first, used = end - 1 - lane, Int32(0)
    slots = [cutlass.max(first - turn * WARP_SIZE, Int32(0)) for turn in range(turns)]
    rows = [(line + slot).load() for slot in slots]
    for slot, row in zip(slots, rows, strict=True):
        named = (row >= 0) & (row < x.num_ids)
        used = cutlass.max(used, slot + 1 if named else Int32(0))
    return Int32(cute.arch.warp_redux_sync(used, "max"))


@cute.jit
def write_used(x: Lists, query: Int32, lane: Int32):
    """Write the used slots of a query; a warp calls."""
    line = x.indices.iterator + Int64(query) * x.indices.shape[1]
    end, used = length_of(x, query), Int32(0)
    if end > 0:
        used = last_used(x, line, end, lane, FIRST_TURNS)
        end -= FIRST_TURNS * WARP_SIZE
    while end > 0 and used == 0:
        used = last_used(x, line, end, lane, TURNS)
        end -= TURNS * WARP_SIZE
    if lane == 0:
        (x.used.iterator + query).store(used)


@cute.kernel
def used_slots_kernel(main: Lists, extra: Lists):
    """Four queries' lists over one source."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    block, source, _ = cute.arch.block_idx()
    query = block * WARPS + thread // WARP_SIZE
    if query < main.used.shape[0]:
        if source == 0:
            write_used(main, query, thread % WARP_SIZE)
        else:
            write_used(extra, query, thread % WARP_SIZE)


@cute.jit
def launch_used_slots(stream: Any, *arguments: Any):
    """Launch on `stream`. `arguments`: those of `Lists`, and of an extra source those of its lists,
    of which `used` has no element without one, and they are not looked at."""
    count = len(Lists._fields)
    main, extra = Lists(*arguments[:count]), Lists(*arguments[count:])
    sources = Int32(1) if extra.used.shape[0] == 0 else Int32(2)
    ctas = (main.used.shape[0] + WARPS - 1) // WARPS, sources
    launch_ctas(used_slots_kernel(main, extra), ctas, WARPS * WARP_SIZE, stream, use_pdl=True)


def compile_used_slots(plan: Any) -> Any:
    """Compile `launch_used_slots`."""
    del plan
    queries, extra_used = fake.symbols(2)

    def of_source(used: Any) -> Lists:
        topk, lengths = fake.symbols(2)
        return Lists(fake.words(queries, topk), fake.words(lengths), Int32(1), fake.words(used))

    lists = *of_source(queries), *of_source(extra_used)
    return compile_launch(SM90, launch_used_slots, None, *lists)
