"""Scores of pages: 64 tokens against all heads, on the tensor cores.

score[t] = scale[t] * sum_h weight[h] * relu(sum_d q[h, d] * k[t, d]). Tokens are the rows of the
product and heads its columns, so that the sum over heads stays within four neighbouring lanes.

relu(x) is (x + |x|) / 2, with the half in the weight: additions run at twice the rate of maxima,
and both steps are exact, so that it is the same number. A warpgroup takes two pages at a time: the
work after the sums costs the same for two as for one, because a page has half as many tokens for a
warp as it has lanes.

Codes of e2m1 (MXFP4) in shared memory become the product's left operand, e4m3. A key is e4m3 times
2^-6 of the largest of its four scales (backends/mxfp4.py). A group of 32 columns is what one
product takes along K, and has one scale, so its eight magnitudes in e4m3 are a table of eight
bytes. Of a token's four lanes each converts the table of one group and gives it to the others; a
byte permutation then looks up four columns at once. The conversion rounds as the contract says, so
wide spans need no case of their own.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint16, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import PipelineState, RingConsumer
from flashdsa.dsl.static import Static
from flashdsa.dsl.warp import kept, uniform
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import course_from
from flashdsa.kernels.indexer.score_batch import PageScoring, PageSource, Scoring, doubled_relu
from flashdsa.kernels.indexer.select.lists import PageRange
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.smem_views import input_buffers_in
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE

GROUPS = 4
TOP = 6
"""Exponent with which the numbers of the largest scale are held."""
DEEPEST = -20
"""Exponent, below the largest, at which every code is 0."""
NAN_SCALE = 255
FP32_BIAS, FP32_MANTISSA = 127, 23
LOWER_ROWS = 8
"""Tokens from a lane's first one to its second."""


def place_of_codes(thread: Int32) -> Int32:
    """Half word of a page at which the codes of the caller's first token, group 0, begin. Two
    tokens share a row of 128 bytes; the swizzle exchanges 16 bytes, a group, by the row."""
    lane = thread % WARP_SIZE
    token = thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane // 4
    row, group = token // 2, token % 2 * GROUPS
    return row * 64 + (group ^ (row % 8)) * 8 + lane % 4


@cute.jit
def load_mxfp4_keys(words: cute.Tensor, page: Any, place: Int32, plan: cutlass.Constexpr) -> None:
    """Convert the page's keys into registers. words: (16,) Int32, the left operand: of each group
    the first 16 columns of both tokens, then the others. page: pointer to its bytes. place: see
    `place_of_codes`."""
    lane = cute.arch.lane_idx()
    # place = 64 row + ..., so that the token is known again.
    token = place // 64 * 2 + ((place // 8) ^ (place // 64)) // GROUPS % 2
    scales = cute.recast_ptr(page, dtype=Int32) + plan.page_key_bytes // 4
    tables = []
    for second in cutlass.range_constexpr(2):
        word = token + second * LOWER_ROWS
        if word >= PAGE_SIZE // 2:  # the second row of scales: neighbouring 16 bytes exchanged
            word = word ^ 4
        tables += _table((scales + word).load(), lane % GROUPS)
    codes = cute.recast_ptr(page, dtype=Uint16)
    for group in cutlass.range_constexpr(GROUPS):
        owner = lane // GROUPS * GROUPS + group
        mine = [cute.arch.shuffle_sync(table, owner) for table in tables]
        for half in cutlass.range_constexpr(2):
            for second in cutlass.range_constexpr(2):
                # Eight tokens are four rows further, where the swizzle exchanges 64 bytes more.
                own = ((place + second * 256) ^ (second * 32)) ^ (group * 8)
                four = Int32((codes + own + half * 4).load())
                words[4 * group + 2 * half + second] = _look_up(four, *mine[2 * second :][:2])


