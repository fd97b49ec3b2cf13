"""The wgmmas of a consumer: S^T = K Q^T and O^T += V^T P^T, keys or dims being the rows.

Their first operand comes from registers, where `ldmatrix` brings rows as they lie in shared memory
and e4m3 become f16. A 16-bit element of a packed row is two e4m3:
- K: a lane gets four neighbouring bytes. The first two are its elements of the first 8 columns of
  K of a product, the others those of the last 8; Q's columns lie likewise (`gather.py`).
- V, transposed: a lane gets two dims of two keys, and a row of the product is every other dim.
"""

from typing import Any

from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import ptx, smem, wgmma
from flashdsa.dsl.fragments import BF16_KIND, F16_KIND, MMA_K, THREAD_ROWS
from flashdsa.dsl.opaque import opaque
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, FP32, ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, PIECE_KEYS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.words import load_float
from flashdsa.kernels.attention.sm90.decode.shared.words import to_f16 as bf16_to_f16

LANE_ROWS = 8
"""Rows from a lane's first row of an accumulator to its second one."""


def load_scale(plan: Any, row: Any, group: int) -> Any:
    """Load a group's scale of the row at that address."""
    at = row + plan.form.scales_at
    return load_float(at + FP32 * group) if plan.form.scale == "fp32" else load_e8m0(at + group)


def load_scales(plan: Any, row: Any) -> list[list[Any]]:
    """Load the scales of the lane's two keys. `row`: the address of the first one."""
    rows = [row + LANE_ROWS * h * plan.row_pitch for h in range(THREAD_ROWS)]
    groups = range(plan.form.num_scales)
    if plan.form.scale == "fp32":
        loaded = [smem.load_words(one + plan.form.scales_at, Float32) for one in rows]
        return [[words[group] for group in groups] for words in loaded]
    return [[load_scale(plan, one, group) for group in groups] for one in rows]


def load_e8m0(address: Any) -> Any:
    """Load 2^(byte - 127), NaN of 255; 0 of 0, as products with 2^-127 are."""
    return ptx.number(
        "{ .reg .b16 byte; .reg .b32 bits; .reg .pred nan; ld.shared.u8 byte, [{$r0}]; "
        "cvt.u32.u16 bits, byte; setp.eq.u32 nan, bits, 255; shl.b32 bits, bits, 23; "
        "selp.b32 bits, 0x7FFFFFFF, bits, nan; mov.b32 {$w0}, bits; }",
        Int32(address),
    )


LOAD_BYTES = 32
"""Bytes of a row that one ldmatrix reads along it."""
CHUNK_STEPS = CHUNK // MMA_K


def load_matrices(address: Any, transposed: bool = False) -> list[Any]:
    """ldmatrix of four 8x8 matrices; the lane's address is of row lane % 8 of matrix lane // 8."""
    trans = ".trans" if transposed else ""
    return ptx.words(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared::cta.b16 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        4,
        address,
    )


def to_f16(word: Any) -> list[Any]:
    """Four e4m3 as two words of f16."""
    return ptx.words(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        2,
        word,
    )


def by_dim(word: Any) -> Any:
    """Two dims of two keys, in bytes: the first dim of both keys, then the second one."""
    return ptx.word("prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;", word)


def blocks_of(plan: FewHeadsPlan) -> int:
    """Accumulators of O^T: 64 dims each."""
    return plan.tile.d_v // ROWS


def is_rope(plan: FewHeadsPlan, block: int) -> bool:
    """Whether a block's dims are bf16 columns of the rows; it is the last one."""
    return plan.has_value_rope and block == blocks_of(plan) - 1


