"""Scores of a page: 64 tokens against all heads, on the tensor cores.

score[t] = scale[t] * sum_h weight[h] * relu(sum_d q[h, d] * k[t, d]). Tokens are the rows of the
product and heads its columns, so that the sum over heads stays within four neighbouring lanes.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flashdsa.kernels.indexer.sm90.plan import WARPGROUP_SIZE, IndexerPlan
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_KEY_BYTES, PAGE_SIZE

MMA_K = 32
"""e4m3 elements along K of one wgmma."""


class Scorer(NamedTuple):
    """What a consumer needs to score pages of one segment."""

    first_mma: Any  # clears the accumulator
    next_mma: Any
    pages: Any  # descriptors of A, mode 3 is the stage
    queries: Any  # descriptors of B, mode 3 is the segment's slot
    accumulator: cute.Tensor
    scales: Any  # pointer to the pages' bytes, Float32


def _tile(pointer: Any, rows: int, copies: int, copy_bytes: int) -> Any:
    """(rows, 128, copies) e4m3, K-major with the 128-byte swizzle, copies `copy_bytes` apart."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    layout = cute.tile_to_shape(atom, (rows, INDEX_HEAD_DIM), order=(0, 1))
    staged = cute.make_layout(
        (*layout.outer.shape, copies), stride=(*layout.outer.stride, copy_bytes)
    )
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=Float8E4M3FN), staged)


def make_scorer(pages: Any, queries: Any, thread: Int32, plan: IndexerPlan) -> Scorer:
    """Descriptors and accumulator of the calling consumer thread."""
    operation = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (PAGE_SIZE, plan.num_heads, MMA_K),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    first, following = (
        cute.make_tiled_mma(cute.make_mma_atom(operation), (1, 1, 1)) for _ in range(2)
    )
    first.set(warpgroup.Field.ACCUMULATE, False)
    following.set(warpgroup.Field.ACCUMULATE, True)
    slice_ = first.get_slice(thread % WARPGROUP_SIZE)
    keys = _tile(pages, PAGE_SIZE, plan.stages, plan.stage_bytes)
    heads = _tile(queries, plan.num_heads, plan.segment_stages, plan.query_bytes)
    return Scorer(
        first_mma=first,
        next_mma=following,
        pages=first.make_fragment_A(slice_.partition_A(keys)),
        queries=first.make_fragment_B(slice_.partition_B(heads)),
        accumulator=cute.make_rmem_tensor(
            first.partition_shape_C((PAGE_SIZE, plan.num_heads)), Float32
        ),
        scales=cute.recast_ptr(pages, dtype=Float32),
    )


def load_weights(
    mine: cute.Tensor, weights: cute.Tensor, slot: Int32, lane: Int32, plan: IndexerPlan
) -> None:
    """The weights of the accumulator's columns that this lane holds: 8c + 2 (lane % 4) + {0, 1}."""
    for c in range(plan.num_heads // 8):
        for odd in range(2):
            mine[2 * c + odd] = weights[slot * plan.num_heads + 8 * c + 2 * (lane % 4) + odd]


def relu(value: Float32) -> Float32:
    """max(value, 0), NaN stays NaN."""
    return cute.arch.fmax(value, Float32(0.0), nan=True)


def token_of_lane(warp: Int32, lane: Int32) -> Int32:
    """The page's token whose score this lane ends up with; lanes 2, 3 of four have copies."""
    return warp % 4 * 16 + lane // 4 + lane % 2 * 8


@cute.jit
def issue(scorer: Scorer, stage: Int32, slot: Int32) -> None:
    """Start the page's product."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(INDEX_HEAD_DIM // MMA_K):
        mma = scorer.first_mma if const_expr(k == 0) else scorer.next_mma
        cute.gemm(
            mma,
            scorer.accumulator,
            scorer.pages[None, None, k, stage],
            scorer.queries[None, None, k, slot],
            scorer.accumulator,
        )
    warpgroup.commit_group()


@cute.jit
def load_scale(scorer: Scorer, stage: Int32, token: Int32, plan: cutlass.Constexpr) -> Float32:
    """The token's scale: the 128-byte swizzle exchanges neighbouring 16 bytes in the second row."""
    words_of_row = 32
    word = token
    if token >= words_of_row:
        word = token ^ 4
    offset = stage * (plan.stage_bytes // 4) + PAGE_KEY_BYTES // 4 + word
    return (scorer.scales + offset).load()


@cute.jit
def reduce_heads(
    scorer: Scorer, weights: cute.Tensor, scale: Float32, lane: Int32, plan: cutlass.Constexpr
) -> Float32:
    """The score of `token_of_lane`, the same order of sums for every token."""
    upper = Float32(0.0)  # row lane / 4
    lower = Float32(0.0)  # row lane / 4 + 8
    upper_odd = Float32(0.0)
    lower_odd = Float32(0.0)
    acc = scorer.accumulator
    for c in cutlass.range_constexpr(plan.num_heads // 8):
        even, odd = weights[2 * c], weights[2 * c + 1]
        upper += even * relu(acc[4 * c])
        upper_odd += odd * relu(acc[4 * c + 1])
        lower += even * relu(acc[4 * c + 2])
        lower_odd += odd * relu(acc[4 * c + 3])
    upper += upper_odd
    lower += lower_odd
    # Lanes 0 and 2 of four finish the upper row, 1 and 3 the lower one.
    given = upper if lane % 2 == 1 else lower
    kept = lower if lane % 2 == 1 else upper
    kept += cute.arch.shuffle_sync_bfly(given, 1)
    kept += cute.arch.shuffle_sync_bfly(kept, 2)
    return kept * scale


@cute.jit
def sortable(score: Float32) -> Uint32:
    """The score as an unsigned integer in the same order; -0 as +0, NaN below everything."""
    bits = (score + Float32(0.0)).bitcast(Uint32)
    key = bits | Uint32(0x80000000)
    if bits >> 31 == 1:
        key = ~bits
    if score != score:
        key = Uint32(0)
    return key
