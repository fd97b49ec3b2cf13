"""The exact best `topk` of each row of scores, for Hopper: positions, or slots of a paged cache.

The CTAs of a cluster rank a row, each an equal part of it.

every CTA                                        | between the CTAs
------------------------------------------------ | ----------------------------------------
the row's entries in each bin of keys: counted   | counts of bins, if the parts were counted
  by the launch that scores, or here: the bin of |
  the topk-th best (again inside a crowded bin)  |
list winners above it, and candidates in it      | lengths of lists; the lists, in order
the first one: divide the bin further until all  |
  in it win, or have one key; write the ids      |

Lists are in the order of positions, which is the order of the ids. A row of at most topk entries
has all of them among the best, and its scores are not read.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl import compile_options, gmem, grids, static, warp
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.cluster import peer_address, store_to_peer
from flashdsa.dsl.memory import Memory
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer import emit, sizes
from flashdsa.kernels.indexer.schedule.work_tile import Rows, request_of
from flashdsa.kernels.indexer.select import lists, sort_keys
from flashdsa.kernels.indexer.sm90.rank import cuts
from flashdsa.kernels.indexer.sm90.rank.levels import (
    Levels,
    level_row,
    list_blocks,
    listed_at_most,
    no_list,
)
from flashdsa.kernels.indexer.sm90.rank.plan import WORD, Of, RankPlan
from flashdsa.kernels.indexer.sm90.rank.spans import Spans, long_row, span_of
from flashdsa.problem import PAGE_SIZE

CARVEOUT = 100
"""Percent of an SM's first-level memory that is shared memory, as of the launch that scores."""


class Output(NamedTuple):
    """Destination of a launch's ids."""

    ids: Any  # (B, topk) int32
    words: Any  # (B, topk) int32, the winners' scores for `order`; (0, 0): not wanted
    table: Any  # (requests, pages) int32, the pages of the rows' entries; (0, 0): none
    num_pages: Int32  # of the cache
    slots: Int32  # 1: ids are slots; 0: positions


@cute.jit
def wanted_of(block: cuts.Block, x: cuts.Part, cut: cuts.Cut) -> Int32:
    """The warp's entries from the cut's lowest key on: lane i has bits of the i-th 32 ones."""
    mask, lowest = Int32(0), sort_keys.word_of(sort_keys.signed(cut.low)).bitcast(Float32)
    if cut.low > sort_keys.LOWEST_KEY:
        for i in cutlass.range_constexpr(x.plan.together):
            votes = Int32(cute.arch.vote_ballot_sync(block.scores[i] >= lowest))
            mask = votes if x.lane == i else mask
    else:  # NaN is wanted, too
        for i in cutlass.range_constexpr(x.plan.together):
            votes = Int32(cute.arch.vote_ballot_sync(cuts.key_in(block, i, x.plan) != 0))
            mask = votes if x.lane == i else mask
    return mask


@cute.jit
def list_part(block: cuts.Block, x: cuts.Part, cut: cuts.Cut, most_equals: Int32) -> Int32:
    """List the part's entries from the cut's lowest key on, in the order of positions; return their
    number. Of a crowded cut only so many equal entries are listed.

    block: the part's first one, loaded.
    """
    plan = x.plan
    together = plan.together
    block_size = together * plan.threads
    list_keys = x.memory.keys.array(Int32, plan.capacity)
    list_positions = x.memory.positions.array(Int32, plan.capacity)
    crowded = cut.within > plan.max_candidates
    below, lane = Int32(cute.arch.lanemask_lt()), x.lane
    scores, following = block.scores, cute.make_rmem_tensor(together, Float32)
    first, end = block.first, block.end
    entries, equals, turn = Int32(0), Int32(0), Int32(0)
    for begin in cutlass.range(x.begin, x.end, block_size, unroll=1):
        block = cuts.Block(first, end, scores)
        mask = wanted_of(block, x, cut)
        # On its way while this one is listed.
        ahead = cuts.load_block(following, x, cutlass.min(begin + block_size, x.end))
        if crowded:
            same = Int32(0)
            for i in cutlass.range_constexpr(together):
                votes = Int32(cute.arch.vote_ballot_sync(cuts.key_in(block, i, plan) == cut.low))
                same = votes if lane == i else same
            count = Int32(cute.arch.popc(same))
            ends = warp.prefix_sum(count, lane)
            before, found = cuts.before_warp(x, cute.arch.shuffle_sync(ends, WARP_SIZE - 1), turn)
            kept = cuts.first_bits(same, most_equals - (equals + before + ends - count))
            mask = (mask ^ same) | kept
            equals += found
            turn = turn ^ 1
        count = Int32(cute.arch.popc(mask))
        ends = warp.prefix_sum(count, lane)
        total = cute.arch.shuffle_sync(ends, WARP_SIZE - 1)
        before, found = cuts.before_warp(x, total, turn)
        turn = turn ^ 1
        start = entries + before + ends - count
        if total > 0:
            for i in cutlass.range_constexpr(together):
                votes = cute.arch.shuffle_sync(mask, i)
                to = cute.arch.shuffle_sync(start, i) + Int32(cute.arch.popc(votes & below))
                if votes >> lane & 1 == 1:
                    list_keys[to] = Int32(sort_keys.sortable(scores[i]))
                    list_positions[to] = cuts.position_of(x, first + i * WARP_SIZE)
        entries += found
        first, end = ahead.first, ahead.end
        for i in cutlass.range_constexpr(together):
            scores[i] = following[i]
    return entries


