"""The backward of the index scores on Hopper: groups of neighbouring queries over common keys.

load                | multiply, two warpgroups
------------------- | --------------------------------------------------------------
Q of a group        |
keys of tile 0      |
keys of tile 1      | q k of tile 0, A = g w [q k > 0] to shared memory
...                 | dK of tile 0, q k of tile 1, dQ += A K of tile 0
                    | dK of tile 0 is added while the others run; A of tile 1

Then dQ and dW of queries whose group names a key that is not finite are computed alone. The
products are of a group's keys with all its queries, with A = 0 and g = 0 for those that do not
name a key: 0 times NaN, or times infinity, is NaN. It reaches dW of every head of the group, so
that dW says which queries to compute again: those whose own keys are not finite get the same again.
A warp looks at a query, and computes it if need be, in fp32. A lane has DIMS dims.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.gmem import store2
from flashdsa.dsl.grids import follow_grid, launch_ctas, launch_plan, place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.registers import take_registers
from flashdsa.dsl.warp import neighbours_sum, warpgroup_idx
from flashdsa.hw import BULK_ALIGNMENT, SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND, is_taken, launch_choice
from flashdsa.kernels.attention.ordered_sum import launch_ordered_sum
from flashdsa.kernels.attention.union_slots import slots_of
from flashdsa.kernels.indexer_training.sm90.bwd import load, multiply
from flashdsa.kernels.indexer_training.sm90.bwd import plan as sizes
from flashdsa.kernels.indexer_training.sm90.bwd.lists import launch_counts, launch_lists
from flashdsa.kernels.indexer_training.sm90.bwd.parts import Parts, choose_parts, launch_sum
from flashdsa.problem import INDEX_HEAD_DIM

THREADS = 128
WARPS = THREADS // WARP_SIZE
DIMS = INDEX_HEAD_DIM // WARP_SIZE
INFINITY = float("inf")


class Backward(NamedTuple):
    """Inputs and outputs of a backward: dq and dw are written again where a query was reached."""

    q: cute.Tensor  # (S, H, 128) bf16
    k: cute.Tensor  # (S_kv, 128) bf16
    weights: cute.Tensor  # (S, H) fp32
    indices: cute.Tensor  # (S, topk) int32
    grad_scores: cute.Tensor  # (S, topk) fp32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    dq: cute.Tensor  # (S, H, 128) bf16
    dw: cute.Tensor  # (S, H) fp32


@cute.jit
def load_dims(rows: cute.Tensor, row: Int32, lane: Int32) -> Any:
    """This lane's dims of a row of bf16, in fp32."""
    at = rows.iterator + (Int64(row) * INDEX_HEAD_DIM + lane * DIMS)
    words = prims.load_ext(at.to_llvm_ptr(), dtype=Int32, count=DIMS // 2)
    return words.bitcast(BFloat16).to(Float32)


@cute.jit
def was_reached(dw: cute.Tensor, query: Int32, lane: Int32) -> Boolean:
    """Whether dW (S, H) of the query is not finite."""
    reached = Int32(0)
    for head in cutlass.range(lane, dw.shape[1], WARP_SIZE, unroll=1):
        value = dw[query, head]
        if not (value < INFINITY and value > -INFINITY):
            reached = Int32(1)
    return cute.arch.vote_any_sync(reached != 0)


@cute.kernel
def mend_kernel(x: Backward):
    """WARPS queries."""
    thread, block, _ = place_in_grid()
    follow_grid()
    lane = thread % WARP_SIZE
    query = block * WARPS + thread // WARP_SIZE
    if query < x.dw.shape[0]:
        if was_reached(x.dw, query, lane):
            cute.arch.sync_warp()  # lane 0 writes what all lanes have read; a vote orders nothing
            for head in cutlass.range(x.dw.shape[1], unroll=1):
                write_head(x, query, head, lane)


@cute.jit
def write_head(x: Backward, query: Int32, head: Int32, lane: Int32) -> None:
    """Write dQ and dW of a head from the query's own slots that have a gradient."""
    row = query * x.dw.shape[1] + head
    own, weight = load_dims(x.q, row, lane), x.weights[query, head]
    acc = cute.make_rmem_tensor(DIMS, Float32)
    acc.fill(0.0)
    total = Float32(0.0)
    for slot in cutlass.range(slots_of(x.indices, x.topk_length, query), unroll=1):
        key, gradient = x.indices[query, slot], x.grad_scores[query, slot]
        if key >= 0 and key < x.k.shape[0] and gradient != 0.0:
            dims = load_dims(x.k, key, lane)
            product = Float32(0.0)
            for i in cutlass.range_constexpr(DIMS):
                product += own[i] * dims[i]
            product = neighbours_sum(product, WARP_SIZE)
            # The gate is shut at 0, and for NaN: as in `gate`.
            gated = gradient if product > 0.0 else Float32(0.0)
            total += gated * product
            for i in cutlass.range_constexpr(DIMS):
                acc[i] = acc[i] + gated * weight * dims[i]
    values = Vector.from_elements([acc[i] for i in range(DIMS)], Float32).to(BFloat16)
    words = values.bitcast(Int32)
    store2(x.dq.iterator + (Int64(row) * INDEX_HEAD_DIM + lane * DIMS), words[0], words[1])
    if lane == 0:
        x.dw[query, head] = total


@cute.jit
def launch_mend(x: Backward, stream: Any):
    """Launch on `stream`, after the backward."""
    launch_ctas(mend_kernel(x), (x.dw.shape[0] + WARPS - 1) // WARPS, THREADS, stream, use_pdl=True)


@cute.kernel
def indexer_bwd_kernel(
    q: cute.Tensor, k: cute.Tensor, weights: cute.Tensor, lists: load.Lists, dq: cute.Tensor,
    dk: cute.Tensor, dw: cute.Tensor, choice: cute.Tensor, number: Int32, spread: Int32,
    parts: Parts, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA; arguments as in `launch_backward`."""
    memory = Memory.begin(plan)
    follow_grid()
    group = warpgroup_idx()
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        take_registers(plan, "load")
        load.load_all(load.Loader(locate(memory, lists, choice, number, spread, parts), q, k))
    else:
        take_registers(plan, "multiply")
        ctx = locate(memory, lists, choice, number, spread, parts)
        multiply.multiply_all(multiply.Multiplier(ctx, group - 1, weights, dq, dk, dw, parts))


@cute.jit
def locate(
    memory: Memory,
    lists: load.Lists,
    choice: cute.Tensor,
    number: Int32,
    spread: Int32,
    parts: Parts,
) -> load.Context:
    """This thread's context."""
    thread, cta, num_ctas = place_in_grid()
    num_items = count_items(lists, parts)
    if not is_taken(choice, number):
        num_items = Int32(0)
    whole, count, *_ = parts
    thread = thread % WARPGROUP_SIZE
    return load.Context(memory, lists, cta, num_ctas, num_items, whole, count, spread, thread)


def count_items(lists: load.Lists, parts: Parts) -> Any:
    """Count work items: groups that are not in parts, and the parts of the others."""
    return parts.whole + (Int32(lists.counts.shape[0]) - parts.whole) * parts.count


@cute.jit
def matrix(scratch: cute.Tensor, first: Int32, dtype: cutlass.Constexpr, shape: Any) -> cute.Tensor:
    """Words of the scratch from `first` on, a multiple of 4, as a matrix without gaps."""
    words = cute.recast_ptr((scratch.iterator + first).align(BULK_ALIGNMENT), dtype=dtype)
    return cute.make_tensor(words, cute.make_layout(shape, stride=(shape[1], 1)))


@cute.jit
def lists_in(
    scratch: cute.Tensor, num_queries: Int32, topk: Int32, plan: cutlass.Constexpr
) -> load.Lists:
    """Return the lists of the plan's groups, which follow the choice and its samples."""
    groups = (num_queries + (plan.queries - 1)) // plan.queries
    capacity, lines = plan.capacity(topk), groups * plan.queries
    rows = Int32(sizes.CHOICE_WORDS + 2 * sizes.MOST_SAMPLES)
    gradients = rows + groups * capacity
    counts = gradients + lines * capacity
    of_group = cute.make_layout((groups,))
    return load.Lists(
        matrix(scratch, rows, Int32, (groups, capacity)),
        matrix(scratch, gradients, Float32, (lines, capacity)),
        cute.make_tensor(scratch.iterator + counts, of_group),
        cute.make_tensor(scratch.iterator + (counts + groups), of_group),
    )


@cute.jit
def parts_in(
    scratch: cute.Tensor, num_queries: Int32, topk: Int32, most_ctas: Int32, plan: cutlass.Constexpr
) -> Parts:
    """Choose the parts of the plan's groups; their rows follow the lists in the scratch."""
    groups = (num_queries + (plan.queries - 1)) // plan.queries
    whole, count = groups, Int32(1)
    if cutlass.const_expr(not plan.ordered):
        whole, count = choose_parts(groups, most_ctas, plan.capacity(topk))
    rows, first = (groups - whole) * count * plan.rows, plan.parts_at(groups, topk)
    dw = scratch.iterator + (first + rows * INDEX_HEAD_DIM)
    return Parts(
        whole,
        count,
        matrix(scratch, first, Float32, (rows, INDEX_HEAD_DIM)),
        cute.make_tensor(cute.recast_ptr(dw, dtype=Float32), cute.make_layout((rows,))),
    )


@cute.jit
def lines_of(x: cute.Tensor) -> cute.Tensor:
    """(S, H, 128) as (S * H, 128)."""
    rows = x.shape[0] * x.shape[1]
    return cute.make_tensor(
        x.iterator, cute.make_layout((rows, INDEX_HEAD_DIM), stride=(INDEX_HEAD_DIM, 1))
    )


@cute.jit
def flat(x: cute.Tensor) -> cute.Tensor:
    """(S, H) as (S * H,)."""
    return cute.make_tensor(x.iterator, cute.make_layout((x.shape[0] * x.shape[1],)))


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: cute.Tensor  # (S, H, 128) bf16
    k: cute.Tensor  # (S_kv, 128) bf16
    weights: cute.Tensor  # (S, H) fp32
    indices: cute.Tensor  # (S, topk) int32
    grad_scores: cute.Tensor  # (S, topk) fp32, read where a slot is valid
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    scratch: cute.Tensor  # (words,) int32, plan.scratch_words of them at least, written
    dq: cute.Tensor  # (S, H, 128) bf16, written
    # (S_kv, 128) fp32, added to; ordered: (groups * capacity, 128), written: the row of dK of each
    # entry of the lists that has a key
    dk: cute.Tensor
    dw: cute.Tensor  # (S, H) fp32, written
    spread: Int32  # see `Context`
    most_ctas: Int32  # best the number that runs at once
    clears: Int32  # 1: dk is set to 0 first; 0: it is not, nor what is written in order

    @property
    def slots(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        return self.indices, self.grad_scores, self.topk_length


@cute.jit
def launch_backward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the lists and the backward on `stream`.

    A chosen plan launches the choice, and lists and backward of both groupings: those of `plan`
    have work if its groups have enough in common, those of plan.smaller if not.

    Args:
        arguments: those of `Operands`, and ratio if plan.chosen: see `launch_choice`; 0: only
            plan.smaller is launched.
    """
    count = len(Operands._fields)
    x, ratio = Operands(*arguments[:count]), arguments[count:]
    choices = Int32(0)
    if cutlass.const_expr(plan.chosen):
        choices = Int32(ratio[0] > 0.0)
    choice = cute.make_tensor(x.scratch.iterator, cute.make_layout((choices,)))
    if cutlass.const_expr(plan.chosen):
        if choices > 0:
            choose_groups(x, choice, *ratio, plan, stream)
            launch_groups(x, choice, Int32(FIRST), plan, stream)
    launch_groups(x, choice, Int32(SECOND), plan.smaller, stream)
    launch_mend(Backward(x.q, x.k, x.weights, *x.slots, x.dq, x.dw), stream)


@cute.jit
def choose_groups(
    x: Operands, choice: cute.Tensor, ratio: Float32, plan: cutlass.Constexpr, stream: Any
):
    """Launch the choice between both groupings, which is written."""
    groups = (Int32(x.indices.shape[0]) + (plan.queries - 1)) // plan.queries
    step = (groups + (sizes.MOST_SAMPLES - 1)) // sizes.MOST_SAMPLES
    samples = cute.make_layout(((groups + step - 1) // step,))
    counts, named = (
        cute.make_tensor(
            x.scratch.iterator + (sizes.CHOICE_WORDS + i * sizes.MOST_SAMPLES), samples
        )
        for i in range(2)
    )
    launch_counts(*x.slots, Int32(x.k.shape[0]), counts, named, step, plan, stream)
    launch_choice(counts, named, choice, ratio, plan.queries, stream)


@cute.jit
def launch_groups(
    x: Operands, choice: cute.Tensor, number: Int32, plan: cutlass.Constexpr, stream: Any
):
    """Launch the lists of a plan's groups, the backward, and the sum of what is in parts."""
    num_queries, topk = Int32(x.indices.shape[0]), Int32(x.indices.shape[1])
    lists = lists_in(x.scratch, num_queries, topk, plan)
    parts = parts_in(x.scratch, num_queries, topk, x.most_ctas, plan)
    q, weights, dq, dw = lines_of(x.q), flat(x.weights), lines_of(x.dq), flat(x.dw)
    of_lists = x.dk, x.clears, lists, choice, number
    launch_lists(*x.slots, Int32(x.k.shape[0]), *of_lists, plan, stream)
    num_ctas = cutlass.min(x.most_ctas, count_items(lists, parts))
    taken = choice, number
    made = indexer_bwd_kernel(q, x.k, weights, lists, dq, x.dk, dw, *taken, x.spread, parts, plan)
    launch_plan(made, plan, num_ctas, stream)
    if cutlass.const_expr(not plan.ordered):
        groups = Int32(lists.counts.shape[0])
        launch_sum(parts, groups, dq, dw, *taken, plan, stream)


def compile_indexer_bwd(plan: sizes.BwdPlan) -> Any:
    """Compile `launch_backward`."""
    keys, queries, topk, lengths, places, words = fake.symbols(6)
    q, k = fake.bf16(queries, plan.num_heads, INDEX_HEAD_DIM), fake.bf16(keys, INDEX_HEAD_DIM)
    of_heads = fake.numbers(queries, plan.num_heads)
    slots = fake.words(queries, topk), fake.numbers(queries, topk), fake.words(lengths)
    scratch = fake.fake_tensor(Int32, (words,))
    dk = fake.fake_tensor(Float32, (places if plan.ordered else keys, INDEX_HEAD_DIM))
    x = Operands(q, k, of_heads, *slots, scratch, q, dk, of_heads, Int32(0), Int32(1), Int32(1))
    ratio = [Float32(1.0)] if plan.chosen else []
    return compile_launch(SM90, launch_backward, plan, *x, *ratio)


def compile_ordered_sum(plan: Any) -> Any:
    """Compile `launch_ordered_sum`: a function (slots, order, starts, dk)."""
    del plan
    places, starts, keys = fake.symbols(3)
    slots = fake.fake_tensor(Float32, (places, INDEX_HEAD_DIM))
    dk = fake.fake_tensor(Float32, (keys, INDEX_HEAD_DIM))
    order = fake.words(places), fake.words(starts)
    return compile_launch(SM90, launch_ordered_sum, None, slots, *order, dk)
