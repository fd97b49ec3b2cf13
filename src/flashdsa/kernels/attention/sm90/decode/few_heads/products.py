"""The wgmmas of a consumer: S^T = K Q^T and O^T += V^T P^T, keys or dims being the rows.

Their first operand comes from registers, where `ldmatrix` brings rows as they lie in shared memory.
A 16-bit element of a packed row is two e4m3, which become f16 in registers:
- K: a lane gets four neighbouring bytes. The first two are its elements of the first 8 columns of
  K of a product, the others those of the last 8; Q's columns lie likewise (`load_query`).
- V, transposed: a lane gets two dims of two keys, and a row of the product is every other dim.
"""

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import BF16_KIND, F16_KIND, MMA_K, THREAD_ROWS
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.wgmma import descriptor_behind, mma_async
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, FP32, ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.words import load_float
from flashdsa.problem import KV_GROUP, KV_ROPE_AT, KV_SCALES, KV_SCALES_AT

LANE_ROWS = 8
"""Rows from a lane's first row of an accumulator to its second one."""
LOAD_BYTES = 32
"""Bytes of a row that one ldmatrix reads along it."""
CHUNK_STEPS = CHUNK // MMA_K
GROUP_STEPS = KV_GROUP // MMA_K
GROUP_BLOCKS = KV_GROUP // ROWS
"""Accumulators of O^T of a group's dims, 64 each."""


def blocks_of(plan: FewHeadsPlan) -> int:
    """Accumulators of O^T: 64 dims each."""
    return plan.tile.d_v // ROWS


def load_matrices(address: Any, transposed: bool = False) -> list[Any]:
    """ldmatrix of four 8x8 matrices; the lane's address is of row lane % 8 of matrix lane // 8."""
    trans = ".trans" if transposed else ""
    return list(
        cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared::cta.b16 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def to_f16(word: Any) -> list[Any]:
    """Four e4m3 as two words of f16."""
    return list(
        cute.arch.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
            write_only_types=[Int32, Int32],
            read_only_args=[word],
        )
    )


def by_dim(word: Any) -> Any:
    """Two dims of two keys, in bytes: the first dim of both keys, then the second one."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;", write_only_types=[Int32], read_only_args=[word]
    )


def latent_keys(keys: Any, offset: int, count: int) -> list[list[Any]]:
    """The first operand of `count` products along 16 latent columns each: four words each.

    Args:
        keys: the lane's address: row lane % 16 of the warp's, byte 16 * (lane // 16).
        offset: bytes from that address.
    """
    steps = []
    for load in range(count // 2):
        words = load_matrices(keys + (offset + load * LOAD_BYTES))
        for unit in range(2):
            low, high = (to_f16(words[2 * unit + half]) for half in range(2))
            steps.append([low[0], high[0], low[1], high[1]])
    return steps


def rope_keys(keys: Any) -> list[list[Any]]:
    """Same as `latent_keys`, for the RoPE columns."""
    return [load_matrices(keys + (KV_ROPE_AT + LOAD_BYTES * i)) for i in range(CHUNK_STEPS)]


def multiply_keys(
    plan: FewHeadsPlan, q: Any, steps: list[list[Any]], first: int, kind: str
) -> list[Any]:
    """Issue S^T = K Q^T as one group; return the accumulators.

    Args:
        q: low word of Q's descriptor. steps: of K, 16 columns each. first: number of the first one.
        kind: of Q and K.
    """
    values = [Float32(0.0) for _ in range(HEADS // 2)]
    warpgroup.fence()
    for i, a in enumerate(steps):
        chunk, step = divmod(first + i, CHUNK_STEPS)
        b = descriptor_behind(q, chunk * plan.operand_bytes + step * LOAD_BYTES)
        values = _multiply(kind, values, a, b, i > 0)
    warpgroup.commit_group()
    return values


def multiply_tile(plan: FewHeadsPlan, q: Any, keys: Any, row: Any) -> list[Any]:
    """Compute a tile's S^T, with Q from shared memory.

    Args:
        q: low word of Q's descriptor. keys: the lane's address, as in `latent_keys`.
        row: the address of the lane's first key; its other one is 8 rows later.
    """
    q = opaque(q)
    row_bytes = plan.form.row_bytes
    scales_at = [row + (KV_SCALES_AT + LANE_ROWS * h * row_bytes) for h in range(THREAD_ROWS)]
    s = [Float32(0.0) for _ in range(HEADS // 2)]
    if plan.tile.has_rope:
        first = plan.tile.value_chunks * CHUNK_STEPS
        s = multiply_keys(plan, q, rope_keys(keys), first, BF16_KIND)
    before: list[Any] | None = None
    for group in range(KV_SCALES):
        first = group * GROUP_STEPS
        steps = latent_keys(keys, first * MMA_K, GROUP_STEPS)
        of_group = multiply_keys(plan, q, steps, first, F16_KIND)
        # Registers have room for two groups: keys of one, while the other is multiplied.
        if before is not None:
            warpgroup.wait_group(1)
            s = _add_scaled(s, before, group - 1, scales_at)
        before = of_group
    warpgroup.wait_group(0)
    assert before is not None
    return _add_scaled(s, before, KV_SCALES - 1, scales_at)


def _add_scaled(s: list[Any], of_group: list[Any], group: int, addresses: Any) -> list[Any]:
    scales = [load_float(address + FP32 * group) for address in addresses]
    return [
        total + value * scales[i // 2 % THREAD_ROWS]
        for i, (total, value) in enumerate(zip(s, of_group, strict=True))
    ]


def values_of_block(pieces: list[Any], block: int) -> list[list[Any]]:
    """The first operand of a block's products, transposed: four words for each 16 keys.

    Args:
        pieces: the lane's address in each piece of the tile: row `lane`, the warp's 16 dims.
    """
    steps = []
    for piece in pieces:
        words = load_matrices(piece + block * ROWS, True)
        for half in range(2):
            low, high = (to_f16(by_dim(words[2 * half + i])) for i in range(2))
            steps.append([*low, *high])
    return steps


def multiply_values(plan: FewHeadsPlan, out: Any, pieces: list[Any], p: Any) -> None:
    """Compute O^T += V^T P^T of a tile; all products are done when it returns.

    Args:
        out: accumulators, HEADS / 2 of each block in turn. p: low word of P's descriptor.
    """
    p = opaque(p)
    count = HEADS // 2
    for block in range(blocks_of(plan)):
        steps = values_of_block(pieces, block)
        values = [out[count * block + i] for i in range(count)]
        part = block // GROUP_BLOCKS
        warpgroup.fence()
        for i, a in enumerate(steps):
            b = descriptor_behind(p, part * plan.operand_bytes + i * LOAD_BYTES)
            values = _multiply(F16_KIND, values, a, b, True)
        warpgroup.commit_group()
        for i in range(count):
            out[count * block + i] = values[i]
        if block > 0:
            warpgroup.wait_group(1)
    warpgroup.wait_group(0)


def _multiply(kind: str, d: list[Any], a: list[Any], b: Any, accumulate: bool) -> list[Any]:
    opcode = f"wgmma.mma_async.sync.aligned.m{ROWS}n{HEADS}k{MMA_K}.f32.{kind}.{kind}"
    return mma_async(opcode, d, a, b, accumulate=accumulate, transposes=(0,))
