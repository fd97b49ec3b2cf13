"""The backward of 64 rows of Q in one kernel: P and dS never leave the streaming multiprocessor.

gather         | score                | high               | dkv
-------------- | -------------------- | ------------------ | -------------------------
               |                      | Q and dO           |
keys of tile 0 |                      |                    |
               | S, dP, P, dS         |                    |
               | dQ += dS K, low      | dQ += dS K, high   | P, dS to registers
keys of tile 1 |                      |                    | products, additions to dKV
               | S, dP, P, dS         |                    | ...
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.grids import follow_grid, launch_plan
from flashdsa.dsl.memory import initialise_barriers
from flashdsa.dsl.registers import take_registers
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND, is_taken
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.lists import SAMPLED_WORDS, Lists
from flashdsa.kernels.attention.mend import Queries, flat, launch_mend_dq
from flashdsa.kernels.attention.sm90.bwd_per_item import load, prepare, score, slot_offsets
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context, PerItemMemory
from flashdsa.kernels.attention.sm90.bwd_per_item.dkv import Dkv, dkv_all
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    PAIR,
    SLOTS_MAY_PAY,
    WAY,
    PerItemPlan,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_sums import Sums, launch_sums
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import launch_turns
from flashdsa.kernels.attention.sm90.core.tile import ROWS


class Work(NamedTuple):
    """Arguments of all parts of the groups, as for `per_item_kernel`."""

    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]
    lse: cute.Tensor
    delta: cute.Tensor
    lists: Lists
    dq: cute.Tensor
    dkv: cute.Tensor
    heads: Int32
    sm_scale: Float32


@cute.kernel
def per_item_kernel(
    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    lse: cute.Tensor,
    delta: cute.Tensor,
    lists: Lists,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    choice: Any,
    offsets: Any,
    number: Any,
    tickets: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `Operands`. operands: q, the copy of kv, do, out. choice: None: it
    is taken. A plan with slots has them as dkv, and offsets and number of the part; else None.
    tickets: see `tickets.py`; None: the plan has none."""
    q, kv, do, out = operands
    thread, _, _ = cute.arch.thread_idx()
    memory = PerItemMemory.allocate(plan)
    initialise_barriers(memory, thread)
    cute.arch.sync_threads()
    follow_grid()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    of_launch = lists, heads, dq, spread, choice, offsets, number, tickets
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        take_registers(plan, "gather")
        load.gather_all(load.Gatherer(locate(memory, *of_launch), kv))
    elif group == 1:
        take_registers(plan, "score")
        ctx = locate(memory, *of_launch)
        score.score_all(score.Scorer(ctx, dq, sm_scale))
    elif group == 2:
        take_registers(plan, "high")
        ctx = locate(memory, *of_launch)
        score.high_all(score.High(load.Rows(ctx, q, do, out, lse, delta, sm_scale), dq))
    else:
        take_registers(plan, "dkv")
        ctx = locate(memory, *of_launch)
        rows = offsets.rows if cutlass.const_expr(plan.slots) else None
        dkv_all(Dkv(ctx, dkv, rows))


