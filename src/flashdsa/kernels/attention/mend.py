"""Repair of results of queries whose group names a row that is not finite: each is computed alone.

Kernels that take neighbouring queries together multiply every row of their union with all of them,
with P = 0, or dS = 0, for those that do not name it. 0 times NaN, or times infinity, is NaN: so a
row that is not finite, named by one query, would reach its neighbours. It reaches the same columns
of all their heads. So the group's first row (query, head) whose own lse, and delta, is finite says
whether all were reached; if lse is not finite, the row's result is correct.

A warp looks at a group; where it was reached, the same warp computes its rows again, in fp32.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Vector, cute

from flashdsa.dsl import gmem, grids, warp
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention import operands, union_slots
from flashdsa.kernels.attention.choice import FIRST, is_taken
from flashdsa.kernels.attention.delta import UNIT, load_unit

THREADS = 128
WARPS = THREADS // WARP_SIZE
LOG2_E = 1.4426950408889634
INFINITY = float("inf")
LEAST = -3.0e38
"""A maximum below every logit; minus itself it is 0."""


class Queries(NamedTuple):
    """Inputs of the launch's queries."""

    q: cute.Tensor  # (S * H, d_qk) bf16
    kv: cute.Tensor  # (S_kv, d_qk) bf16
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    lse: cute.Tensor  # (S * H,) fp32; of a backward with the sinks in it
    heads: Int32  # H
    sm_scale: Float32
    group: Int32  # neighbouring queries that were taken together
    extra_kv: Any = None  # of two sources (S_extra, d_qk) bf16, whose rows follow kv's
    kv_rope: Any = None  # (S_kv, d_rope) bf16, columns that follow kv's; None: kv has all


class Backward(NamedTuple):
    """Inputs that only dQ needs."""

    do: cute.Tensor  # (S * H, d_v) bf16
    delta: cute.Tensor  # (S * H,) fp32


class Units(NamedTuple):
    """16-byte units of a row's columns: each lane has `every`, the first lanes one more."""

    every: int
    lanes: int


