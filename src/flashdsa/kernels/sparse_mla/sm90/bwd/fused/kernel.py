"""The backward of 64 rows of Q in one kernel: P and dS never leave the streaming multiprocessor.

gather         | score                | right              | dkv
-------------- | -------------------- | ------------------ | -------------------------
               |                      | Q and dO           |
keys of tile 0 |                      |                    |
               | S, dP, P, dS         |                    |
               | dQ += dS K, left     | dQ += dS K, right  | P, dS to registers
keys of tile 1 |                      |                    | products, additions to dKV
               | S, dP, P, dS         |                    | ...
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.delta import launch_delta
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.columns import launch_permute
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.dkv import Dkv, dkv_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.gather import Gatherer, gather_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.right import Right, right_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.score import Scorer, score_all
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.places import (
    Places,
    launch_places,
    launch_split,
    part_of,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.sums import launch_sums
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS, TILE_KEYS
from flashdsa.kernels.sparse_mla.sm90.choice import SECOND, is_taken, launch_choice
from flashdsa.kernels.sparse_mla.sm90.union import Lists, launch_union


class Work(NamedTuple):
    """Of all parts of the groups, as for `fused_kernel`."""

    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor]
    lse: cute.Tensor
    delta: cute.Tensor
    lists: Lists
    dq: cute.Tensor
    dkv: cute.Tensor
    heads: Int32
    sm_scale: Float32


@cute.kernel
def fused_kernel(
    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    lse: cute.Tensor,
    delta: cute.Tensor,
    lists: Lists,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    choice: Any,
    places: Any,
    number: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_fused`. operands: q, the copy of kv, do. choice: None: it is
    taken. With slots dkv is these, and places and number are of the part; else None."""
    q, kv, do = operands
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role finds its place for itself: what all share would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        gather_all(Gatherer(locate(arena, lists, heads, dq, spread, choice, places, number), kv))
    elif group == 1:
        cute.arch.setmaxregister_increase(plan.score.registers)
        ctx = locate(arena, lists, heads, dq, spread, choice, places, number)
        score_all(Scorer(ctx, lse, delta, dq, sm_scale))
    elif group == 2:
        cute.arch.setmaxregister_increase(plan.right.registers)
        ctx = locate(arena, lists, heads, dq, spread, choice, places, number)
        right_all(Right(ctx, q, do, dq))
    else:
        cute.arch.setmaxregister_decrease(plan.dkv.registers)
        ctx = locate(arena, lists, heads, dq, spread, choice, places, number)
        rows = places.rows if cutlass.const_expr(plan.slots) else None
        dkv_all(Dkv(ctx, dkv, rows))