@cute.jit
def equal_entries(scores: cute.Tensor, x: cuts.Part, cut: cuts.Cut) -> Int32:
    """The number of entries of the part that have the cut's only key."""
    plan, mine = x.plan, Int32(0)
    for begin in cutlass.range(x.begin, x.end, plan.together * plan.threads, unroll=1):
        block = cuts.load_block(scores, x, begin)
        for i in cutlass.range_constexpr(plan.together):
            mine += Int32(cuts.key_in(block, i, plan) == cut.low)
    _, equals = cuts.before_warp(x, cute.arch.warp_redux_sync(mine, "add"), Int32(0))
    return equals


@cute.jit
def list_row(block: cuts.Block, x: cuts.Part, topk: Int32, cut: cuts.Cut, counted: Any) -> Int32:
    """List the row's entries in its first CTA; return their number. Ends met."""
    plan = x.plan
    most_equals = Int32(0)
    if cut.within > plan.max_candidates:
        # Equal entries of earlier parts are better.
        before, _ = cuts.numbers_of_parts(x, equal_entries(block.scores, x, cut), 1)
        most_equals = topk - cut.above - before
        block = cuts.load_block(block.scores, x, x.begin)
    entries = list_part(block, x, cut, most_equals)
    before, total = cuts.numbers_of_parts(x, entries, 0)
    if const_expr(counted is not None):
        if counted and x.peer == 0:  # all have read the counts
            for at in cutlass.range(x.thread, sizes.RANK_BINS // 4, plan.threads, unroll=1):
                gmem.store4(x.counts + 4 * at, [Int32(0)] * 4)
    if x.peers > 1:
        if x.peer > 0:
            list_keys = x.memory.keys.array(Int32, plan.capacity)
            list_positions = x.memory.positions.array(Int32, plan.capacity)
            to_keys = peer_address(x.memory.keys.address() + before * WORD, x.rank)
            to_positions = peer_address(x.memory.positions.address() + before * WORD, x.rank)
            for i in cutlass.range(x.thread, entries, plan.threads, unroll=1):
                store_to_peer(to_keys + i * WORD, list_keys[i])
                store_to_peer(to_positions + i * WORD, list_positions[i])
        cuts.meet(x.peers)
    return total


class Share(NamedTuple):
    """A thread's entries of the list: `first`, and every 32nd one before `end`. A warp has
    neighbouring ones, and `groups` of 32, the last of which may have fewer."""

    first: Int32
    end: Int32
    groups: Int32
    keys: cute.Tensor  # 0: the entry does not win
    ids: cute.Tensor  # positions, then ids


@cute.jit
def share_of(x: cuts.Part, entries: Int32) -> Share:
    """The caller's share of so many entries."""
    plan = x.plan
    groups = (entries + plan.threads - 1) // plan.threads
    first = x.warp * groups * WARP_SIZE
    end = cutlass.min(first + groups * WARP_SIZE, entries)
    keys = x.memory.keys.array(Int32, plan.capacity)
    return Share(first + x.lane, end, groups, keys, x.memory.positions.array(Int32, plan.capacity))


@cute.jit
def key_at(share: Share, group: Int32) -> Uint32:
    """The key of the thread's entry in a group; 0: none."""
    key, index = Uint32(0), share.first + group * WARP_SIZE
    if index < share.end:
        key = Uint32(share.keys[index])
    return key


PAGES_TOGETHER = 4
"""Pages that a thread loads at once."""


@cute.jit
def name_entries(
    share: Share, ranked: cutlass.Boolean, first: Int32, output: Output, rows: Rows, row: Int32
) -> None:
    """Turn positions into ids, the first of which is `first`. The entries of a row that is not
    `ranked` are its positions; those of pages that the cache does not have do not win."""
    line = output.table.iterator + Int64(request_of(rows, row)) * output.table.stride[0]
    has_pages = output.table.shape[0] > 0 and (output.slots != 0 or not ranked)
    positions = cute.make_rmem_tensor(PAGES_TOGETHER, Int32)
    pages = cute.make_rmem_tensor(PAGES_TOGETHER, Int32)
    for index in cutlass.range(share.first, share.end, PAGES_TOGETHER * WARP_SIZE, unroll=1):
        for i in cutlass.range_constexpr(PAGES_TOGETHER):
            at = index + i * WARP_SIZE
            positions[i], pages[i] = at, Int32(0)
            if at < share.end:
                if ranked:
                    positions[i] = share.ids[at]
                if has_pages:
                    pages[i] = (line + (positions[i] >> emit.PAGE_BITS)).load()
        for i in cutlass.range_constexpr(PAGES_TOGETHER):
            at = index + i * WARP_SIZE
            if at < share.end:
                if not ranked:
                    exists = not has_pages or (pages[i] >= 0 and pages[i] < output.num_pages)
                    share.keys[at] = Int32(exists)
                id_ = positions[i] + first
                if output.slots != 0:
                    id_ = (pages[i] << emit.PAGE_BITS) + (id_ & (PAGE_SIZE - 1))
                share.ids[at] = id_


@cute.jit
def keep_best(share: Share, x: cuts.Part, cut: cuts.Cut, topk: Int32) -> None:
    """Let only the best `topk` entries of the list win."""
    bins, lane = x.memory.bins.array(Int32, sizes.RANK_BINS), x.lane
    low, high, above, within = cut
    while above + within > topk and low < high:
        shift = sort_keys.step_bits(high - low, cuts.BIN_BITS)
        cuts.clear_bins(x)
        for group in cutlass.range(share.groups, unroll=1):
            key = key_at(share, group)
            if sort_keys.between(key, low, high - low):
                lists.count_at(bins, Int32((key - low) >> Uint32(shift)))
        cute.arch.sync_threads()  # all candidates are counted
        chosen, above, within = cuts.choose_bin(x, Int32(0), topk, above)
        low, high = sort_keys.step_at(low, high, shift, chosen)
        cute.arch.sync_threads()  # all have read the counts
    allowed = Int32(within)
    if above + within > topk:  # of equal entries the first ones win
        mine = Int32(0)
        for group in cutlass.range(share.groups, unroll=1):
            mine += Int32(key_at(share, group) == low)
        before, _ = cuts.before_warp(x, cute.arch.warp_redux_sync(mine, "add"), Int32(0))
        allowed = topk - above - before
    seen, below = Int32(0), Int32(cute.arch.lanemask_lt())
    for group in cutlass.range(share.groups, unroll=1):
        key = key_at(share, group)
        same = Int32(cute.arch.vote_ballot_sync(sort_keys.between(key, low, high - low)))
        late = same >> lane & 1 == 1 and seen + Int32(cute.arch.popc(same & below)) >= allowed
        if key < low or late:
            if share.first + group * WARP_SIZE < share.end:
                share.keys[share.first + group * WARP_SIZE] = Int32(0)
        seen += Int32(cute.arch.popc(same))


@cute.jit
def write_ids(share: Share, x: cuts.Part, output: Output, row: Int32) -> None:
    """Write the winners' ids, then -1."""
    topk, below = Int32(output.ids.shape[1]), Int32(cute.arch.lanemask_lt())
    mine = Int32(0)
    for group in cutlass.range(share.groups, unroll=1):
        mine += Int32(key_at(share, group) != 0)
    to, total = cuts.before_warp(x, cute.arch.warp_redux_sync(mine, "add"), Int32(1))
    first_out = Int64(row) * topk
    ids, words = output.ids.iterator + first_out, output.words.iterator + first_out
    for group in cutlass.range(share.groups, unroll=1):
        key = key_at(share, group)
        winners = Int32(cute.arch.vote_ballot_sync(key != 0))
        if key != 0:
            at = to + Int32(cute.arch.popc(winners & below))
            (ids + at).store(share.ids[share.first + group * WARP_SIZE])
            if output.words.shape[0] > 0:
                (words + at).store(sort_keys.word_of(sort_keys.signed(key)))
        to += Int32(cute.arch.popc(winners))
    for at in cutlass.range(total + x.thread, topk, x.plan.threads, unroll=1):
        (ids + at).store(Int32(-1))
        if output.words.shape[0] > 0:
            (words + at).store(Int32(sort_keys.INVALID))


@cute.kernel
def rank_kernel(
    scores: cute.Tensor,
    counts: Any,
    levels: Any,
    spans: Spans,
    output: Output,
    unscored: Int32,
    cluster_size: Int32,
    together: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_rank`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(plan)
    topk, zero = Int32(output.ids.shape[1]), Int32(0)
    number = cta // cluster_size
    rank = cta - number * cluster_size
    if cluster_size > 1:
        cute.arch.cluster_arrive_relaxed()
    shared, rows = Int32(-1), spans.ends
    if together == 0:
        shared = long_row(spans, cta - rank, cluster_size, plan)
    # First the row that all CTAs of the cluster share, if any; then the CTA's own.
    for turn in cutlass.range(Int32(1) if shared < 0 else Int32(0), 2, unroll=1):
        row, peer, peers = shared, rank, cluster_size
        if turn == 1:
            row, peer, peers = number, rank, cluster_size
            if together == 0:
                row, peer, peers = cta, zero, Int32(1)
        start, length = span_of(spans, row)
        ranked = length > unscored
        few = length << spans.score_bits
        if const_expr(plan.of is Of.LISTED):
            few = listed_at_most(levels, length)
        most = (few + plan.part_entries - 1) // plan.part_entries
        peers = cutlass.min(peers, most) if ranked else Int32(1)
        if turn == 1 and (row == shared or row >= rows.count):
            peers = zero
        row = cutlass.min(row, rows.count - 1)
        each = (length + peers - 1) // cutlass.max(peers, Int32(1))
        begin = cutlass.min(peer * each, length)
        end = cutlass.min(begin + each, length)
        line, of_row = scores.iterator + (Int64(row) * scores.stride[0] + start), None
        if const_expr(plan.of is Of.CACHE):
            of_row = counts.iterator + Int64(row) * sizes.RANK_BINS
        if const_expr(plan.in_levels):
            room = scores.shape[1] - start
            line = level_row(levels, line, room, rows, row, begin, end, length - 1)
        cut, entries = cuts.Cut(Uint32(0), Uint32(0), zero, zero), length
        me, listed = (peer, peers, rank - peer, thread, memory, static.Static(plan)), None
        if const_expr(plan.of is Of.LISTED):
            listed = no_list(memory, plan)
        x = cuts.Part(line, of_row, listed, begin, end, *me)
        if ranked and peer < peers:
            if peers > 1:  # of one turn at most
                # All CTAs of the cluster run, so that their memory may be written.
                cute.arch.cluster_wait()
            counted = None
            if const_expr(plan.of is Of.CACHE):
                # The launch that scores, which this one may follow early, has ended.
                cute.arch.griddepcontrol_wait()
                counted = counts.shape[0] > 0
            if const_expr(plan.of is Of.LISTED):
                listed = list_blocks(line, listed, thread, plan)
                if listed.count >= 0:
                    begin, end = zero, listed.count << levels.block_bits
                x = cuts.Part(line, of_row, listed, begin, end, *me)
            block = cuts.load_block(cute.make_rmem_tensor(plan.together, Float32), x, begin)
            cut = cuts.find_cut(x, topk, counted)
            entries = list_row(block, x, topk, cut, counted)
        if peer == 0 and peers > 0:
            share = share_of(x, entries)
            first = zero if const_expr(plan.of is Of.BLOCKS) else start
            name_entries(share, ranked, first, output, rows, row)
            if entries > topk:
                keep_best(share, x, cut, topk)
            write_ids(share, x, output, row)
        cute.arch.sync_threads()  # the list has been read


@cute.jit
def launch_rank(
    plan: cutlass.Constexpr,
    stream: Any,
    scores: cute.Tensor,
    starts: cute.Tensor,
    ends: cute.Tensor,
    table: cute.Tensor,
    num_pages: Int32,
    slots: Int32,
    unscored: Int32,
    *rest: Any,
):
    """Launch on `stream`. Scores of a cache: early, before the launch before it, which writes them
    and their counts and nothing else that this one reads, has ended.

    Args:
        scores: (B, max_len) fp32 of entries or of tokens, any distance between rows.
        starts: (B,) int32, the column of each row's first token; (0,): 0. A score is a token's.
        ends: (B,) int32, one past the last token; both are clamped to the scores.
        table: (B / next_n, max_pages) int32, any distance between rows; (0, 0): no pages.
        num_pages: of the cache. slots: 1: ids are slots of the cache; 0: columns, or blocks of
            the row.
        unscored: entries up to which a row's scores are not read, at most topk; all of them win.
        rest:
        of a cache
            counts: (n,) int32, RANK_BINS a row, its scores in each bin, set to 0; (0,): they are
                counted here.
        of two levels
            candidates: (B, n) int32 ids of blocks, in any order, anything beyond the row; (B, 0)
                for blocks. A part's blocks are at most `plan.most_blocks`.
            block_bits: binary logarithm of a block's tokens.
            score_bits: of the scores that a block has in `scores`.
        and at last
            ids: (B, topk) int32, written: up to 2,048 a row, by position, then -1.
            words: (B, topk) int32, written: words of the ids' scores, for `launch_order`; (0, 0):
                none.
            cluster_size: CTAs of a cluster, 1 to 8.
            together: 1: a cluster has a row; 0: each of its CTAs has one, and all share a long one.
    """
    *kind, ids, words, cluster_size, together = rest
    output = Output(ids, words, table, num_pages, slots)
    counts, levels = None, None
    room, block_bits, row_bits = Int32(scores.shape[1]), Int32(0), Int32(0)
    if const_expr(plan.of is Of.CACHE):
        counts = kind[0]
    if const_expr(plan.in_levels):
        candidates, bits, score_bits = kind
        levels = Levels(candidates, table, num_pages, bits, score_bits)
        if const_expr(plan.of is Of.BLOCKS):
            room, block_bits, row_bits = room << (bits - score_bits), bits, score_bits
    clusters = ends.shape[0]
    spans = Spans(Rows(ends, clusters, room, table.shape[0]), starts, block_bits, row_bits)
    if together == 0:
        clusters = (clusters + cluster_size - 1) // cluster_size
    grids.launch_ctas(
        rank_kernel(scores, counts, levels, spans, output, unscored, cluster_size, together, plan),
        clusters * cluster_size,
        plan.threads,
        stream,
        cluster=cluster_size,
        sm_ctas=plan.ctas,
        carveout=CARVEOUT,
        use_pdl=plan.of is Of.CACHE,
    )


def compile_rank(plan: RankPlan) -> Any:
    """Compile `launch_rank`."""
    rows, width, requests, pages, topk = fake.symbols(5)
    counted, starts, listed, ordered, words = fake.symbols(5)
    kind: tuple[Any, ...] = ()
    if plan.of is Of.CACHE:
        kind = (fake.fake_tensor(Int32, (counted,)),)
    if plan.in_levels:
        kind = fake.rows_apart(Int32, rows, listed), Int32(1), Int32(1)
    return compile_options.compile_launch(
        SM90,
        launch_rank,
        plan,
        fake.rows_apart(Float32, rows, width),
        fake.words(starts),
        fake.words(rows),
        fake.rows_apart(Int32, requests, pages),
        *(Int32(1) for _ in range(3)),
        *kind,
        fake.words(rows, topk),
        fake.words(ordered, words),
        Int32(1),
        Int32(1),
    )
