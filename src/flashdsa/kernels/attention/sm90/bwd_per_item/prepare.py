"""Preparation of the backward: the groups' lists, the choice and the copy of kv.

The kernel makes delta for itself. Where the choice takes the large groups, which read it, the CTAs
that would make the lists of single queries make it here.

S and dP need the columns of the keys in the order of Q's and dO's, see `core/backward.py`: a small
kernel copies the keys so.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import ptx
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.kernels.attention import delta, union, union_slots
from flashdsa.kernels.attention.choice import FIRST, SECOND, is_taken, launch_choice, launch_sample
from flashdsa.kernels.attention.lists import SAMPLED_ROWS, SAMPLED_SLOTS, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as sizes
from flashdsa.kernels.attention.sm90.bwd_per_item.slots_choice import launch_slots_choice
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    NEAR_RATIO,
    NONE_NEAR,
    Items,
    order_items,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS

COPY_THREADS = 256
PIECE_DIMS = 16
WORDS = 4
"""Words of eight dims."""


@cute.kernel
def permute_kernel(kv: cute.Tensor, copy: cute.Tensor, choice: Any, order: Any):
    """16 dims a thread; arguments as in `launch_permute`. It copies while lists are made: the
    launch before this one lets it begin only when the launches before have ended, which have
    written the choice and kv, and read the copy."""
    cute.arch.griddepcontrol_launch_dependents()
    thread, block, _ = place_in_grid()
    piece = Int64(block) * COPY_THREADS + thread
    taken = is_taken(choice, Int32(SECOND))
    if taken and piece < Int64(kv.shape[0]) * (kv.shape[1] // PIECE_DIMS):
        source = cute.recast_ptr(kv.iterator + piece * PIECE_DIMS, dtype=Int32)
        to = cute.recast_ptr(copy.iterator + piece * PIECE_DIMS, dtype=Int32)
        words = [load_four(source + half * WORDS) for half in range(2)]
        every = [words[half][i] for half in range(2) for i in range(WORDS)]
        for half in cutlass.range_constexpr(2):
            store_four(to + half * WORDS, every[half::2])
    # The lists are there; no launch behind this one begins before they are.
    cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(order is not None):
        if block == 0 and thread == 0:
            order[0][sizes.WAY] = Int32(FIRST)
        if taken and block == 0:
            order_items(*order, COPY_THREADS)


def word_of(words: cute.Tensor, index: int) -> cute.Tensor:
    """One of the words."""
    return cute.make_tensor(words.iterator + index, cute.make_layout((1,)))


def load_four(pointer: Any) -> Any:
    """16 bytes."""
    return prims.load_ext(pointer.to_llvm_ptr(), dtype=Int32, count=WORDS)


def store_four(pointer: Any, words: list[Any]) -> None:
    """Store 16 bytes."""
    ptx.run("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", pointer, *words)


@cute.jit
def launch_permute(kv: cute.Tensor, copy: cute.Tensor, choice: Any, order: Any, stream: Any):
    """Launch on `stream`. `kv`: (S_kv, 576) bf16. `copy`: the same with its columns in order,
    written. `choice`: written where it is SECOND, see `choice.py`; None: written. `order`: tickets,
    written, and what else `order_items` takes; None: there are no tickets."""
    pieces = kv.shape[0] * (kv.shape[1] // PIECE_DIMS)
    ctas = (pieces + COPY_THREADS - 1) // COPY_THREADS
    launch_ctas(permute_kernel(kv, copy, choice, order), ctas, COPY_THREADS, stream, use_pdl=True)


SM_CTAS = 3
"""CTAs on each streaming multiprocessor: shared memory has room for three."""


@cute.kernel
def query_kernel(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    num_keys: Int32,
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    choice: Any,
    plan: cutlass.Constexpr,
    packs: cutlass.Constexpr,
):
    """Write the list of one query, or its delta if large groups are taken; arguments as in
    `launch_prepare`, packs: see `Slots`."""
    follow_grid()
    query, _, _ = cute.arch.block_idx()
    shared = union_slots.allocate_shared(plan.tile.keys)
    x = union_slots.Slots(*slots, num_keys, query, 1, plan.tile.keys, packs=packs)
    taken = is_taken(choice, Int32(SECOND))
    if cutlass.const_expr(choice is not None):
        if not taken:
            delta.write_deltas(*of_delta, query * heads, heads, union_slots.WARPS)
    if taken:
        union.make_list(x, shared, lists)


@cute.jit
def launch_queries(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    num_keys: Int32,
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    choice: Any,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch lists of single queries, or delta; arguments as in `launch_prepare`."""

    def launch(packed: bool) -> None:
        made = query_kernel(slots, lists, num_keys, of_delta, heads, choice, plan, packed)
        ctas, room = lists.counts.shape[0], {"sm_ctas": SM_CTAS, "carveout": sizes.CARVEOUT}
        launch_ctas(made, ctas, union_slots.THREADS, stream, use_pdl=True, **room)

    union.launch_by_rows(num_keys, launch, union_slots.can_pack(1))