@cute.jit
def locate(
    arena: Arena,
    lists: Lists,
    heads: Int32,
    dq: cute.Tensor,
    spread: Int32,
    choice: Any,
    places: Any,
    number: Any,
) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    num_items = (Int32(dq.shape[0]) + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    if cutlass.const_expr(choice is not None):
        if not is_taken(choice, Int32(SECOND)):
            num_items = Int32(0)
    row_blocks = cutlass.max(heads // BLOCK_ROWS, Int32(1))
    first = cta
    if cutlass.const_expr(arena.plan.slots):
        part = part_of(places, number)
        first = part.begin * row_blocks + cta
        num_items = cutlass.min(num_items, part.end * row_blocks)
    own = thread % WARPGROUP_SIZE
    return Context(arena, lists, row_blocks, first, num_ctas, num_items, spread, own)


@cute.jit
def prepare(
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    slots: tuple[cute.Tensor, cute.Tensor],
    keys: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    more: Any,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """delta, the lists and the copy of kv; with `more` the choice, and these where it takes them.

    Args:
        of_delta: do, out, delta. slots: indices, topk_length. keys: kv, copy.
        more: lists of groups of plan.more queries, choice, and ratio and most_keys, see
            `launch_choice`; None: there is no choice.
    """
    launch_delta(*of_delta, stream)
    num_keys = Int32(keys[0].shape[0])
    choice = None
    if cutlass.const_expr(more is not None):
        of_more, choice, (ratio, most_keys) = more
        launch_union(*slots, of_more, num_keys, plan.more, stream, TILE_KEYS)
        unordered = of_more.present if cutlass.const_expr(plan.slots) else None
        statistics = of_more.counts, of_more.named
        launch_choice(*statistics, choice, ratio, plan.more, stream, most_keys, unordered)
    launch_union(*slots, lists, num_keys, plan.queries, stream, TILE_KEYS, choice)
    launch_permute(*keys, choice, stream)


@cute.jit
def launch_fused(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists, the copy of kv and the backward on `stream`.

    Args:
        q: (S * H, 576) bf16. kv: (S_kv, 576) bf16. copy: the same size, written.
        do, out: (S * H, 512) bf16.
        lse: (S * H,) fp32, natural, sinks in it. indices: (S, topk) int32.
        topk_length: (S,) int32, or (0,): every slot counts.
        delta: (S * H,) fp32, written.
        rows, ...: the lists of `spool.py` of groups of plan.queries queries, written.
        dq: (S * H, 576) bf16, written. dkv: (S_kv, 576) fp32, added to.
        heads: H, one of spool.HEADS; plan.queries * H is 64, or 128.
        spread: see `Context`.
        num_ctas: at most the row blocks, S * H / 64; best so many as run at once.
    """
    lists = Lists(rows, members, counts, present, named)
    prepare((do, out, delta), (indices, topk_length), (kv, copy), lists, None, plan, stream)
    fused_kernel(
        (q, copy, do), lse, delta, lists, dq, dkv, heads, sm_scale, spread, None, None, None, plan
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)


@cute.jit
def launch_fused_or_choose(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    num_ctas: Int32,
    more_rows: cute.Tensor,
    more_members: cute.Tensor,
    more_counts: cute.Tensor,
    more_present: cute.Tensor,
    more_named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    most_keys: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists of groups of plan.more queries, the choice, and the backward if those
    groups have too little in common.

    Args:
        As for `launch_fused`, and
        more_rows, ...: the lists of groups of plan.more queries, written.
        choice: (1,) int32, written: FIRST where they are taken. ratio, most_keys: see
            `launch_choice`.
    """
    lists = Lists(rows, members, counts, present, named)
    first = Lists(more_rows, more_members, more_counts, more_present, more_named)
    of_slots, more = (indices, topk_length), (first, choice, (ratio, most_keys))
    prepare((do, out, delta), of_slots, (kv, copy), lists, more, plan, stream)
    fused_kernel(
        (q, copy, do), lse, delta, lists, dq, dkv, heads, sm_scale, spread, choice, None, None, plan
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)


@cute.jit
def launch_fused_slots(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    num_ctas: Int32,
    num_sms: Int32,
    slots: cute.Tensor,
    bits: cute.Tensor,
    firsts: cute.Tensor,
    cursors: cute.Tensor,
    begins: cute.Tensor,
    keys: cute.Tensor,
    unordered: cute.Tensor,
    again: cute.Tensor,
    row_of_key: cute.Tensor,
    unit_groups: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists, the copy of kv, and of each part of the groups the places, the
    backward and the sums, on `stream`.

    Args:
        As for `launch_fused`, and
        slots: (rows, ROW_WORDS) int32, scratch: see `quads.py`.
        bits, ...: see `Places`; bits and cursors are 0. unit_groups: see `launch_split`.
        num_sms: streaming multiprocessors.
    """
    lists = Lists(rows, members, counts, present, named)
    prepare((do, out, delta), (indices, topk_length), (kv, copy), lists, None, plan, stream)
    places = Places(bits, firsts, cursors, begins, keys, unordered, again, row_of_key)
    work = Work((q, copy, do), lse, delta, lists, dq, slots, heads, sm_scale)
    launch_parts(work, places, dkv, unit_groups, (num_ctas, num_sms), None, plan, stream)


@cute.jit
def launch_fused_slots_or_choose(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    num_ctas: Int32,
    num_sms: Int32,
    slots: cute.Tensor,
    bits: cute.Tensor,
    firsts: cute.Tensor,
    cursors: cute.Tensor,
    begins: cute.Tensor,
    keys: cute.Tensor,
    unordered: cute.Tensor,
    again: cute.Tensor,
    row_of_key: cute.Tensor,
    unit_groups: Int32,
    more_rows: cute.Tensor,
    more_members: cute.Tensor,
    more_counts: cute.Tensor,
    more_present: cute.Tensor,
    more_named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    most_keys: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """As `launch_fused_slots`, if groups of plan.more queries have too little in common.

    Args:
        As for `launch_fused_slots`, and for `launch_fused_or_choose`.
    """
    lists = Lists(rows, members, counts, present, named)
    first = Lists(more_rows, more_members, more_counts, more_present, more_named)
    of_slots, more = (indices, topk_length), (first, choice, (ratio, most_keys))
    prepare((do, out, delta), of_slots, (kv, copy), lists, more, plan, stream)
    places = Places(bits, firsts, cursors, begins, keys, unordered, again, row_of_key)
    work = Work((q, copy, do), lse, delta, lists, dq, slots, heads, sm_scale)
    launch_parts(work, places, dkv, unit_groups, (num_ctas, num_sms), choice, plan, stream)


@cute.jit
def launch_parts(
    work: Work,
    places: Places,
    dkv: cute.Tensor,
    unit_groups: Int32,
    on_device: tuple[Int32, Int32],
    choice: Any,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Of each part of the groups the places, the backward and the sums.

    Args:
        on_device: num_ctas and num_sms.
    """
    num_ctas, num_sms = on_device
    blocks = cutlass.max(work.heads // BLOCK_ROWS, Int32(1))
    room = Int32(work.dkv.shape[0]) // blocks
    launch_split(work.lists, places, room, unit_groups, choice, stream)
    for number in cutlass.range(places.cursors.shape[0], unroll=1):
        launch_places(work.lists, places, number, num_sms, stream)
        fused_kernel(*work, Int32(0), None, places, number, plan).launch(
            grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )
        launch_sums(dkv, work.dkv, places, number, blocks, num_sms, stream)