@cute.jit
def locate(
    memory: PerItemMemory,
    lists: Lists,
    heads: Int32,
    dq: cute.Tensor,
    spread: Int32,
    choice: Any,
    offsets: Any,
    number: Any,
    tickets: Any,
) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    num_items = (Int32(dq.shape[0]) + (ROWS - 1)) // ROWS
    if cutlass.const_expr(choice is not None):
        if not is_taken(choice, Int32(SECOND)):
            num_items = Int32(0)
    if cutlass.const_expr(memory.plan.tickets):
        if tickets[WAY] != FIRST:
            num_items = Int32(0)
    row_blocks = cutlass.max(heads // ROWS, Int32(1))
    first = cta
    if cutlass.const_expr(memory.plan.slots):
        tickets = offsets.order
        part = slot_offsets.part_of(offsets, number)
        first = part.begin * row_blocks + cta
        num_items = cutlass.min(num_items, part.end * row_blocks)
    own = thread % WARPGROUP_SIZE
    return Context(memory, lists, row_blocks, first, num_ctas, num_items, spread, own, tickets)


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: cute.Tensor  # (S, H, 576) bf16
    kv: cute.Tensor  # (S_kv, 576) bf16
    copy: cute.Tensor  # (S_kv, 576) bf16, written: kv in the order of `prepare.py`
    do: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32, natural, sinks in it
    out: cute.Tensor  # (S, H, 512) bf16
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    delta: cute.Tensor  # (S, H) fp32, written
    lists: Lists  # five tensors, of groups of plan.queries queries, written
    dq: cute.Tensor  # (S, H, 576) bf16, written
    dkv: cute.Tensor  # (S_kv, 576) fp32, added to
    heads: Int32  # H, one of HEADS; plan.queries * H is 64, or 128
    sm_scale: Float32


LIST_TENSORS = len(Lists._fields)


@cute.jit
def launch_backward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the lists, the copy of kv and the backward, which makes delta, on `stream`; if
    plan.more is not 0, the backward only if groups of plan.more queries have too little in common,
    else delta alone.

    Queries of 64 heads and more, which alone have such groups, are not taken together here.

    Args:
        arguments: those of `Operands`. Then, if the plan has no slots
            spread: see `Context`.
            num_ctas: at most the row blocks, S * H / 64; best the number that runs at once.
        and if plan.more is not 0
            five tensors: the lists of groups of plan.more queries, written.
            choice: (1,) int32, written: FIRST where they are taken.
            ratio, most_keys: see `launch_choice`.
            sampled: (3,) int32, written, see `launch_sample`; counters: (4,) int32, 0 before the
            launch and after it.
        and if plan.tickets
            tickets: see `order_items`, written. far: one of NEAR, FAR and SLOTS_MAY_PAY: a launch
            of the plan that is `given` them must follow.
        If it has slots
            num_ctas, and num_sms: streaming multiprocessors.
            slots: (rows, plan.slot_words) int32, scratch.
            those of `Offsets`, written. unit_groups: see `launch_split`.
            zero: 1 if all of dkv is 0.
        and if plan.given, when lists and copy are not written
            choice: (1,) int32: `WAY` of the tickets of a launch before.
    """
    front = Operands._fields.index("lists")
    behind = front + LIST_TENSORS
    end = len(Operands._fields) + LIST_TENSORS - 1
    lists = Lists(*arguments[front:behind])
    fields: tuple[Any, ...] = (*arguments[:front], lists, *arguments[behind:end])
    given = Operands(*fields)
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    # Kernels see the heads' rows one after another.
    x = given._replace(
        q=flat(given.q, d_qk),
        do=flat(given.do, d_v),
        lse=flat(given.lse),
        out=flat(given.out, d_v),
        delta=flat(given.delta),
        dq=flat(given.dq, d_qk),
    )
    rest = arguments[end:]
    more, choice, tickets, far = None, None, None, None
    if cutlass.const_expr(plan.tickets):
        rest, (tickets, far) = rest[:-2], rest[-2:]
    if cutlass.const_expr(plan.more > 0):
        of_more = rest[-LIST_TENSORS - 5 :]
        choice = of_more[LIST_TENSORS]
        more = Lists(*of_more[:LIST_TENSORS]), choice, of_more[LIST_TENSORS + 1 :]
    of_delta = x.do, x.out, x.delta
    of_slots, keys = (x.indices, x.topk_length), (x.kv, x.copy)
    if cutlass.const_expr(plan.given):
        choice = rest[-1]
    else:
        of_tickets = (more, tickets, far), rest[0 if plan.slots else 1]
        prepare.launch_prepare(of_delta, x.heads, of_slots, keys, lists, *of_tickets, plan, stream)
    operands = x.q, x.copy, x.do, x.out
    if cutlass.const_expr(plan.slots):
        num_ctas, num_sms, slots = rest[:3]
        last = 3 + len(slot_offsets.Offsets._fields)
        work = Work(operands, x.lse, x.delta, lists, x.dq, slots, x.heads, x.sm_scale)
        on_device, offsets = (num_ctas, num_sms), slot_offsets.Offsets(*rest[3:last])
        sizes = rest[last], rest[last + 1]
        launch_parts(work, offsets, x.dkv, sizes, on_device, choice, plan, stream)
    else:
        spread, num_ctas = rest[:2]
        work = Work(operands, x.lse, x.delta, lists, x.dq, x.dkv, x.heads, x.sm_scale)
        launch_part(work, spread, choice, None, None, tickets, num_ctas, plan, stream)
    if cutlass.const_expr(plan.queries > 1):
        read = x.q, x.kv, x.indices, x.topk_length, x.lse
        queries = Queries(*read, x.heads, x.sm_scale, Int32(plan.queries))
        # Slots that the device may choose write dQ, too: their launch mends it.
        mends = Boolean(True)
        if cutlass.const_expr(plan.tickets):
            mends = Boolean(far != SLOTS_MAY_PAY)
        if mends:
            launch_mend_dq(queries, x.do, x.delta, x.dq, None, stream)


@cute.jit
def launch_part(
    work: Work,
    spread: Int32,
    choice: Any,
    offsets: Any,
    number: Any,
    tickets: Any,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the backward of all groups, or of a part; arguments as for `per_item_kernel`."""
    made = per_item_kernel(*work, spread, choice, offsets, number, tickets, plan)
    launch_plan(made, plan, num_ctas, stream)


@cute.jit
def launch_parts(
    work: Work,
    offsets: slot_offsets.Offsets,
    dkv: cute.Tensor,
    of_parts: tuple[Int32, Int32],
    on_device: tuple[Int32, Int32],
    choice: Any,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the parts and their order, then each part's rows, its backward and its sums.
    `of_parts`: unit_groups, and whether all of dkv is 0. `on_device`: num_ctas and num_sms."""
    (unit_groups, zero), (num_ctas, num_sms) = of_parts, on_device
    blocks = cutlass.max(work.heads // ROWS, Int32(1))
    room = Int32(work.dkv.shape[0]) // blocks
    slot_offsets.launch_split(work.lists, offsets, room, unit_groups, num_sms, choice, stream)
    launch_turns(work.lists, offsets, blocks, num_ctas, plan.tile.keys, stream)
    for number in cutlass.range(offsets.cursors.shape[0], unroll=1):
        slot_offsets.launch_offsets(work.lists, offsets, number, num_sms, stream)
        launch_part(work, Int32(0), None, offsets, number, None, num_ctas, plan, stream)
        first = zero * Int32(number == 0)
        launch_sums(Sums(dkv, work.dkv, offsets, number, blocks, first), num_sms, plan, stream)


def compile_per_item(plan: PerItemPlan) -> Any:
    """Compile `launch_backward`."""
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    heads, keys, queries, topk, lengths = (cute.sym_int32() for _ in range(5))
    rows = queries, heads
    slots = fake_slots(plan, keys) if plan.slots else []
    more = []
    if plan.more:
        more = [*fake_lists(plan.more), fake_tensor(Int32, (1,), 4), Float32(1.0), Int32(1)]
        more += [fake_tensor(Int32, (size,), 4) for size in (SAMPLED_WORDS, cute.sym_int32())]
    tickets = [fake_tensor(Int32, (cute.sym_int32(),), 4), Int32(1)] if plan.tickets else []
    return compile_launch(
        SM90,
        launch_backward,
        plan,
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (keys, d_qk)),
        fake_tensor(BFloat16, (keys, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Float32, rows, 4),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Float32, rows, 4),
        *fake_lists(plan.queries),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(Float32, (keys, d_qk)),
        Int32(64),
        Float32(1.0),
        # spread and num_ctas; with slots num_ctas and num_sms.
        Int32(1),
        Int32(1),
        *slots,
        *more,
        *tickets,
        *([fake_tensor(Int32, (1,), 4)] if plan.given else []),
    )


def fake_slots(plan: PerItemPlan, keys: Any) -> list[Any]:
    """Fake tensors: slots and those of `Offsets`; then unit_groups, and zero."""
    groups, capacity, slots, parts, begins, room, items = (cute.sym_int32() for _ in range(7))
    return [
        fake_tensor(Int32, (slots, plan.slot_words)),
        fake_tensor(Int32, (keys, PAIR)),
        fake_tensor(Int32, (parts, CURSORS), 4),
        fake_tensor(Int32, (begins,), 4),
        fake_tensor(Int32, (items,), 4),
        fake_tensor(Int32, (keys, KEY_WORDS)),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(Int32, (room, PAIR)),
        fake_tensor(Int32, (groups, capacity), 4),
        Int32(1),
        Int32(1),
    ]
