"""The backward of sparse MLA for Blackwell: a pair of CTAs takes one item after the other, each a
query or a group of them, with four warpgroups a CTA.

load            | mma                      | softmax                  | reduce
--------------- | ------------------------ | ------------------------ | ------------------------
rows, K[0]      | Q, dO                    |                          | dO -> TMEM
K[1]            | P(0), dP(0)              |                          |
                | P(b+1)                   | P <-> peer, S            |
                | dKV part 0 = S dO + dS Q | dP <-> peer, dS          |
K[b+2]          | dQ += dS K               |                          | part 0 += to dKV
                | dP(b+1)                  |                          |
                | dKV part 1, owner part 2 |                          | part 1, part 2
next item's     | next Q, dO               | dQ -> global             | last parts
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import cta_pair, grids, registers, static
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.memory import Memory
from flashdsa.hw import SECTOR_BYTES, SM100, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention import mend, ordered_sum
from flashdsa.kernels.attention.delta import launch_delta
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm100.bwd import load, mma, products, reduce_dkv
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.bwd.softmax import DqWriter, Softmax, softmax_item, write_dq
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS, CLUSTER, PAIR_ROWS
from flashdsa.kernels.attention.union import launch_union
from flashdsa.problem import D_QK, D_V


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: Any  # (S * H, 576) bf16 with H heads of a query
    kv: Any  # (S_kv, 576) bf16
    do: Any  # (S * H, 512) bf16
    lse: Any  # (S, H) fp32
    out: Any  # (S * H, 512) bf16
    indices: Any  # (S, topk) int32
    topk_length: Any  # (S,) int32: slots of each query that may be valid
    delta: Any  # (S, H) fp32, written
    dq: Any  # as q, written
    dkv: Any  # (S_kv, 576) fp32, added to


def fake_operands(heads: int) -> Operands:
    """Operands without memory, of so many heads a query; other sizes are dynamic."""
    rows, queries, keys, topk = fake.symbols(4)
    read = fake.bf16(rows, D_QK), fake.bf16(keys, D_QK), fake.bf16(rows, D_V)
    of_rows, slots = fake.numbers(queries, heads), (fake.words(queries, topk), fake.words(queries))
    dq = fake.fake_tensor(BFloat16, (rows, D_QK), SECTOR_BYTES)
    dkv = fake.fake_tensor(Float32, (keys, D_QK))
    return Operands(*read, of_rows, fake.bf16(rows, D_V), *slots, of_rows, dq, dkv)


SOFTMAX, LOAD, REDUCE, MMA = range(4)
"""Warpgroups, in the plan's order of roles."""


class Items(NamedTuple):
    """Items that pairs of CTAs share out: queries, or groups of them."""

    indices: cute.Tensor  # (items, any) int32
    lengths: cute.Tensor  # (items,): slots of each that may be valid
    # Both are None if an item is a query. (items, any) uint8, bit i: query i of the item names the
    # slot's row. (items,) int32, bit i: query i names any row.
    members: Any
    present: Any


