"""The forward of sparse MLA for Hopper: a CTA takes 64 rows of Q, a work item, at a time.

Steps of two tiles of 64 keys; halves of the tiles are freed, and filled again, once they are read.

gather                | consumer0                   | consumer1
--------------------- | --------------------------- | ---------------------------------------
Q, both tiles         | S0 = Q K0^T                 |
                      | P0 = exp2(S0) -> shared     | S1 = Q K1^T
                      | O += P0 V0, low dims        | O += P0 V0, high dims, meanwhile
tile 0 low, high      |                             |     P1 = exp2(S1) -> shared
                      | O += P1 V1, low dims        | O += P1 V1, high dims
tile 1 high, low      |     then the next step's S0 |
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, GridConstant, Int32, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import compile_options, grids, registers, warp
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.memory import Memory
from flashdsa.hw import SM90
from flashdsa.kernels.attention import fake_operands, mend, union
from flashdsa.kernels.attention.choice import FIRST, SECOND, Times, is_taken, launch_sample
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.operands import split, split_more
from flashdsa.kernels.attention.sm90.core import gather, softmax, tile
from flashdsa.kernels.attention.sm90.core.sources import sources_of
from flashdsa.kernels.attention.sm90.fwd import consumers, context
from flashdsa.kernels.attention.sm90.fwd.draws import COUNTS, Draws
from flashdsa.kernels.attention.sm90.fwd.gather import Gatherer, gather_all
from flashdsa.kernels.attention.sm90.fwd.plan import ITEM_US, STEP_US, UNION_BIT_US, FwdPlan
from flashdsa.kernels.attention.sm90.join import JoinedIds, launch_join

GATHER, CONSUMER0, CONSUMER1 = range(3)
"""Warpgroups, in the plan's order of roles."""
RATIOS = {2: 1.7, 4: 3.3, 8: 6.0}
"""Longest union of a group, as a multiple of a query's list, with which groups are taken, if making
the union took no time."""


class Inputs(NamedTuple):
    """Rows of keys, and which of them each item names."""

    kv: cute.Tensor
    slots: cute.Tensor  # indices; of groups rows of their lists
    num_slots: cute.Tensor  # topk_length, or counts of the lists
    members: Any  # of the lists; None: no group
    sources: Any = None  # of a joined plan `Sources`


class Results(NamedTuple):
    """Results; see `Operands`."""

    out: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor


