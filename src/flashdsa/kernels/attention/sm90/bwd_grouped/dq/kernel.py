"""dQ = dS K from the workspace: a CTA takes a slice of the dims of a group's rows at a time.

load                       | multiply (2 warpgroups)
-------------------------- | ---------------------------------------
dS and keys of tile 0      |
dS and keys of tile 1      | dQ += dS K of tile 0
dS and keys of tile 2      | dQ += dS K of tile 1, tile 0 is freed
...                        | ...
                           | dQ to device memory

Role load brings dS by bulk copies and rows of keys by cp.async.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import cp_async, fragments, grids, pipeline, ptx, registers, swizzle, tma, wgmma
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS, row_sources
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.attention.mend import Queries, flat, launch_mend_dq
from flashdsa.kernels.attention.sm90.bwd_grouped import items
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import WARPGROUPS, DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    ROW_BLOCKS,
    group_queries,
)
from flashdsa.kernels.attention.sm90.core.backward import multiply
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES

STEP_BYTES = fragments.MMA_K * ROW_BYTES
"""Bytes from 16 keys of a matrix or a chunk to the next 16."""
PRODUCTS = ROW_BLOCKS // WARPGROUPS
"""Row blocks of a warpgroup, each with its product and accumulator."""


class Load(NamedTuple):
    """Fills the stages. Signals full."""

    ctx: items.Context
    workspace: cute.Tensor  # (row blocks, bytes) uint8
    kv: cute.Tensor  # (S_kv, 576) bf16


@cute.jit
def read_ids(role: Load, item: items.Item, tile: Int32) -> list[Int32]:
    """Read the rows of kv of which this thread copies parts, of a tile that may not exist."""
    ids = [Int32(0)] * TURNS
    if tile < item.tiles:
        first = tile * role.ctx.plan.tile.keys + role.ctx.thread // UNITS
        at = role.ctx.lists.row(item.group) + first
        ids = [(at + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]
    return ids


@cute.jit
def load_ds(role: Load, item: items.Item, tile: Int32, stage: Int32) -> None:
    """One thread: load dS of the row blocks; the bytes count before any thread's arrival."""
    ctx, keys = role.ctx, role.ctx.plan.tile
    full = ctx.memory.full
    full.expect_tx(ctx.plan.ds_bytes, stage)
    to = ctx.memory.stages.bytes() + stage * ctx.plan.stage_bytes
    for block in cutlass.range_constexpr(ROW_BLOCKS):
        place = item.local * ROW_BLOCKS + block
        source = items.matrix_at(keys, role.workspace, place, tile, DS_MATRIX)
        tma.load_bytes(to + block * keys.p_bytes, source, keys.p_bytes, full.at(stage))


