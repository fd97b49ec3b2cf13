"""The wgmmas of a consumer: S^T = K Q^T of a tile, O^T += V^T P^T of half of the dims.

The first operand comes from registers (`key_rows/operands.py`), where it is multiplied by scales in
f16: accumulators for each scale, or a P for each, would take more room than there is.
"""

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import BF16_KIND, F16_KIND, MMA_K
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PipelineState, Ring
from flashdsa.dsl.wgmma import descriptor_behind, mma_async
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.operands import (
    CHUNK_STEPS,
    LOAD_BYTES,
    by_dim,
    load_matrices,
    to_f16,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import ManyHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import F16
from flashdsa.kernels.attention.sm90.decode.shared.words import load_words_again, one_word, scaled

COUNT = ROWS // 2
"""Accumulators of a thread: of S^T, and of a block of O^T."""
TWICE = ("prmt.b32 {$w0}, {$r0}, 0, 0x1010;", "prmt.b32 {$w0}, {$r0}, 0, 0x3232;")
"""The low 16 bits of a word twice, and the high ones."""
FRAGMENT_WORDS = 4
"""Words of a lane of the first operand of a product."""


def states_of_tile(plan: ManyHeadsPlan, tile: Any) -> list[PipelineState]:
    """Stages and phases of the pieces of a tile of the CTA."""
    ring = Ring(plan.stages)
    return [ring.state(tile * plan.tile_pieces + i) for i in range(plan.tile_pieces)]


def times(word: Any, factor: Any) -> Any:
    """Two f16 times two f16."""
    return one_word("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", word, factor)


def multiply_tile(
    plan: ManyHeadsPlan,
    s: cute.Tensor,
    q: Any,
    keys: Any,
    scales: list[Any],
    powers: list[Any],
) -> None:
    """Compute a tile's S^T.

    Args:
        s: its accumulators. q: low word of Q's descriptor.
        keys: the lane's address: row lane % 16 of the warp's, byte 16 * (lane // 16).
        scales: of each group, those of the lane's two keys in f16.
        powers: of these keys, the power of two of the RoPE columns, as two equal bf16.
    """
    q = opaque(q)
    values = [s[i] for i in range(COUNT)]
    chunks = plan.form.columns // CHUNK
    # The RoPE columns have the most words: they come before others are under way.
    order = [*([chunks] if plan.form.rope else []), *range(chunks)]
    words = load_chunk(plan, keys, order[0])
    for number, chunk in enumerate(order):
        # Words of the next chunk come while these become f16.
        following = load_chunk(plan, keys, order[number + 1]) if number + 1 < len(order) else []
        if chunk == chunks:
            steps, kind = [times_powers(one, powers) for one in products_of(words)], BF16_KIND
        else:
            both = scales[chunk * CHUNK // plan.form.group]
            pair = [one_word(twice, both) for twice in TWICE]
            steps, kind = key_fragments(words, pair), F16_KIND
        warpgroup.fence()
        for i, a in enumerate(steps):
            b = descriptor_behind(q, chunk * plan.operand_bytes + i * LOAD_BYTES)
            values = _multiply(kind, values, a, b, number > 0 or i > 0)
        warpgroup.commit_group()
        # Registers have room for two chunks: keys of one, while the other is multiplied.
        if number > 0:
            warpgroup.wait_group(1)
        words = following
    warpgroup.wait_group(0)
    for i in range(COUNT):
        s[i] = values[i]


def load_chunk(plan: ManyHeadsPlan, keys: Any, chunk: int) -> list[Any]:
    """Load a lane's words of 64 columns of both its keys: eight of e4m3, 16 of the RoPE's bf16."""
    loads, at = CHUNK_STEPS // 2, chunk * CHUNK
    if at == plan.form.columns:
        loads, at = CHUNK_STEPS, plan.form.rope_at
    return [word for i in range(loads) for word in load_matrices(keys + (at + i * LOAD_BYTES))]


def products_of(words: list[Any]) -> list[list[Any]]:
    """Words of each product of a chunk."""
    count = FRAGMENT_WORDS
    return [words[count * i : count * (i + 1)] for i in range(CHUNK_STEPS)]


def times_powers(words: list[Any], powers: list[Any]) -> list[Any]:
    """RoPE columns of a product times their keys' powers of two."""
    return [scaled(word, powers[i % 2]) for i, word in enumerate(words)]


def key_fragments(words: list[Any], pair: list[Any]) -> list[list[Any]]:
    """The first operand of a chunk's products: words of e4m3 times both keys' scales."""
    steps = []
    for i in range(CHUNK_STEPS):
        low, high = (to_f16(words[2 * i + half]) for half in range(2))
        step = [low[0], high[0], low[1], high[1]]
        steps.append([times(word, pair[j % 2]) for j, word in enumerate(step)])
    return steps


def load_block(pieces: list[Any], block: int) -> list[Any]:
    """Load a lane's words of 64 dims of a tile: two dims of two keys each.

    Args:
        pieces: the lane's address in each piece: row `lane`, the warp's 16 dims of the first block.
    """
    return [word for piece in pieces for word in load_matrices(piece + block * ROWS, True)]


def multiply_values(
    plan: ManyHeadsPlan,
    out: cute.Tensor,
    blocks: list[list[Any]],
    pieces: list[Any],
    p: Any,
    table: Any,
    *,
    first: bool,
) -> None:
    """Issue O^T += V^T P^T of a tile, of the consumer's dims; the last block's products may not be
    done when it returns.

    Args:
        out: accumulators, COUNT of each block in turn. blocks: `load_block` of the first ones.
        pieces: as in `load_block`. p: low word of P's descriptor.
        table: address of the lane's scales of the consumer's first group.
        first: no products are under way.
    """
    p = opaque(p)
    scales: list[Any] = []
    for block in range(plan.blocks):
        if block * ROWS % plan.form.group == 0:
            at = table + block * ROWS // plan.form.group * (plan.tile.keys * F16)
            scales = [word for i in range(2) for word in load_words_again(at + 16 * i)]
        # Words of the next block come while these become f16.
        if len(blocks) == block + 1 < plan.blocks:
            blocks = [*blocks, load_block(pieces, block + 1)]
        values = [out[COUNT * block + i] for i in range(COUNT)]
        steps = value_fragments(blocks[block], scales)
        warpgroup.fence()
        for i, a in enumerate(steps):
            b = descriptor_behind(p, i * LOAD_BYTES)
            values = _multiply(F16_KIND, values, a, b, True)
        warpgroup.commit_group()
        for i in range(COUNT):
            out[COUNT * block + i] = values[i]
        if block > 0 or not first:
            warpgroup.wait_group(1)


def value_fragments(words: list[Any], scales: list[Any]) -> list[list[Any]]:
    """The first operand of a block's products: words of e4m3 times the scales of both keys."""
    steps = []
    for i in range(CHUNK_STEPS):
        step = []
        for at in (2 * i, 2 * i + 1):
            step += [times(word, scales[at]) for word in to_f16(by_dim(words[at]))]
        steps.append(step)
    return steps


def _multiply(kind: str, d: list[Any], a: list[Any], b: Any, accumulate: bool) -> list[Any]:
    opcode = f"wgmma.mma_async.sync.aligned.m{ROWS}n{ROWS}k{MMA_K}.f32.{kind}.{kind}"
    return mma_async(opcode, d, a, b, accumulate=accumulate, transposes=(0,))