@cute.kernel
def forward_kernel(
    q_map: GridConstant[tensor_map.TensorMap], inputs: Inputs, attn_sink: cute.Tensor,
    results: Results, sm_scale: Float32, draws: Any, more: Any, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA; arguments as in `launch_forward`. `draws`: of items that are drawn `Draws`; else
    None. `more`: of a joined plan `MoreOperands`; else None."""
    memory = Memory.begin(plan)
    if cutlass.const_expr(plan.drawn or plan.group > 1):
        grids.follow_grid()
    if cutlass.const_expr(plan.joined):
        inputs = inputs._replace(sources=sources_of(inputs[:3], more))
    rest = results, (attn_sink, sm_scale), draws
    if cutlass.const_expr(plan.drawn):
        if is_taken(draws.choice, Int32(grouping_of(plan))):
            run_roles(memory, q_map.get_ptr(), inputs, *rest)
    else:
        run_roles(memory, q_map.get_ptr(), inputs, *rest)


def grouping_of(plan: FwdPlan) -> int:
    """The plan's number in a choice: groups of queries are the first grouping."""
    return FIRST if plan.group > 1 else SECOND


def longest_union(group: int, num_keys: Int32, topk: Int32) -> Any:
    """Multiple of a query's list up to which a group's union saves more than it costs."""
    steps = (topk + tile.Tile().step_keys - 1) // tile.Tile().step_keys
    of_query = Float32(steps) * STEP_US + ITEM_US
    return Float32(RATIOS[group]) - union_time(group, num_keys) / of_query


def union_time(group: int, num_keys: Int32) -> Any:
    """Microseconds of passing over a group's bits of all rows."""
    return Float32(num_keys) * (group * UNION_BIT_US)


def least_saved(group: int, num_keys: Int32) -> Any:
    """Slots whose steps take the time of passing over a group's bits of all rows."""
    return Int32(Float32(num_keys) * (group * UNION_BIT_US / STEP_US * tile.Tile().step_keys))


@cute.jit
def run_roles(
    memory: Memory, q_map: Any, inputs: Inputs, results: Results, rest: tuple[Any, Any], draws: Any
) -> None:
    """Each warpgroup takes its role. `rest`: attn_sink, sm_scale."""
    plan, (attn_sink, sm_scale) = memory.plan, rest
    group = warp.warpgroup_idx()
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == GATHER:
        registers.take_registers(plan, "gather")
        ctx = context.locate(results.lse, memory)
        gather_all(Gatherer(ctx, q_map, *inputs, draws, results.out))
    elif group == CONSUMER0:
        registers.take_registers(plan, "consumer0")
        ctx = context.locate(results.lse, memory)
        scale = softmax.make_scale(sm_scale * softmax.LOG2_E)
        consumers.consume0(consumers.Consumer(ctx, *results, attn_sink, scale))
    else:
        registers.take_registers(plan, "consumer1")
        ctx = context.locate(results.lse, memory)
        scale = softmax.make_scale(sm_scale * softmax.LOG2_E)
        consumers.consume1(consumers.Consumer(ctx, *results, attn_sink, scale))


@cute.jit
def launch_forward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the forward on `stream`; the kernels for the groups' unions come first.

    Args:
        arguments: those of `Operands`, of a group with H = plan.group_heads. Then
            max_logits: (S * H,) fp32, written, or (0,): not asked for.
            num_ctas: at most the work items, which are S * ceil(H / 64) or the groups; best
            the number that runs at once.
        of a plan that samples
            num_sms: streaming multiprocessors.
        of a joined plan those of `MoreOperands`, of a group
            rows, members: (groups, plan.group * topk) int32 and uint8, written.
            counts: (groups,) int32, written.
        of a joined one with topk slots of both lists those of `JoinedIds`,
        and where items are drawn those of `Draws`
            counters: see `Draws`.
            choice: (1,) int32, of a group written from a sample: whether the groups are taken; or
            (0,): they are, or there are none.
    """
    x, (max_logits, num_ctas, *rest) = split(arguments)
    num_sms, rest = (rest[0], rest[1:]) if plan.samples else (None, rest)
    draws: Any = Draws(*rest[-len(Draws._fields) :]) if cutlass.const_expr(plan.drawn) else None
    choice: Any = draws.choice if cutlass.const_expr(plan.drawn) else None
    more, lists_and_draws = split_more(tuple(rest), plan.joined)
    # Operands with one list of ids for each query, and the second source.
    of_queries: Any = x
    extra_kv: Any = more.extra_kv if plan.joined else None
    if cutlass.const_expr(plan.group > 1):
        lists = Lists(*lists_and_draws[:3])
        num_keys = Int32(x.kv.shape[0])
        if cutlass.const_expr(plan.joined):
            joined = JoinedIds(*lists_and_draws[3 : 3 + len(JoinedIds._fields)])
            launch_join(sources_of((x.kv, x.indices, x.topk_length), more), joined, stream)
            num_keys += Int32(extra_kv.shape[0])
            of_queries = x._replace(indices=joined.ids, topk_length=joined.lengths)
        if cutlass.const_expr(plan.samples):
            if choice.shape[0] > 0:
                counts = draws.counters.iterator + COUNTS
                asked = of_queries.indices, of_queries.topk_length
                ratio = longest_union(plan.group, num_keys, Int32(asked[0].shape[1]))
                union_us = union_time(plan.group, num_keys)
                item_us, step_us = Float32(ITEM_US), Float32(STEP_US)
                step_slots = Float32(plan.tile.step_keys)
                times = Times(item_us, step_us, step_slots, union_us, num_sms)
                of_sample = counts, choice, ratio, plan.group, stream
                launch_sample(*asked, num_keys, *of_sample, times=times)
        grouping = FIRST if plan.drawn else SECOND
        named = of_queries.indices, of_queries.topk_length
        least = least_saved(plan.group, num_keys)
        union.launch_union(
            *named, lists, num_keys, plan.group, stream, 0, choice, grouping, least_saved=least
        )
        inputs = Inputs(x.kv, lists.rows, lists.counts, lists.members)
        rows, d_qk = x.q.shape[0] * plan.group_heads, plan.tile.d_qk
        flat = cute.make_tensor(x.q.iterator, cute.make_layout((rows, d_qk), stride=(d_qk, 1)))
        q_map = gather.map_query(flat)
    else:
        inputs = Inputs(x.kv, x.indices, x.topk_length, None)
        q_map = gather.map_query(x.q)
    results = Results(x.out, x.lse, max_logits)
    made = forward_kernel(q_map, inputs, x.attn_sink, results, x.sm_scale, draws, more, plan)
    grids.launch_plan(made, plan, num_ctas, stream, use_pdl=plan.drawn or plan.group > 1)
    if cutlass.const_expr(plan.group > 1):
        mend.launch_mend_out(of_queries, plan.group, choice, stream, extra_kv)


def compile_forward(plan: FwdPlan) -> Any:
    """Compile `launch_forward`."""
    heads = plan.group_heads if plan.group > 1 else None
    operands = fake_operands.fake_operands(heads, d_qk=plan.tile.d_qk, d_v=plan.tile.d_v)
    queries, width, counters, choice = operands.indices.shape[0], *fake.symbols(3)
    further = [fake_operands.fake_max_logits(), Int32(1), *([Int32(1)] if plan.samples else [])]
    if plan.joined:
        further += fake_operands.fake_more(operands)
    if plan.group > 1:
        further += fake_operands.fake_lists(plan.group)[:3]
        if plan.joined:
            further += JoinedIds(fake.words(queries, width), fake.words(queries), Int32(0))
    if plan.drawn:
        further += Draws(fake.words(counters), fake.words(choice))
    return compile_options.compile_launch(SM90, launch_forward, plan, *operands, *further)
