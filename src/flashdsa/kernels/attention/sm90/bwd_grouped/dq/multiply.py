"""Role multiply: dQ += dS K, each warpgroup for its row blocks, and dQ to device memory."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import BLOCK_DIMS, MMA_K, MMA_ROWS, THREAD_ROWS, pack, transpose_quad
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.wgmma import along_n
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.load import HALVED_DIMS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGE_BYTES
from flashdsa.kernels.attention.sm90.core.backward import multiply
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, CHUNK_BYTES, D_QK, ROWS

STEP_BYTES = MMA_K * CHUNK * BF16
"""Bytes from 16 keys of an image or a chunk to the next 16."""
PRODUCTS = 2
"""Products of a warpgroup, each with its accumulator."""


class Multiply(NamedTuple):
    """Reads the stages. Signals empty, writes dQ."""

    ctx: Context
    dq: cute.Tensor  # (S * H, 576) bf16
    warpgroup: Int32  # 0 or 1


def operands(role: Multiply, product: int) -> tuple[Any, int]:
    """Operands of a product: the image's number in the stage and the first chunk of the keys."""
    if role.ctx.plan.row_blocks == 4:
        return role.warpgroup * PRODUCTS + product, 0
    return role.warpgroup, 3 * product


@cute.jit
def issue_tile(role: Multiply, accs: Any, stage: Int32) -> None:
    """Issue both products of a tile as one group."""
    plan = role.ctx.plan
    base = role.ctx.stage(stage)
    warpgroup.fence()
    for product in cutlass.range_constexpr(PRODUCTS):
        image, chunk = operands(role, product)
        a = along_n(base + image * IMAGE_BYTES)
        b = along_n(base + (plan.images_bytes + chunk * CHUNK_BYTES))
        multiply(
            accs[product],
            plan.columns[product],
            (a, STEP_BYTES),
            (b, STEP_BYTES),
            transposed=True,
            clear=False,
        )
    warpgroup.commit_group()


@cute.jit
def multiply_all(role: Multiply) -> None:
    """Multiply every tile of the CTA's items."""
    ctx = role.ctx
    ring = ctx.arena.consumer("full", "empty")
    accs = [cute.make_rmem_tensor(columns // 2, Float32) for columns in ctx.plan.columns]
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        for product in cutlass.range_constexpr(PRODUCTS):
            accs[product].fill(0.0)
        for tile in cutlass.range(item.tiles, unroll=1):
            at = ring.state(number)
            ring.wait(at)
            # The keys have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
            issue_tile(role, accs, at.stage)
            warpgroup.wait_group(1)
            if tile > 0:
                arrive_warp(ring.empty, ring.state(number - 1).stage, ctx.thread)
            number += 1
        warpgroup.wait_group(0)
        if item.tiles > 0:
            arrive_warp(ring.empty, ring.state(number - 1).stage, ctx.thread)
        for product in cutlass.range_constexpr(PRODUCTS):
            store_product(role, accs[product], item, product)
        item_number += ctx.work.num_ctas


def first_dim(role: Multiply, item: Item, product: int, block: int) -> Any:
    """First dim of a block of 32 columns of a product."""
    if role.ctx.plan.row_blocks == 4:
        return item.slice * role.ctx.plan.slice_dims + block * BLOCK_DIMS
    if product == 0 and block == 4:
        return HALVED_DIMS + item.slice * (CHUNK // 2)
    return item.slice * (HALVED_DIMS + CHUNK) + product * 2 * CHUNK + block * BLOCK_DIMS


@cute.jit
def store_product(role: Multiply, acc: Any, item: Item, product: cutlass.Constexpr) -> None:
    """Store dQ in bf16, 16 bytes a lane: the four lanes of a row exchange words until each has 8
    dims."""
    ctx = role.ctx
    image, _ = operands(role, product)
    lane = ctx.thread % WARP_SIZE
    quad = lane % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    first = Int64(item.group * ctx.plan.row_blocks + image) * ROWS
    first += ctx.thread // WARP_SIZE * MMA_ROWS + lane // 4
    for h in cutlass.range_constexpr(THREAD_ROWS):
        row = first + 8 * h
        at = role.dq.iterator + (row * D_QK + quad * 8)
        present = row < role.dq.shape[0]
        for block in cutlass.range_constexpr(ctx.plan.columns[product] // BLOCK_DIMS):
            values = [acc[16 * block + 2 * h + 4 * i + e] for i in range(4) for e in range(2)]
            words = [pack(values[2 * i], values[2 * i + 1]) for i in range(4)]
            words = transpose_quad(words, odd, upper)
            if present:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[at + first_dim(role, item, product, block), *words],
                )
