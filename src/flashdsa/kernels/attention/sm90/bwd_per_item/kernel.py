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
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import follow_grid, launch_plan, place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.registers import take_registers
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.hw import SM90, WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND, is_taken
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.mend import Queries, flat, launch_mend_dq
from flashdsa.kernels.attention.sm90.bwd_per_item import load, prepare, score, slot_offsets
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context
from flashdsa.kernels.attention.sm90.bwd_per_item.dkv import Dkv, dkv_all
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    MORE,
    PAIR,
    SLOTS_MAY_PAY,
    WAY,
    PerItemPlan,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_sums import Sums, launch_sums
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import launch_turns
from flashdsa.kernels.attention.sm90.core.tile import ROWS


class Work(NamedTuple):
    """Arguments of all parts of the groups, as in `Operands`."""

    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]  # q, copy of kv, do, out
    lse: cute.Tensor
    delta: cute.Tensor
    lists: Lists
    dq: cute.Tensor
    dkv: cute.Tensor  # of a plan with slots those
    heads: Int32
    sm_scale: Float32


class Launch(NamedTuple):
    """Arguments of a launch of all groups, or of a part."""

    spread: Int32  # see `Context`
    choice: Any = None  # see `choice.py`; None: the launch has work
    offsets: Any = None  # with slots `Offsets`, and the number of the part
    number: Any = None
    tickets: Any = None  # see `tickets.py`; None: the plan has none


@cute.kernel
def per_item_kernel(work: Work, launch: Launch, plan: cutlass.Constexpr):
    """One CTA."""
    q, kv, do, out = work.operands
    memory = Memory.begin(plan)
    follow_grid()
    group = warpgroup_idx()
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        take_registers(plan, "gather")
        load.gather_all(load.Gatherer(locate(memory, work, launch), kv))
    elif group == 1:
        take_registers(plan, "score")
        score.score_all(score.Scorer(locate(memory, work, launch), work.dq, work.sm_scale))
    elif group == 2:
        take_registers(plan, "high")
        ctx = locate(memory, work, launch)
        rows = load.Rows(ctx, q, do, out, work.lse, work.delta, work.sm_scale)
        score.high_all(score.High(rows, work.dq))
    else:
        take_registers(plan, "dkv")
        ctx = locate(memory, work, launch)
        slots = launch.offsets.rows if cutlass.const_expr(plan.slots) else None
        dkv_all(Dkv(ctx, work.dkv, slots))