def units_of(tensor: cute.Tensor) -> Units:
    """Units of a tensor's rows."""
    every, rest = divmod(tensor.shape[1], UNIT * WARP_SIZE)
    return Units(every, rest // UNIT)


@cute.jit
def is_finite(value: Float32) -> Boolean:
    """Neither NaN nor infinite."""
    return (value < INFINITY) & (value > -INFINITY)


@cute.jit
def is_own(x: Queries, of_dq: Any, row: Int32) -> Boolean:
    """Whether the query's own rows, and dO, give the row (query, head) a finite result."""
    own = is_finite(x.lse[row])
    if cutlass.const_expr(of_dq is not None):
        # lse = +inf: no slot is valid, and dQ is 0.
        own = (x.lse[row] > -INFINITY) & is_finite(of_dq.delta[row])
    return own


@cute.jit
def load_row(tensor: cute.Tensor, row: Int32, lane: Int32) -> list[Any]:
    """Load this lane's columns of a row as fp32; 0 where only the first lanes have a unit."""
    every, lanes = units_of(tensor)
    values = []
    for number in cutlass.range_constexpr(every):
        unit = load_unit(tensor, row, number * WARP_SIZE + lane)
        values += [unit[i] for i in range(UNIT)]
    if cutlass.const_expr(lanes > 0):
        last = load_unit(tensor, row, every * WARP_SIZE + lane % lanes)
        for i in cutlass.range_constexpr(UNIT):
            values.append(last[i] if lane < lanes else Float32(0.0))
    return values


@cute.jit
def store_units(tensor: cute.Tensor, row: Int32, lane: Int32, values: Any) -> None:
    """Store what `load_row` loads, in bf16."""
    every, lanes = units_of(tensor)
    for number in cutlass.range_constexpr(every + (lanes > 0)):
        own = [values[UNIT * number + i] for i in range(UNIT)]
        words = Vector.from_elements(own, Float32).to(BFloat16).bitcast(Int32)
        at = Int64(row) * tensor.shape[1] + (number * WARP_SIZE + lane) * UNIT
        if number < every or lane < lanes:
            gmem.store4(tensor.iterator + at, [words[i] for i in range(4)])


def dot(left: Any, right: Any, count: int) -> Any:
    """Dot product over `count` columns of every lane, in all lanes."""
    total = Float32(0.0)
    for i in range(count):
        total += left[i] * right[i]
    return warp.neighbours_sum(total, WARP_SIZE)


@cute.jit
def first_own_row(x: Queries, of_dq: Any, first: Int32, end: Int32, lane: Int32) -> Int32:
    """The first row (query, head) of `first` to `end` - 1 whose own result is finite; else -1."""
    found = Int32(-1)
    for start in cutlass.range(first, end, WARP_SIZE, unroll=1):
        # Lanes past the last row have it, too.
        row = cutlass.min(start + lane, end - 1)
        mask = cute.arch.vote_ballot_sync(is_own(x, of_dq, row))
        if found < 0 and mask != 0:
            found = start + warp.lowest_bit(Int32(mask))
    return found


@cute.jit
def was_reached(
    x: Queries, of_dq: Any, result: cute.Tensor, first: Int32, end: Int32, lane: Int32
) -> Boolean:
    """Whether a key that is not finite reached results of rows that do not name it."""
    row = first_own_row(x, of_dq, first, end, lane)
    reached = Boolean(False)
    if row >= 0:
        sum_of_zeros = Float32(0.0)
        every, lanes = units_of(result)
        for number in cutlass.range_constexpr(every):
            unit = load_unit(result, row, number * WARP_SIZE + lane)
            for i in cutlass.range_constexpr(UNIT):
                sum_of_zeros += unit[i] * Float32(0.0)
        if cutlass.const_expr(lanes > 0):
            last = load_unit(result, row, every * WARP_SIZE + lane % lanes)
            for i in cutlass.range_constexpr(UNIT):
                sum_of_zeros += last[i] * Float32(0.0)
        finite = Int32(1) if is_finite(sum_of_zeros) else Int32(0)
        reached = cute.arch.vote_any_sync(finite == 0)
    return reached


def num_keys(x: Queries) -> Any:
    """Rows of all sources."""
    return x.kv.shape[0] if x.extra_kv is None else x.kv.shape[0] + x.extra_kv.shape[0]


@cute.jit
def source_of(x: Queries, key: Int32) -> tuple[cute.Tensor, Int32]:
    """(a key's source, its row there)."""
    if cutlass.const_expr(x.extra_kv is None):
        return x.kv, key
    first, row = x.kv.iterator, key
    if key >= x.kv.shape[0]:
        first, row = x.extra_kv.iterator, key - x.kv.shape[0]
    return cute.make_tensor(first, x.kv.layout), row


@cute.jit
def write_out(
    x: Queries, attn_sink: cute.Tensor, out: cute.Tensor, row: Int32, lane: Int32
) -> None:
    """Write O of a row (query, head), by an online softmax."""
    query, head = row // x.heads, row % x.heads
    q = load_row(x.q, row, lane)
    scale = x.sm_scale * Float32(LOG2_E)
    count = units_of(out).every * UNIT
    acc = cute.make_rmem_tensor(count, Float32)
    acc.fill(0.0)
    top, total = Float32(LEAST), Float32(0.0)
    for slot in cutlass.range(union_slots.slots_of(x.indices, x.topk_length, query), unroll=1):
        key = x.indices[query, slot]
        if key >= 0 and key < num_keys(x):
            k = load_row(*source_of(x, key), lane)
            if cutlass.const_expr(x.kv_rope is not None):
                k = k + load_row(x.kv_rope, key, lane)
            logit = dot(q, k, len(k)) * scale
            if logit > top:
                factor = cute.math.exp2(top - logit)
                for i in cutlass.range_constexpr(count):
                    acc[i] = acc[i] * factor
                total = total * factor
                top = logit
            p = cute.math.exp2(logit - top)
            total += p
            for i in cutlass.range_constexpr(count):
                acc[i] = acc[i] + p * k[i]
    if attn_sink.shape[0] > 0:
        total += cute.math.exp2(attn_sink[head] * Float32(LOG2_E) - top)
    for i in cutlass.range_constexpr(count):
        # A sink of +inf takes everything.
        acc[i] = acc[i] / total if total < INFINITY else Float32(0.0)
    store_units(out, row, lane, acc)


@cute.jit
def write_dq(x: Queries, of_dq: Backward, dq: cute.Tensor, row: Int32, lane: Int32) -> None:
    """Write dQ of a row (query, head)."""
    query = row // x.heads
    q = load_row(x.q, row, lane)
    do = load_row(of_dq.do, row, lane)
    scale, log2_sum = x.sm_scale * Float32(LOG2_E), x.lse[row] * Float32(LOG2_E)
    delta = of_dq.delta[row]
    acc = cute.make_rmem_tensor(len(q), Float32)
    acc.fill(0.0)
    for slot in cutlass.range(union_slots.slots_of(x.indices, x.topk_length, query), unroll=1):
        key = x.indices[query, slot]
        if key >= 0 and key < x.kv.shape[0]:
            k = load_row(x.kv, key, lane)
            p = cute.math.exp2(dot(q, k, len(k)) * scale - log2_sum)
            ds = p * (dot(do, k, len(do)) - delta) * x.sm_scale
            for i in cutlass.range_constexpr(len(q)):
                acc[i] = acc[i] + ds * k[i]
    store_units(dq, row, lane, acc)


@cute.kernel
def mend_kernel(x: Queries, of_dq: Any, attn_sink: Any, result: cute.Tensor, choice: Any):
    """WARPS groups; arguments as in `launch_mend`."""
    grids.follow_grid()
    thread, block, _ = grids.place_in_grid()
    lane = thread % WARP_SIZE
    rows = x.group * x.heads
    first = (block * WARPS + thread // WARP_SIZE) * rows
    end = cutlass.min(first + rows, x.indices.shape[0] * x.heads)
    if is_taken(choice, Int32(FIRST)) and first < end:
        if was_reached(x, of_dq, result, first, end, lane):
            cute.arch.sync_warp()  # lanes write what others have read; a vote orders nothing
            for row in cutlass.range(first, end, unroll=1):
                if is_own(x, of_dq, row):
                    if cutlass.const_expr(of_dq is None):
                        write_out(x, attn_sink, result, row, lane)
                    else:
                        write_dq(x, of_dq, result, row, lane)


def flat(tensor: Any, columns: int | None = None) -> Any:
    """A tensor (S, H, columns) or (S, H) without gaps as (S * H, columns) or (S * H,)."""
    rows = tensor.shape[0] * tensor.shape[1]
    if columns is None:
        return cute.make_tensor(tensor.iterator, cute.make_layout((rows,), stride=(1,)))
    layout = cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.make_tensor(tensor.iterator, layout)


@cute.jit
def launch_mend_out(
    x: operands.Operands,
    group: cutlass.Constexpr,
    choice: Any,
    stream: Any,
    extra_kv: Any = None,
    kv_rope: Any = None,
):
    """Launch on `stream`, after the forward of `x`, which took `group` queries together. `choice`:
    see `launch_mend`. `extra_kv`, `kv_rope`: see `Queries`."""
    read = flat(x.q, x.q.shape[2]), x.kv, x.indices, x.topk_length, flat(x.lse)
    queries = Queries(*read, Int32(x.q.shape[1]), x.sm_scale, Int32(group), extra_kv, kv_rope)
    launch_mend(queries, None, x.attn_sink, flat(x.out, x.out.shape[2]), choice, stream)


@cute.jit
def launch_mend_dq(
    x: Any, do: cute.Tensor, delta: cute.Tensor, dq: cute.Tensor, choice: Any, stream: Any
):
    """Launch on `stream`, after the kernels that wrote dQ of queries which they took together. `x`:
    `Queries`. `do`, `delta`: see `Backward`. `dq`: (S * H, d_qk) bf16. `choice`: see `launch_mend`.
    """
    launch_mend(x, Backward(do, delta), None, dq, choice, stream)


@cute.jit
def launch_mend(
    x: Queries, of_dq: Any, attn_sink: Any, result: cute.Tensor, choice: Any, stream: Any
):
    """Launch on `stream`, after the kernel that wrote `result`. `of_dq`: of a backward `Backward`;
    None: of a forward. `attn_sink`: of a forward (H,) fp32, or (0,): none; of a backward None.
    `result`: dQ (S * H, d_qk), or O (S * H, d_v), bf16, written where a query was reached.
    `choice`: nothing is done if it does not take the groups; None: they are taken."""
    groups = (x.indices.shape[0] + x.group - 1) // x.group
    made = mend_kernel(x, of_dq, attn_sink, result, choice)
    grids.launch_ctas(made, (groups + WARPS - 1) // WARPS, THREADS, stream, use_pdl=True)