def latent_keys(keys: Any, offset: int, count: int) -> list[list[Any]]:
    """The first operand of `count` products along 16 latent columns each: four words each. `keys`:
    the lane's address: row lane % 16 of the warp's, byte 16 * (lane // 16). `offset`: bytes from
    that address."""
    steps = []
    for load in range(count // 2):
        words = load_matrices(keys + (offset + load * LOAD_BYTES))
        for unit in range(2):
            low, high = (to_f16(words[2 * unit + half]) for half in range(2))
            steps.append([low[0], high[0], low[1], high[1]])
    return steps


def rope_keys(plan: FewHeadsPlan, keys: Any) -> list[list[Any]]:
    """Same as `latent_keys`, for the RoPE columns."""
    at = keys + plan.form.rope_at
    return [load_matrices(at + LOAD_BYTES * i) for i in range(CHUNK_STEPS)]


def multiply_keys(
    plan: FewHeadsPlan, q: Any, steps: list[list[Any]], first: int, kind: str
) -> list[Any]:
    """Issue S^T = K Q^T as one group; return the accumulators. `q`: low word of Q's descriptor.
    `steps`: of K, 16 columns each. `first`: number of the first one. `kind`: of Q and K."""
    values = [Float32(0.0) for _ in range(HEADS // 2)]
    warpgroup.fence()
    for i, a in enumerate(steps):
        chunk, step = divmod(first + i, CHUNK_STEPS)
        b = wgmma.descriptor_behind(q, chunk * plan.operand_bytes + step * LOAD_BYTES)
        values = _multiply(kind, values, a, b, i > 0)
    warpgroup.commit_group()
    return values


def multiply_tile(plan: FewHeadsPlan, q: Any, keys: Any, row: Any) -> list[Any]:
    """Compute a tile's S^T, with Q from shared memory. `q`: low word of Q's descriptor. `keys`: the
    lane's address, as in `latent_keys`. `row`: the address of the lane's first key; its other one
    is LANE_ROWS later."""
    q = opaque(q)
    rows = [row + LANE_ROWS * h * plan.row_pitch for h in range(THREAD_ROWS)]
    s = [Float32(0.0) for _ in range(HEADS // 2)]
    if plan.form.rope:
        s = multiply_keys(plan, q, rope_keys(plan, keys), plan.form.columns // MMA_K, BF16_KIND)
    before: list[Any] | None = None
    group_steps = plan.form.group // MMA_K
    for group in range(plan.form.num_scales):
        first = group * group_steps
        steps = latent_keys(keys, first * MMA_K, group_steps)
        of_group = multiply_keys(plan, q, steps, first, F16_KIND)
        # Registers have room for two groups: keys of one, while the other is multiplied.
        if before is not None:
            warpgroup.wait_group(1)
            s = _add_scaled(plan, s, before, group - 1, rows)
        before = of_group
    warpgroup.wait_group(0)
    assert before is not None
    return _add_scaled(plan, s, before, plan.form.num_scales - 1, rows)


def _add_scaled(
    plan: FewHeadsPlan, s: list[Any], of_group: list[Any], group: int, rows: list[Any]
) -> list[Any]:
    scales = [load_scale(plan, row, group) for row in rows]
    return [
        total + value * scales[i // 2 % THREAD_ROWS]
        for i, (total, value) in enumerate(zip(s, of_group, strict=True))
    ]


def values_of_block(pieces: list[Any], block: int) -> list[list[Any]]:
    """The first operand of a block's products, transposed: four words for each 16 keys. `pieces`:
    the lane's address in each piece of the tile: row `lane`, the warp's 16 dims."""
    steps = []
    for piece in pieces:
        words = load_matrices(piece + block * ROWS, True)
        for half in range(2):
            low, high = (to_f16(by_dim(words[2 * half + i])) for i in range(2))
            steps.append([*low, *high])
    return steps


def rope_values(plan: FewHeadsPlan, pieces: list[Any]) -> list[list[Any]]:
    """Same as `values_of_block`, for bf16 columns; a row of the product is a dim, in order.
    `pieces`: the lane's address in each piece: row lane // 16 * 8 + lane % 8, byte lane // 8 % 2 *
    16 of the warp's 32 of the bf16 columns."""
    steps = []
    for piece in pieces:
        for step in range(PIECE_KEYS // MMA_K):
            words = load_matrices(piece + step * MMA_K * plan.row_pitch, True)
            steps.append([bf16_to_f16(word) for word in words])
    return steps


def multiply_values(
    plan: FewHeadsPlan, out: Any, pieces: list[Any], rope_pieces: list[Any], p: Any
) -> None:
    """Compute O^T += V^T P^T of a tile; all products are done when it returns. `out`: accumulators,
    HEADS / 2 of each block in turn. `p`: low word of P's descriptor."""
    p = opaque(p)
    count = HEADS // 2
    for block in range(blocks_of(plan)):
        part = block * ROWS // plan.form.group
        if is_rope(plan, block):
            part, steps = plan.form.num_scales, rope_values(plan, rope_pieces)
        else:
            steps = values_of_block(pieces, block)
        values = [out[count * block + i] for i in range(count)]
        warpgroup.fence()
        for i, a in enumerate(steps):
            b = wgmma.descriptor_behind(p, part * plan.operand_bytes + i * LOAD_BYTES)
            values = _multiply(F16_KIND, values, a, b, True)
        warpgroup.commit_group()
        for i in range(count):
            out[count * block + i] = values[i]
        if block > 0:
            warpgroup.wait_group(1)
    warpgroup.wait_group(0)


def _multiply(kind: str, d: list[Any], a: list[Any], b: Any, accumulate: bool) -> list[Any]:
    opcode = f"wgmma.mma_async.sync.aligned.m{ROWS}n{HEADS}k{MMA_K}.f32.{kind}.{kind}"
    return wgmma.mma_async(opcode, d, a, b, accumulate=accumulate, transposes=(0,))
