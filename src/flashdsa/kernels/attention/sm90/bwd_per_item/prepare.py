"""Preparation of the backward: delta, the groups' lists, the choice and the copy of kv.

A list is made in shared memory, and delta is read from device memory. So if a group is one query
its CTA makes both, every second CTA in the other order.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.delta import delta_of, launch_delta
from flashdsa.kernels.attention.sm90.bwd_per_item.columns import launch_permute
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS
from flashdsa.kernels.attention.union.choice import SECOND, is_taken, launch_choice
from flashdsa.kernels.attention.union.launch import Lists, launch_union, make_list
from flashdsa.kernels.attention.union.memory import THREADS, WARPS, Slots, allocate_shared

SM_CTAS = 3
"""CTAs on each streaming multiprocessor: shared memory has room for three."""
CARVEOUT = 100
"""Percent of the first-level cache that may be shared memory."""


@cute.jit
def make_delta(
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor], query: Int32, heads: Int32
) -> None:
    """Write delta of a query. All threads of the CTA call."""
    do, out, delta = of_delta
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    for row in cutlass.range(query * heads + warp, (query + 1) * heads, WARPS, unroll=1):
        total = delta_of(do, out, row, lane)
        if lane == 0:
            (delta.iterator + row).store(total)


@cute.kernel
def query_kernel(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    num_keys: Int32,
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    choice: Any,
):
    """Write the list of one query, if it is taken, and its delta; arguments as in
    `launch_prepare`."""
    query, _, _ = cute.arch.block_idx()
    shared = allocate_shared(TILE_KEYS)
    x = Slots(*slots, num_keys, query, 1, TILE_KEYS)
    taken = Boolean(True)
    if cutlass.const_expr(choice is not None):
        taken = is_taken(choice, Int32(SECOND))
    if query % 2 == 1:
        make_delta(of_delta, query, heads)
    if taken:
        make_list(x, shared, lists)
    if query % 2 == 0:
        make_delta(of_delta, query, heads)


@cute.jit
def launch_prepare(
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    slots: tuple[cute.Tensor, cute.Tensor],
    keys: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    more: Any,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`; with `more` lists and copy are made where the choice takes them.

    Args:
        of_delta: do, out (S * H, 512) bf16; delta (S * H,) fp32, written. heads: H.
        slots: indices (S, topk) int32; topk_length (S,) int32, or (0,). keys: kv, copy.
        lists: of groups of plan.queries queries, written.
        more: lists of groups of plan.more queries, choice, and ratio and most_keys, see
            `launch_choice`; None: no choice.
    """
    num_keys = Int32(keys[0].shape[0])
    choice = None
    if cutlass.const_expr(more is not None):
        of_more, choice, (ratio, most_keys) = more
        launch_union(*slots, of_more, num_keys, plan.more, stream, TILE_KEYS)
        unordered = of_more.present if cutlass.const_expr(plan.slots) else None
        statistics = of_more.counts, of_more.named
        launch_choice(*statistics, choice, ratio, plan.more, stream, most_keys, unordered)
    if cutlass.const_expr(plan.queries == 1):
        query_kernel(slots, lists, num_keys, of_delta, heads, choice).launch(
            grid=[lists.counts.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=SM_CTAS,
            preferred_smem_carveout=CARVEOUT,
        )
    else:
        launch_delta(*of_delta, stream)
        launch_union(*slots, lists, num_keys, plan.queries, stream, TILE_KEYS, choice)
    launch_permute(*keys, choice, stream)