class More(NamedTuple):
    """Groups of more queries, which the grouped backward takes where they have much in common."""

    lists: Lists  # five tensors, written; without elements if there are no such groups
    choice: cute.Tensor  # (1,) int32, written: FIRST where they are taken; (0,): there are none
    ratio: Float32  # see `launch_choice`
    most_keys: Int32  # see `launch_choice`
    sampled: cute.Tensor  # (3,) int32, written, see `launch_sample`; or (0,)
    counters: cute.Tensor  # (4,) int32, 0 before the launch and after it; or (0,)
    queries: Int32  # of a group, one of MORE; 0: there are none


@cute.jit
def launch_more(
    slots: tuple[cute.Tensor, cute.Tensor],
    num_keys: Int32,
    more: More,
    queries: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the lists of groups of more queries, if a sample says so, and the choice."""
    counts, sampled = more.counters.iterator, more.sampled
    launch_sample(*slots, num_keys, counts, sampled, more.ratio, queries, stream, keeps=True)
    of_list = plan.tile.keys, sampled, FIRST
    union.launch_union(*slots, more.lists, num_keys, queries, stream, *of_list, packs=True)
    judged = more.lists.counts, more.lists.named, more.choice, more.ratio, queries
    launch_choice(*judged, stream, more.most_keys, sampled, plan.tile.keys)


@cute.jit
def launch_prepare(
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    slots: tuple[cute.Tensor, cute.Tensor],
    keys: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    more_and_tickets: tuple[Any, Any, Any],
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`; with `more` lists and copy are made where the choice takes them, else
    delta.

    Args:
        of_delta: do, out (S * H, 512) bf16; delta (S * H,) fp32. heads: H.
        slots: indices (S, topk) int32; topk_length (S,) int32, or (0,). keys: kv, copy.
        lists: of groups of plan.queries queries, written.
        more_and_tickets: `More`, None: no choice; tickets, see `tickets.py`, written, None: none,
            and far, see `launch_backward`.
        num_ctas: of the backward.
    """
    num_keys = Int32(keys[0].shape[0])
    more, tickets, far = more_and_tickets
    choice = None
    of_shared = (lists.counts, lists.named) if plan.queries > 1 else None
    near = Float32(NEAR_RATIO[0] / plan.queries)
    if cutlass.const_expr(more is not None):
        choice = more.choice
        of_shared = word_of(more.sampled, SAMPLED_ROWS), word_of(more.sampled, SAMPLED_SLOTS)
        near = Float32(NONE_NEAR)
        for i in cutlass.range_constexpr(len(sizes.MORE)):
            if more.queries == sizes.MORE[i]:
                launch_more(slots, num_keys, more, sizes.MORE[i], plan, stream)
                near = Float32(NEAR_RATIO[sizes.MORE[i]] / sizes.MORE[i])
    if cutlass.const_expr(plan.queries == 1):
        launch_queries(slots, lists, num_keys, of_delta, heads, choice, plan, stream)
    else:
        union.launch_union(
            *slots, lists, num_keys, plan.queries, stream, plan.tile.keys, choice, packs=True
        )
    order = None
    if cutlass.const_expr(tickets is not None):
        varied = Boolean(slots[1].shape[0] > 0)
        items = Items(lists.counts, of_shared, near, varied, Boolean(far != sizes.NEAR))
        order = tickets, items, plan.tile.keys
    launch_permute(*keys, choice, order, stream)
    if cutlass.const_expr(tickets is not None):
        if far == sizes.SLOTS_MAY_PAY:
            blocks = cutlass.max(heads // ROWS, Int32(1))
            wave = num_ctas // blocks
            launch_slots_choice(lists, tickets, num_keys, wave, blocks, choice, stream)