def _table(scales: Int32, group: Int32) -> list[Any]:
    """e4m3 of the magnitudes 0 to 7 of a group, 4 in a word, for its key's four scales."""
    below = ((scales >> (8 * group)) & 255) - _largest(scales)
    exponent = cutlass.max(below, Int32(DEEPEST)) + (TOP + FP32_BIAS)
    unit = (exponent << FP32_MANTISSA).bitcast(Float32)
    sizes = [unit * Float32(size) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    return [
        cute.arch.inline_ptx(
            "{.reg .b16 low, high;\n"
            "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
            "mov.b32 {$w0}, {low, high};}",
            write_only_types=[Int32],
            read_only_args=sizes[first : first + 4],
        )
        for first in (0, 4)
    ]


def _look_up(codes: Int32, low: Int32, high: Int32) -> Int32:
    """Four codes of 4 bits as e4m3, by the tables of their magnitudes; bit 3 is the sign."""
    return cute.arch.inline_ptx(
        "{.reg .b32 size, sign, odd;\n"
        "and.b32 size, {$r0}, 0x7777;\n"
        "prmt.b32 size, {$r1}, {$r2}, size;\n"
        "prmt.b32 sign, {$r0}, {$r0}, 0x1100;\n"
        "and.b32 odd, sign, 0x80008000;\n"
        "shl.b32 sign, sign, 4;\n"
        "and.b32 sign, sign, 0x00800080;\n"
        "or.b32 size, size, odd;\n"
        "or.b32 {$w0}, size, sign;}",
        write_only_types=[Int32],
        read_only_args=[codes, low, high],
    )


def _largest(scales: Int32) -> Int32:
    """Return the largest of four bytes."""
    bytes_ = [(scales >> (8 * i)) & 255 for i in range(GROUPS)]
    return cutlass.max(cutlass.max(bytes_[0], bytes_[1]), cutlass.max(bytes_[2], bytes_[3]))


@cute.jit
def scale_of_key(scales: Int32) -> Float32:
    """Scale of a key, 2^-6 of the largest of its four; below 2^-126 it is a subnormal number, a
    single bit. NaN if that is 255."""
    largest = _largest(scales)
    bits = (largest - TOP) << FP32_MANTISSA
    if largest <= TOP:
        bits = Int32(1) << (largest + (FP32_MANTISSA - 1 - TOP))
    if largest == NAN_SCALE:
        bits = Int32(0x7FC00000)
    return bits.bitcast(Float32)


MMA_K = 32
"""e4m3 elements along K of one wgmma."""


class Scorer(NamedTuple):
    """Operands with which a consumer scores pages."""

    first_mma: Any  # clears the accumulator
    next_mma: Any
    keys: cute.Tensor  # A: 64 tokens in a warpgroup's registers, mode 2 is the step along K
    queries: Any  # descriptors of B, mode 3 is the tile's stage
    accumulator: cute.Tensor
    pages: Any  # pointer to the pages' bytes
    row_offset: Int32  # bytes from a page's start to what this lane names for ldmatrix; of MXFP4
    # keys see `place_of_codes`


def _tile(pointer: Any, rows: int, copies: int, copy_bytes: int) -> Any:
    """(rows, 128, copies) e4m3, K-major with the 128-byte swizzle, copies `copy_bytes` apart."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    layout = cute.tile_to_shape(atom, (rows, INDEX_HEAD_DIM), order=(0, 1))
    staged = cute.make_layout(
        (*layout.outer.shape, copies), stride=(*layout.outer.stride, copy_bytes)
    )
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=Float8E4M3FN), staged)


def make_scorer(pages: Any, queries: Any, thread: Int32, plan: IndexerPlan) -> Scorer:
    """Descriptors and registers of the calling consumer thread."""
    operation = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (PAGE_SIZE, plan.num_heads, MMA_K),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    first, following = (
        cute.make_tiled_mma(cute.make_mma_atom(operation), (1, 1, 1)) for _ in range(2)
    )
    first.set(warpgroup.Field.ACCUMULATE, False)
    following.set(warpgroup.Field.ACCUMULATE, True)
    slice_ = first.get_slice(thread % WARPGROUP_SIZE)
    heads = _tile(queries, plan.num_heads, plan.lists.tile_stages, plan.query_bytes)
    keys = cute.make_rmem_tensor(first.partition_shape_A((PAGE_SIZE, INDEX_HEAD_DIM)), Float8E4M3FN)
    # ldmatrix: lanes 0-7 name rows 0-7, 8-15 rows 8-15, both of the first 16 bytes along K, lanes
    # 16-31 those of the second 16 bytes; the swizzle exchanges 16 bytes by the row.
    lane = thread % WARP_SIZE
    row = thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane % 16
    return Scorer(
        first_mma=first,
        next_mma=following,
        keys=keys,
        queries=first.make_fragment_B(slice_.partition_B(heads)),
        accumulator=cute.make_rmem_tensor(
            first.partition_shape_C((PAGE_SIZE, plan.num_heads)), Float32
        ),
        pages=pages,
        row_offset=place_of_codes(thread)
        if plan.mxfp4
        else row * INDEX_HEAD_DIM + ((lane // 16) ^ (lane % 8)) * 16,
    )


def load_weights(
    mine: cute.Tensor, weights: cute.Tensor, stage: Int32, lane: Int32, plan: IndexerPlan
) -> None:
    """Load half the weights of the heads whose columns of the accumulator this lane holds: 8c + 2
    (lane % 4) + {0, 1}. `mine`: (num_heads // 4,) fp32 registers."""
    for c in range(plan.num_heads // 8):
        for odd in range(2):
            weight = weights[stage * plan.num_heads + 8 * c + 2 * (lane % 4) + odd]
            mine[2 * c + odd] = weight * 0.5


def token_of_lane(warp: Int32, lane: Int32) -> Int32:
    """The token of a page whose score this lane ends up with."""
    return warp % 4 * 16 + lane // 4 + lane % 2 * 8


def is_of_second(lane: Int32) -> cutlass.Boolean:
    """Whether this lane's score is of the second of two pages."""
    return lane // 2 % 2 == 1


@cute.jit
def load_keys(scorer: Scorer, stage: Int32, plan: cutlass.Constexpr) -> None:
    """Load the page's keys into registers."""
    words = cute.recast_tensor(scorer.keys, Int32)
    page = scorer.pages + stage * plan.stage_bytes
    if const_expr(plan.mxfp4):
        load_mxfp4_keys(words, page, scorer.row_offset, plan)
        return
    for k in cutlass.range_constexpr(INDEX_HEAD_DIM // MMA_K):
        four = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[page + (scorer.row_offset ^ (k * MMA_K))],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * k + i] = four[i]


@cute.jit
def multiply(scorer: Scorer, tile_stage: Int32) -> None:
    """Start the product of the keys in registers with all heads."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(INDEX_HEAD_DIM // MMA_K):
        mma = scorer.first_mma if const_expr(k == 0) else scorer.next_mma
        cute.gemm(
            mma,
            scorer.accumulator,
            scorer.keys[None, None, k],
            scorer.queries[None, None, k, tile_stage],
            scorer.accumulator,
        )
    warpgroup.commit_group()


class Sums(NamedTuple):
    """A lane's part of a page: sums over its heads for two tokens, and its other operands."""

    upper: Float32  # row lane / 4 of the warp's 16
    lower: Float32  # row lane / 4 + 8
    scale: Float32  # of `token_of_lane`
    valid: Int32


@cute.jit
def score_page(
    x: Scoring, weights: cute.Tensor, state: PipelineState, tile_stage: Int32, word: Int32
) -> Sums:
    """Wait for a page, read it, free its stage, multiply, and sum over this lane's heads. word:
    `word_of_scale` of the lane's token."""
    inputs, scorer, plan, lane = x.inputs, x.scorer, x.plan, x.thread % WARP_SIZE
    stage = state.stage
    # page_full[stage], the round's phase: TMA has brought keys and scales, or page_valid says that
    # none came. All may be read until this warp arrives at page_empty[stage].
    inputs.page_ring.wait(state)
    load_keys(scorer, stage, plan)
    scale = load_scale(scorer, stage, word, plan)
    valid = inputs.page_valid[stage]
    multiply(scorer, tile_stage)
    # page_empty[stage]: all lanes of this warp have read the stage, as the product has its keys in
    # registers. The fourth warp's arrival completes the phase, and TMA may write.
    cute.arch.sync_warp()
    if lane == 0:
        inputs.page_ring.release(stage + nothing_when_loaded(scale, valid))
    warpgroup.wait_group(0)
    upper, lower = sum_heads(scorer.accumulator, weights, 0, plan)
    return Sums(upper, lower, scale, valid)


def nothing_when_loaded(scale: Float32, valid: Int32) -> Int32:
    """0, known only when both are in registers; `valid` is 0 or 1, which no compiler knows. ptxas
    issues an arrival after loads whose values are needed later, but does not wait for them: they
    could still be on their way when TMA overwrites what they read."""
    return (valid >> 1) & scale.bitcast(Int32)


@cute.jit
def sum_heads(
    accumulator: cute.Tensor, weights: cute.Tensor, first: cutlass.Constexpr, plan: Any
) -> tuple[Float32, Float32]:
    """Sums over this lane's heads for rows lane / 4 and lane / 4 + 8 of the warp's 16, from the
    accumulator's register `first` on."""
    upper, upper_odd = Float32(0.0), Float32(0.0)
    lower, lower_odd = Float32(0.0), Float32(0.0)
    for c in cutlass.range_constexpr(plan.num_heads // 8):
        even, odd = weights[2 * c], weights[2 * c + 1]
        upper += even * doubled_relu(accumulator[first + 4 * c])
        upper_odd += odd * doubled_relu(accumulator[first + 4 * c + 1])
        lower += even * doubled_relu(accumulator[first + 4 * c + 2])
        lower_odd += odd * doubled_relu(accumulator[first + 4 * c + 3])
    return upper + upper_odd, lower + lower_odd


class Prepared(NamedTuple):
    """Values of a tile that a consumer keeps while it scores some of the tile's pages."""

    weights: cute.Tensor  # registers; see load_weights
    group: Int32  # the calling warpgroup


@cute.jit
def prepare(x: Scoring, tile_stage: Int32) -> Prepared:
    """Load the tile's weights into registers."""
    inputs, thread, plan = x.inputs, x.thread, x.plan
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    load_weights(weights, inputs.weights, tile_stage, thread % WARP_SIZE, plan)
    return Prepared(weights, uniform(thread // WARPGROUP_SIZE))


@cute.jit
def score_pages(
    x: Scoring, prepared: Prepared, pages: PageRange, store: cutlass.Constexpr, sink: Any
) -> None:
    """Score the calling warpgroup's pages, two at a time: those whose number in the CTA is its own,
    modulo the warpgroups. store: called for each two pages as store(sink, score, position, valid,
    present): the score of this lane's token, whether its page id is in the cache, and whether the
    lane has a page."""
    inputs, thread, plan = x.inputs, x.thread, x.plan
    groups, weights = plan.consumer_warpgroups, prepared.weights
    turn = pages.begin + ((prepared.group - pages.first_number - pages.begin) & (groups - 1))
    count = cutlass.max(pages.end - turn + groups - 1, Int32(0)) // groups
    course = course_from(turn, pages.num_pages, plan)
    tile_stage = uniform(pages.tile_stage)
    lane = thread % WARP_SIZE
    token = token_of_lane(thread // WARP_SIZE, lane)
    position = (pages.first_page + course.first) * PAGE_SIZE + token
    if is_of_second(lane):
        position += course.tokens_apart
    word = kept(word_of_scale(token), lane)
    ring = inputs.page_ring
    # Held in uniform registers, as are the stage and the queries' descriptors then: no instruction
    # moves them into such registers before a product.
    state = ring.state(uniform(pages.first_number + turn))
    for done in cutlass.range(0, count, 2, unroll=1):
        both = done + 1 < count
        first = score_page(x, weights, state, tile_stage, word)
        state = state.advanced(groups)
        second = Sums(Float32(0.0), Float32(0.0), Float32(0.0), Int32(0))
        if both:
            second = score_page(x, weights, state, tile_stage, word)
            state = state.advanced(groups)
        score, valid = finish_pair(first, second, lane)
        store(sink, score, position, valid, both or not is_of_second(lane))
        position += 2 * course.tokens_apart


@cute.jit
def finish_pair(first: Sums, second: Sums, lane: Int32) -> tuple[Float32, cutlass.Boolean]:
    """(score of this lane's token, whether its page is valid). Every token's sums have the same
    order."""
    # Lanes 0 and 2 of each four finish upper rows, 1 and 3 lower ones; 0 and 1 the first page's.
    odd = lane % 2 == 1
    of_first_page = first.lower if odd else first.upper
    of_first_page += cute.arch.shuffle_sync_bfly(first.upper if odd else first.lower, 1)
    of_second_page = second.lower if odd else second.upper
    of_second_page += cute.arch.shuffle_sync_bfly(second.upper if odd else second.lower, 1)
    of_second = is_of_second(lane)
    given = of_first_page if of_second else of_second_page
    total = of_second_page if of_second else of_first_page
    total += cute.arch.shuffle_sync_bfly(given, 2)
    scale = second.scale if of_second else first.scale
    valid = second.valid if of_second else first.valid
    return total * scale, valid != 0


@cute.jit
def load_scale(scorer: Scorer, stage: Int32, word: Int32, plan: cutlass.Constexpr) -> Float32:
    """The scale of the token with that `word_of_scale`."""
    scale = scale_of(scorer, stage, word, plan).load()
    if const_expr(plan.mxfp4):
        scale = scale_of_key(scale.bitcast(Int32))
    return scale


@cute.jit
def word_of_scale(token: Int32) -> Int32:
    """The token's scale among a page's: the 128-byte swizzle exchanges neighbouring 16 bytes in the
    second row."""
    words_of_row = 32
    return token ^ 4 if token >= words_of_row else token


def scale_of(scorer: Any, stage: Int32, word: Int32, plan: Any) -> Any:
    """Pointer to the scale of the token with that `word_of_scale`."""
    offset = stage * (plan.stage_bytes // 4) + plan.page_key_bytes // 4 + word
    return cute.recast_ptr(scorer.pages, dtype=Float32) + offset


SCORING = PageScoring(prepare, score_pages)
"""See score_batch.py."""


def page_source(memory: Memory, thread: Int32, plan: IndexerPlan) -> PageSource:
    """Return the consumer's source of page scores."""
    inputs = input_buffers_in(memory, plan, RingConsumer)
    return PageSource(make_scorer(inputs.pages, inputs.queries, thread, plan), Static(SCORING))