@cute.jit
def locate(memory: Memory, work: Work, launch: Launch) -> Context:
    """This thread's context."""
    thread, cta, num_ctas = place_in_grid()
    num_items, tickets = (Int32(work.dq.shape[0]) + (ROWS - 1)) // ROWS, launch.tickets
    if not is_taken(launch.choice, Int32(SECOND)):
        num_items = Int32(0)
    if cutlass.const_expr(memory.plan.tickets):
        if tickets[WAY] != FIRST:
            num_items = Int32(0)
    row_blocks = cutlass.max(work.heads // ROWS, Int32(1))
    first = cta
    if cutlass.const_expr(memory.plan.slots):
        tickets = launch.offsets.order
        part = slot_offsets.part_of(launch.offsets, launch.number)
        first = part.begin * row_blocks + cta
        num_items = cutlass.min(num_items, part.end * row_blocks)
    of_cta = row_blocks, first, num_ctas, num_items, launch.spread, thread % WARPGROUP_SIZE
    return Context(memory, work.lists, *of_cta, tickets)


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
    """Launch the lists, the copy of kv and the backward, which makes delta, on `stream`; if there
    may be groups of more queries, the backward only if they have too little in common, else delta
    alone.

    Queries of 64 heads and more, which alone have such groups, are not taken together here.

    Args:
        arguments: those of `Operands`. Then, if the plan has no slots
            spread: see `Context`.
            num_ctas: at most the row blocks, S * H / 64; best the number that runs at once.
        and if plan.may_leave those of `More`
        and if plan.tickets
            tickets: see `order_items`, written. far: one of NEAR, FAR and SLOTS_MAY_PAY: a launch
            of the plan that is `given` them must follow.
        If it has slots
            num_ctas, and num_sms: streaming multiprocessors.
            slots: (rows, plan.slot_words) int32, scratch.
            those of `Offsets`, written. unit_groups: see `launch_split`.
            zero: 1 if all of dkv is 0.
            choice: (1,) int32: `WAY` of the tickets of a launch before, which has written lists and
            copy; the backward has work if it says SECOND. Or (0,): it has, and they are written.
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
    if cutlass.const_expr(plan.may_leave):
        of_more = rest[2:]
        more = prepare.More(Lists(*of_more[:LIST_TENSORS]), *of_more[LIST_TENSORS:])
        choice = more.choice
    of_delta = x.do, x.out, x.delta
    of_slots, keys = (x.indices, x.topk_length), (x.kv, x.copy)
    to_prepare = of_delta, x.heads, of_slots, keys, lists, (more, tickets, far)
    operands = x.q, x.copy, x.do, x.out
    if cutlass.const_expr(plan.slots):
        num_ctas, num_sms, slots = rest[:3]
        last = 3 + len(slot_offsets.Offsets._fields)
        unit_groups, zero, choice = rest[last:]
        if choice.shape[0] == 0:
            prepare.launch_prepare(*to_prepare, num_ctas, plan, stream)
        work = Work(operands, x.lse, x.delta, lists, x.dq, slots, x.heads, x.sm_scale)
        on_device, offsets = (num_ctas, num_sms), slot_offsets.Offsets(*rest[3:last])
        sizes = unit_groups, zero
        launch_parts(work, offsets, x.dkv, sizes, on_device, choice, plan, stream)
    else:
        spread, num_ctas = rest[:2]
        prepare.launch_prepare(*to_prepare, num_ctas, plan, stream)
        work = Work(operands, x.lse, x.delta, lists, x.dq, x.dkv, x.heads, x.sm_scale)
        made = per_item_kernel(work, Launch(spread, choice, tickets=tickets), plan)
        launch_plan(made, plan, num_ctas, stream)
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
def launch_parts(
    work: Work,
    offsets: slot_offsets.Offsets,
    dkv: cute.Tensor,
    of_parts: tuple[Int32, Int32],
    on_device: tuple[Int32, Int32],
    choice: cute.Tensor,
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
        made = per_item_kernel(work, Launch(Int32(0), offsets=offsets, number=number), plan)
        launch_plan(made, plan, num_ctas, stream)
        first = zero * Int32(number == 0)
        launch_sums(Sums(dkv, work.dkv, offsets, number, blocks, first), num_sms, plan, stream)


def compile_per_item(plan: PerItemPlan) -> Any:
    """Compile `launch_backward`."""
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    heads, keys, queries, topk, lengths = fake.symbols(5)
    q, do = fake.bf16(queries, heads, d_qk), fake.bf16(queries, heads, d_v)
    lse = fake.numbers(queries, heads)
    kv, dkv = fake.bf16(keys, d_qk), fake.fake_tensor(Float32, (keys, d_qk))
    slots = fake.words(queries, topk), fake.words(lengths)
    operands = q, kv, kv, do, lse, do, *slots, lse, *fake_lists(plan.queries), q, dkv, Int32(64)
    # spread and num_ctas; with slots num_ctas and num_sms.
    rest: list[Any] = [Int32(1), Int32(1), *(fake_slots(plan, keys) if plan.slots else [])]
    if plan.may_leave:
        choice, sampled, counters = (fake.words(size) for size in fake.symbols(3))
        rest += [
            *fake_lists(max(MORE)),
            choice,
            Float32(1.0),
            Int32(1),
            sampled,
            counters,
            Int32(2),
        ]
    if plan.tickets:
        rest += [fake.words(*fake.symbols(1)), Int32(1)]
    return compile_launch(SM90, launch_backward, plan, *operands, Float32(1.0), *rest)


def fake_slots(plan: PerItemPlan, keys: Any) -> list[Any]:
    """Fake tensors: slots and those of `Offsets`; then unit_groups, zero and choice."""
    groups, capacity, slots, parts, begins, room, items, choices = fake.symbols(8)
    pairs, of_keys = (fake.fake_tensor(Int32, (keys, count)) for count in (PAIR, KEY_WORDS))
    return [
        *(fake.fake_tensor(Int32, (slots, plan.slot_words)), pairs, fake.words(parts, CURSORS)),
        *(fake.words(begins), fake.words(items), of_keys, fake.words(groups)),
        *(fake.fake_tensor(Int32, (room, PAIR)), fake.words(groups, capacity)),
        *(Int32(1), Int32(1), fake.words(choices)),
    ]
