"""Which of two groupings a launch takes: from its lists, on the device.

Both groupings are launched, and the kernels of the one that is not taken have no work. The lists of
the first are made in any case. It is taken where its queries have so much in common that its lists
are short: `ratio` times what their queries name, divided by the queries of a group, at most.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE

THREADS = 1024
FIRST, SECOND = 0, 1


@cute.jit
def is_taken(choice: cute.Tensor, number: Int32) -> Boolean:
    """Whether a grouping has work.

    Args:
        choice: (1,) int32, FIRST or SECOND; or (0,): there is one grouping only.
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
):
    """One CTA; arguments as in `launch_choice`."""
    thread, _, _ = cute.arch.thread_idx()
    sums = cutlass.memory.SmemAllocator().allocate_array(Float32, 2 * THREADS // WARP_SIZE)
    keys, slots = Float32(0), Float32(0)
    for group in cutlass.range(thread, counts.shape[0], THREADS, unroll=4):
        keys += Float32(counts[group])
        slots += Float32(named[group])
    keys, slots = neighbours_sum(keys, WARP_SIZE), neighbours_sum(slots, WARP_SIZE)
    if thread % WARP_SIZE == 0:
        (sums + thread // WARP_SIZE * 2).store(keys)
        (sums + (thread // WARP_SIZE * 2 + 1)).store(slots)
    cute.arch.sync_threads()
    if thread < WARP_SIZE:
        keys = neighbours_sum((sums + 2 * thread).load(), WARP_SIZE)
        slots = neighbours_sum((sums + (2 * thread + 1)).load(), WARP_SIZE)
        if thread == 0:
            choice[0] = Int32(FIRST) if keys * queries <= ratio * slots else Int32(SECOND)


@cute.jit
def launch_choice(
    counts: cute.Tensor,
    named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    queries: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        counts, named: of the first grouping's lists, (groups,) int32: keys, and what the queries of
            a group name, one by one. choice: (1,) int32, written.
        ratio: of a list's length to that of one query's, up to which the first grouping is taken.
        queries: of a group of the first grouping.
    """
    choice_kernel(counts, named, choice, ratio, queries).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