@cute.jit
def copy_keys(
    role: Load, item: items.Item, ids: list[Int32], to: Int32, unit: Int32, dims: cutlass.Constexpr
) -> None:
    """Copy this thread's part of the item's dims of 64 rows of kv. `to`: address of the thread's 16
    bytes of its first row in the stage's first chunk."""
    plan = role.ctx.plan
    first = item.slice * plan.slice_dims
    for turn in cutlass.range_constexpr(TURNS):
        (row,) = row_sources(role.kv, [ids[turn]], unit)
        at = turn * ROWS_AT_ONCE * ROW_BYTES
        places = [
            (at + chunk * plan.tile.chunk_bytes, chunk * ROW_BYTES)
            for chunk in range(dims // CHUNK)
        ]
        cp_async.copy_units(to, row + first, ids[turn], places)


@cute.jit
def load_all(role: Load) -> None:
    """Load every tile of the CTA's items."""
    ctx = role.ctx
    ring = pipeline.RingProducer(ctx.memory.full, ctx.memory.empty)
    unit = ctx.thread % UNITS
    own = swizzle.swizzled_128(ctx.thread // UNITS, unit) + ctx.plan.ds_bytes
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        ids = read_ids(role, item, Int32(0))
        for tile in cutlass.range(item.tiles, unroll=1):
            ahead = read_ids(role, item, tile + 1)
            at = ring.state(number)
            # empty: both warpgroups have read the tile before in this stage.
            ring.acquire(at)
            if ctx.thread == 0:
                load_ds(role, item, tile, at.stage)
            stage = ctx.memory.stages.address() + at.stage * ctx.plan.stage_bytes + own
            if cutlass.const_expr(ctx.plan.last_dims == ctx.plan.slice_dims):
                copy_keys(role, item, ids, stage, unit, ctx.plan.slice_dims)
            elif item.slice == ctx.plan.slices - 1:
                copy_keys(role, item, ids, stage, unit, ctx.plan.last_dims)
            else:
                copy_keys(role, item, ids, stage, unit, ctx.plan.slice_dims)
            cp_async.arrive_when_copied(ring.full.at(at.stage))
            ids = ahead
            number += 1
        item_number += ctx.work.num_ctas


class Multiply(NamedTuple):
    """Reads the stages. Signals empty, writes dQ."""

    ctx: items.Context
    dq: cute.Tensor  # (S * H, 576) bf16
    warpgroup: Int32  # 0 or 1


@cute.jit
def issue_tile(role: Multiply, accs: Any, stage: Int32, dims: cutlass.Constexpr) -> None:
    """Issue the products of a tile as one group."""
    plan = role.ctx.plan
    base = role.ctx.memory.stages.address() + stage * plan.stage_bytes
    warpgroup.fence()
    for product in cutlass.range_constexpr(PRODUCTS):
        block = role.warpgroup * PRODUCTS + product
        multiply(
            accs[product],
            dims,
            (wgmma.along_n(base + block * plan.tile.p_bytes), STEP_BYTES),
            (wgmma.along_n(base + plan.ds_bytes), STEP_BYTES),
            transposed=True,
            clear=False,
        )
    warpgroup.commit_group()


@cute.jit
def multiply_all(role: Multiply) -> None:
    """Multiply every item of the CTA."""
    ctx, plan = role.ctx, role.ctx.plan
    accs = [cute.make_rmem_tensor(plan.slice_dims // 2, Float32) for _ in range(PRODUCTS)]
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if cutlass.const_expr(plan.last_dims == plan.slice_dims):
            number = multiply_item(role, accs, item, number, plan.slice_dims)
        elif item.slice == plan.slices - 1:
            number = multiply_item(role, accs, item, number, plan.last_dims)
        else:
            number = multiply_item(role, accs, item, number, plan.slice_dims)
        item_number += ctx.work.num_ctas


@cute.jit
def multiply_item(
    role: Multiply, accs: Any, item: items.Item, number: Int32, dims: cutlass.Constexpr
) -> Int32:
    """Multiply every tile of an item of so many dims; return the number of the CTA's tiles then."""
    ctx = role.ctx
    ring = pipeline.RingConsumer(ctx.memory.full, ctx.memory.empty)
    for product in cutlass.range_constexpr(PRODUCTS):
        accs[product].fill(0.0)
    for tile in cutlass.range(item.tiles, unroll=1):
        at = ring.state(number)
        ring.wait(at)
        # The keys have been copied by threads; the fence shows them to wgmma.
        cute.arch.fence_proxy("async.shared", space="cta")
        issue_tile(role, accs, at.stage, dims)
        warpgroup.wait_group(1)
        if tile > 0:
            pipeline.arrive_warp(ring.empty, ring.state(number - 1).stage, ctx.thread)
        number += 1
    warpgroup.wait_group(0)
    if item.tiles > 0:
        pipeline.arrive_warp(ring.empty, ring.state(number - 1).stage, ctx.thread)
    for product in cutlass.range_constexpr(PRODUCTS):
        store_product(role, accs[product], item, product, dims)
    return number


@cute.jit
def store_product(
    role: Multiply, acc: Any, item: items.Item, product: cutlass.Constexpr, dims: cutlass.Constexpr
) -> None:
    """Store dQ in bf16, 16 bytes a lane: a row's lanes exchange words until each has 8 dims."""
    ctx = role.ctx
    plan, block_of_group = ctx.plan, role.warpgroup * PRODUCTS + product
    lane = ctx.thread % WARP_SIZE
    quad = lane % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    first = Int64(item.group * ROW_BLOCKS + block_of_group) * ROWS
    first += ctx.thread // WARP_SIZE * fragments.MMA_ROWS + lane // 4
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        row = first + 8 * h
        at = role.dq.iterator + (row * plan.tile.d_qk + quad * 8)
        present = row < role.dq.shape[0]
        for block in cutlass.range_constexpr(dims // fragments.BLOCK_DIMS):
            values = [acc[16 * block + 2 * h + 4 * i + e] for i in range(4) for e in range(2)]
            words = [fragments.pack(values[2 * i], values[2 * i + 1]) for i in range(4)]
            words = fragments.transpose_quad(words, odd, upper)
            if present:
                to = at + (item.slice * plan.slice_dims + block * fragments.BLOCK_DIMS)
                ptx.run("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", to, *words)


@cute.kernel
def dq_kernel(
    workspace: cute.Tensor, lists: items.Lists, kv: cute.Tensor, dq: cute.Tensor,
    groups: items.Groups, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA; arguments as in `Operands`. `dq`: (S * H, 576)."""
    memory = Memory.begin(plan)
    grids.follow_grid()
    group = warpgroup_idx()
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        registers.take_registers(plan, "load")
        load_all(Load(items.locate(memory, *lists, groups), workspace, kv))
    else:
        registers.take_registers(plan, "multiply")
        multiply_all(Multiply(items.locate(memory, *lists, groups), dq, group - 1))


class Operands(NamedTuple):
    """Arguments of a launch, in order; see workspace.py."""

    workspace: cute.Tensor  # (row blocks, bytes) uint8: of the groups of the launch
    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32
    q: cute.Tensor  # (S, H, 576) bf16; it and what follows as far as delta: of the launch's groups
    kv: cute.Tensor  # (S_kv, 576) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32, natural, sinks in it
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    delta: cute.Tensor  # (S, H) fp32
    dq: cute.Tensor  # (S, H, 576) bf16; all rows of the launch's groups are written
    heads: Int32  # H
    sm_scale: Float32


@cute.jit
def launch_dq(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`. `arguments`: those of `Operands`, those of `Groups`, and num_ctas: at
    most the work items, plan.slices a group; best as many as run at once."""
    count = len(Operands._fields)
    x, groups = Operands(*arguments[:count]), items.Groups(*arguments[count:-1])
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    # Kernels see the heads' rows one after another.
    dq = flat(x.dq, d_qk)
    made = dq_kernel(x.workspace, items.Lists(x.ids, x.counts), x.kv, dq, groups, plan)
    grids.launch_plan(made, plan, arguments[-1], stream)
    read = flat(x.q, d_qk), x.kv, x.indices, x.topk_length, flat(x.lse)
    queries = Queries(*read, x.heads, x.sm_scale, group_queries(x.heads))
    launch_mend_dq(queries, flat(x.do, d_v), flat(x.delta), dq, groups.choice, stream)


def compile_dq(plan: DqPlan) -> Any:
    """Compile `launch_dq`."""
    blocks, block_bytes, groups, capacity, keys = fake.symbols(5)
    queries, heads, topk, lengths, choices = fake.symbols(5)
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    of_rows, number = fake.bf16(queries, heads, d_qk), fake.numbers(queries, heads)
    operands = Operands(
        fake.fake_tensor(Uint8, (blocks, block_bytes)),
        *(fake.words(groups, capacity), fake.words(groups)),
        *(of_rows, fake.bf16(keys, d_qk), fake.bf16(queries, heads, d_v), number),
        *(fake.words(queries, topk), fake.words(lengths), number, of_rows, Int32(1), Float32(1.0)),
    )
    of_groups = items.Groups(Int32(0), Int32(1), fake.words(choices), Int32(0))
    return compile_launch(SM90, launch_dq, plan, *operands, *of_groups, Int32(1))
