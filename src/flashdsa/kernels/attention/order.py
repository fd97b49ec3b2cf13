"""The order in which CTAs draw items: that of the queries, so that neighbours read the same rows at
the same time, but the last ones longest first, so that all CTAs end together."""

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.gmem import store4
from flashdsa.kernels.attention.choice import is_taken

THREADS = 128
MOST_SORTED = 1024
"""Most lists at the end that are put in order, a power of two."""
TILE = 128
"""Slots by which lengths are told apart: those of a step."""


@cute.jit
def count_slots(num_slots: cute.Tensor, number: Int32, most: Int32) -> tuple[Int32, Int32]:
    """Slots of a list that may be valid, and those of its main list, which are the same."""
    count = most
    if num_slots.shape[0] > 0:
        count = cutlass.min(cutlass.max(num_slots[number], Int32(0)), most)
    return count, count


def key_of(slots: Any, place: Any) -> Any:
    """A number by which lists at the end are put in order, the largest first: by their steps, and
    of as many steps as they come."""
    return (slots + TILE - 1) // TILE * MOST_SORTED + (MOST_SORTED - 1 - place)


@cute.kernel
def order_kernel(
    num_slots: Any,
    order: cute.Tensor,
    most: Int32,
    num_sorted: Int32,
    choice: cute.Tensor,
    number: cutlass.Constexpr,
    count: cutlass.Constexpr,
):
    """THREADS lists; arguments as in `launch_order`."""
    cute.arch.griddepcontrol_launch_dependents()
    if is_taken(choice, Int32(number)):
        place_lists(num_slots, order, most, num_sorted, count)


@cute.jit
def place_lists(
    num_slots: Any,
    order: cute.Tensor,
    most: Int32,
    num_sorted: Int32,
    count_of: cutlass.Constexpr,
) -> None:
    """Write the places of THREADS lists; `count_of`: the `count` of `launch_order`."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pointer = SmemAllocator().allocate_array(Int32, MOST_SORTED)
    keys = cute.make_tensor(pointer, cute.make_layout(MOST_SORTED))
    count = Int32(order.shape[0])
    row = block * THREADS + thread
    slots, main, place, first = Int32(0), Int32(0), row, count - num_sorted
    if row < count:
        slots, main = count_of(num_slots, row, most)
    if (block + 1) * THREADS > first:
        for other in cutlass.range(thread, num_sorted, THREADS, unroll=1):
            keys[other] = key_of(count_of(num_slots, first + other, most)[0], other)
        cute.arch.sync_threads()
        if row >= first:
            own = key_of(slots, row - first)
            place = first
            for other in cutlass.range(num_sorted, unroll=8):
                if keys[other] > own:
                    place += 1
    if row < count:
        store4(order.iterator + 4 * place, [row, slots, main, Int32(0)])


@cute.jit
def launch_order(
    num_slots: Any,
    order: cute.Tensor,
    most: Int32,
    num_sorted: Int32,
    choice: cute.Tensor,
    number: cutlass.Constexpr,
    stream: Any,
    count: cutlass.Constexpr = count_slots,
):
    """Launch on `stream`; a launch after it may begin early.

    Args:
        num_slots: (lists,) int32, or (0,): each list has `most`.
        order: (lists, 4) int32, written: number of a list, its slots, and those of its main list,
            in the order of the draws.
        most: of a list. num_sorted: lists at the end that come longest first.
        choice, number: nothing is done if `choice` says another number; see `choice.py`.
        count: counts both by (num_slots, number of the list, most).
    """
    lists = Int32(order.shape[0])
    num_sorted = cutlass.min(cutlass.min(num_sorted, Int32(MOST_SORTED)), lists)
    order_kernel(num_slots, order, most, num_sorted, choice, number, count).launch(
        grid=[(lists + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