@cute.kernel
def backward_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    do_map: GridConstant[tensor_map.TensorMap],
    kv_map: GridConstant[tensor_map.TensorMap],
    kv_rope_map: GridConstant[tensor_map.TensorMap],
    lse: cute.Tensor,
    delta: cute.Tensor,
    items: Items,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    slots: Any,
    scale: Float32,
    plan: cutlass.Constexpr,
):
    """One CTA of a pair; arguments as in `Operands` and `launch_pairs`."""
    indices, lengths, members, present = items
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = Memory.allocate(plan)
    hold = cta_pair.enter_pair(memory, thread, warp, 1)

    # Each role computes its own coordinates: values shared by all would be live in every role, and
    # ptxas would spill them before the roles part.
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    if group == SOFTMAX:
        registers.take_registers(plan, "softmax")
        turn = load.first_turn()
        while turn.item < lengths.shape[0]:
            ctx = load.locate(lengths, indices, memory, turn)
            own_lse, own_delta = of_row(ctx, lse), of_row(ctx, delta)
            if cutlass.const_expr(plan.group > 1):
                own_delta = delta_beside(own_lse, own_delta)
            softmax_item(Softmax(ctx, scale, own_lse, own_delta))
            write_dq(DqWriter(ctx, dq))
            turn = load.next_turn(ctx)
    elif group == LOAD:
        registers.take_registers(plan, "load")
        turn = load.first_turn()
        while turn.item < lengths.shape[0]:
            ctx = load.locate(lengths, indices, memory, turn)
            maps = kv_map.get_ptr(), kv_rope_map.get_ptr()
            load.load_blocks(load.Loader(ctx, *maps, indices, members, Int32(dkv.shape[0])))
            turn = load.next_turn(ctx)
    elif group == REDUCE:
        registers.take_registers(plan, "reduce")
        turn, ring_slot = load.first_turn(), Int32(0)
        while turn.item < lengths.shape[0]:
            ctx = load.locate(lengths, indices, memory, turn)
            first_row = None
            if cutlass.const_expr(slots is not None):
                first_row = slots.iterator + Int64(ctx.item) * indices.shape[1] * plan.tile.d_qk
            reduce_dkv.store_do(ctx)
            ring_slot = reduce_dkv.reduce_item(reduce_dkv.Reducer(ctx, dkv, first_row), ring_slot)
            turn = load.next_turn(ctx)
        reduce_dkv.finish()
    else:
        registers.take_registers(plan, "mma")
        turn = load.first_turn()
        if warp % (WARPGROUP_SIZE // WARP_SIZE) == 0:
            if prims.elect_sync():
                while turn.item < lengths.shape[0]:
                    ctx = load.locate(lengths, indices, memory, turn)
                    mma.issue_item(mma.Issuer(ctx, static.Static(products.products_of(plan))))
                    turn = load.next_turn(ctx)
            cute.arch.sync_warp()
        elif warp % (WARPGROUP_SIZE // WARP_SIZE) == 1:
            if prims.elect_sync():
                while turn.item < lengths.shape[0]:
                    ctx = load.locate(lengths, indices, memory, turn)
                    mma.load_query(mma.QueryLoader(ctx, q_map.get_ptr(), do_map.get_ptr(), present))
                    turn = load.next_turn(ctx)
                mma.wait_until_read(memory, turn)
            cute.arch.sync_warp()
    cta_pair.leave_pair(plan, hold, warp, 1)


@cute.jit
def of_row(ctx: load.Context, values: cute.Tensor) -> Float32:
    """lse or delta (S, H) of this thread's row; 0 past the last query, which has no key."""
    row = Int64(ctx.item) * PAIR_ROWS + ctx.thread
    if cutlass.const_expr(ctx.plan.group > 1):
        value = Float32(0.0)
        if row < values.shape[0] * values.shape[1]:
            value = (values.iterator + row).load()
    else:
        value = (values.iterator + row).load()
    return value


@cute.jit
def delta_beside(lse: Float32, delta: Float32) -> Float32:
    """A row's delta, 0 where lse is NaN: dS of the keys that the query names is NaN by S then. dS
    of the other keys, which its group names, is 0 times delta and must be 0."""
    kept = delta
    if not lse >= -Float32.inf:
        kept = Float32(0.0)
    return kept


@cute.jit
def launch_backward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch delta, the lists of groups if any, dQ and dKV on `stream`.

    Args:
        arguments: those of `Operands`. A deterministic plan writes the same bits of dKV every
            time (docs/decisions/0012), and these follow:
            slots: (S * topk, 576) fp32, overwritten.
            order, starts: see `launch_ordered_sum`; of the valid slots, numbered as in `slots`.
        of a group of queries
            rows, members: (groups, any) int32 and uint8, written, with room for plan.group * topk,
            rounded up to plan.tile.keys. counts, present, named: (groups,) int32, written: see
            `union.Lists`.
        and of any plan at last
            scale. pairs: of CTAs, at most one an item; as many as run at once.
    """
    count = len(Operands._fields)
    x, further = Operands(*arguments[:count]), arguments[count:-2]
    scale, pairs = arguments[-2:]
    items = Items(x.indices, x.topk_length, None, None)
    if cutlass.const_expr(plan.group > 1):
        lists = Lists(*further)
        num_keys = Int32(x.kv.shape[0])
        launch_union(x.indices, x.topk_length, lists, num_keys, plan.group, stream, plan.tile.keys)
        items = Items(lists.rows, lists.counts, lists.members, lists.present)
    if cutlass.const_expr(plan.deterministic):
        slots, order, starts = further
        launch_pairs(x, items, slots, scale, pairs, plan, stream)
        ordered_sum.launch_ordered_sum(stream, slots, order, starts, x.dkv)
    else:
        launch_pairs(x, items, None, scale, pairs, plan, stream)
    if cutlass.const_expr(plan.group > 1):
        heads, lse, delta = Int32(plan.group_heads), mend.flat(x.lse), mend.flat(x.delta)
        read = x.q, x.kv, x.indices, x.topk_length, lse
        mend.launch_mend_dq(
            mend.Queries(*read, heads, scale, Int32(plan.group)), x.do, delta, x.dq, None, stream
        )


@cute.jit
def launch_pairs(
    x: Operands,
    items: Items,
    slots: Any,
    scale: Float32,
    pairs: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the kernel for delta, then pairs of CTAs that share the items out, on `stream`.
    `slots`: (S * topk, 576) fp32: row s * topk + i gets what slot i of query s adds to its key's
    dKV, if the slot is valid, and dkv gets nothing. None: dkv gets all."""
    launch_delta(x.do, x.out, x.delta, stream)
    wide, narrow = tensor_map.TensorMapSwizzle.s128b, tensor_map.TensorMapSwizzle.s64b
    make = tensor_map.create_tensor_map_tiled_from_view
    q_map = make(x.q, box_dims=(plan.group_heads, BOX_DIMS), swizzle=wide)
    do_map = make(x.do, box_dims=(plan.group_heads, BOX_DIMS), swizzle=wide)
    kv_map = make(x.kv, box_dims=(1, BOX_DIMS), swizzle=wide)
    rope_map = make(x.kv, box_dims=(1, plan.tile.own_rope_dims), swizzle=narrow)
    maps = q_map, do_map, kv_map, rope_map
    made = backward_kernel(*maps, x.lse, x.delta, items, x.dq, x.dkv, slots, scale, plan)
    ctas = cutlass.min(items.lengths.shape[0], pairs) * CLUSTER
    grids.launch_plan(made, plan, ctas, stream, cluster=CLUSTER, use_pdl=False)


def compile_backward(plan: BwdPlan) -> Any:
    """Compile `launch_backward`."""
    further = [*fake_operands(plan.group_heads)]
    if plan.deterministic:
        slots, bounds = fake.symbols(2)
        rows = fake.fake_tensor(Float32, (slots, plan.tile.d_qk))
        further += [rows, fake.words(slots), fake.words(bounds)]
    elif plan.group > 1:
        further += fake_lists(plan.group)
    return compile_launch(SM100, launch_backward, plan, *further, Float32(1.0), Int32(1))
