"""The keys among which a row's topk-th best entry is, found by the CTAs that have parts of it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from flashdsa.dsl import gmem, smem
from flashdsa.dsl.cluster import add_to_peer, peer_address, store_to_peer
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.static import Static
from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select import lists, sort_keys
from flashdsa.kernels.indexer.sizes import RANK_BINS, RANK_MANTISSA
from flashdsa.kernels.indexer.sm90.rank.levels import load_block_scores, token_of, token_score
from flashdsa.kernels.indexer.sm90.rank.plan import LARGEST_CLUSTER, WORD, Of

BIN_BITS = RANK_BINS.bit_length() - 1


class Part(NamedTuple):
    """A thread and its CTA's part of a row."""

    line: Any  # pointer to the row's first score; of two levels a LevelRow
    counts: Any  # pointer to the row's counts in device memory, RANK_BINS words
    listed: Any  # `Listed`, levels.py; None
    begin: Int32  # of its entries
    end: Int32
    peer: Int32  # the CTA's number in the row
    peers: Int32  # CTAs of the row
    rank: Int32  # in the cluster, of the first of them
    thread: Int32
    memory: Memory
    static: Static  # the plan

    @property
    def plan(self) -> Any:
        return self.static.value

    @property
    def lane(self) -> Int32:
        return self.thread % WARP_SIZE

    @property
    def warp(self) -> Int32:
        return self.thread // WARP_SIZE


class Cut(NamedTuple):
    """The keys among which the row's topk-th best one is."""

    low: Uint32
    high: Uint32
    above: Int32  # entries of the row with better keys
    within: Int32  # entries with such keys


@cute.jit
def meet(peers: Int32) -> None:
    """All threads of the row's CTAs: what they wrote to shared memory may be read by all."""
    if peers > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


class Block(NamedTuple):
    """Entries of a part that its threads have in registers; a warp has neighbouring ones."""

    first: Int32  # position of the thread's first one; the others are WARP_SIZE each apart
    end: Int32  # position after the warp's last one
    scores: cute.Tensor  # NaN where there is no entry


@cute.jit
def load_block(scores: cute.Tensor, x: Part, begin: Int32) -> Block:
    """Load the block of the part that begins there, none at the part's end."""
    plan = x.plan
    size = cutlass.min(x.end - begin, Int32(plan.together * plan.threads))
    groups = (size + plan.threads - 1) // plan.threads
    first = begin + x.warp * groups * WARP_SIZE
    end = cutlass.min(first + groups * WARP_SIZE, x.end)
    first += x.lane
    if const_expr(plan.of is Of.BLOCKS):
        load_block_scores(scores, x.line, first, end, plan.together)
    else:
        for i in cutlass.range_constexpr(plan.together):
            scores[i] = Float32.nan
            if first + i * WARP_SIZE < end:
                if const_expr(plan.of is Of.LISTED):
                    scores[i] = token_score(x.line, x.listed, first + i * WARP_SIZE)
                else:
                    scores[i] = (x.line + (first + i * WARP_SIZE)).load()
    return Block(first, end, scores)


@cute.jit
def position_of(x: Part, entry: Int32) -> Int32:
    """The position in the row of an entry that may be chosen."""
    if const_expr(x.plan.of is Of.LISTED):
        entry = token_of(x.line, x.listed, entry)
    return entry


@cute.jit
def key_in(block: Block, i: cutlass.Constexpr, plan: cutlass.Constexpr) -> Uint32:
    """The key of the thread's i-th entry; 0: it has none, or it is no token."""
    key = sort_keys.sortable(block.scores[i])
    if const_expr(plan.of is not Of.SCORES):
        if block.scores[i].bitcast(Int32) == sort_keys.INVALID:
            key = Uint32(0)
    return key if block.first + i * WARP_SIZE < block.end else Uint32(0)


@cute.jit
def clear_bins(x: Part) -> None:
    """Set the CTA's bins to 0, and the totals if it shares the row; synced."""
    both, bins = x.memory.bins.array(Int32, 2 * RANK_BINS), Int32(RANK_BINS)
    smem.clear(both, x.thread, (bins + first_count(x)) // 4, x.plan.threads, 1)
    cute.arch.sync_threads()


@cute.jit
def first_count(x: Part) -> Int32:
    """Offset of the row's counts: of the bins of its only CTA, or of the totals after them."""
    return Int32(RANK_BINS) if x.peers > 1 else Int32(0)


@cute.jit
def count_part(x: Part, cut: Cut, shift: Int32) -> None:
    """Count the row's entries within the cut; a negative `shift`: all, by `bin_of`. Ends met."""
    plan = x.plan
    bins = x.memory.bins.array(Int32, RANK_BINS)
    clear_bins(x)
    scores = cute.make_rmem_tensor(plan.together, Float32)
    for begin in cutlass.range(x.begin, x.end, plan.together * plan.threads, unroll=1):
        block = load_block(scores, x, begin)
        for i in cutlass.range_constexpr(plan.together):
            key = key_in(block, i, plan)
            at = sort_keys.bin_of(key, RANK_MANTISSA)
            if shift >= 0:
                at = Int32((key - cut.low) >> Uint32(shift))
            if sort_keys.between(key, cut.low, cut.high - cut.low):
                lists.count_at(bins, at)
    meet(x.peers)  # the part is counted, and all totals are 0
    if x.peers > 1:
        totals = x.memory.totals.address()
        for at in cutlass.range(x.thread, RANK_BINS, plan.threads, unroll=1):
            count = bins[at]
            if count > 0:
                for peer in cutlass.range(x.peers, unroll=1):
                    add_to_peer(peer_address(totals + at * WORD, x.rank + peer), count)
        meet(x.peers)  # the row is counted


@cute.jit
def load_counts(x: Part) -> None:
    """Load the counts of the launch that scores to the bins; synced."""
    bins = x.memory.bins.array(Int32, RANK_BINS)
    for at in cutlass.range(x.thread, RANK_BINS // 4, x.plan.threads, unroll=1):
        four = cute.make_rmem_tensor(4, Int32)
        words = gmem.load4(x.counts + 4 * at)
        for i in cutlass.range_constexpr(4):
            four[i] = words[i]
        smem.store4(bins, at, four.load())
    cute.arch.sync_threads()


@cute.jit
def choose_bin(x: Part, first: Int32, topk: Int32, above: Int32) -> tuple[Int32, Int32, Int32]:
    """(bin of the topk-th best entry, entries above it, entries in it), the same in all threads;
    (-1, all entries, 0) if there are fewer. One sync.

    Args:
        first: the first bin, after those of the CTA. above: entries better than all counted ones.
    """
    counts = x.memory.bins.array(Int32, 2 * RANK_BINS)
    groups, lane = x.memory.groups.array(Int32, WARP_SIZE), x.lane
    for group in cutlass.range(x.warp, RANK_BINS // WARP_SIZE, x.plan.warps, unroll=1):
        total = cute.arch.warp_redux_sync(counts[first + group * WARP_SIZE + lane], "add")
        if lane == 0:
            groups[group] = total
    cute.arch.sync_threads()  # all groups are there
    last = Int32(WARP_SIZE - 1)
    mine = groups[last - lane]  # the first lanes have the best
    ends = above + prefix_sum(mine, lane)
    reached = cute.arch.vote_ballot_sync(ends >= topk)
    chosen, before, within = Int32(-1), cute.arch.shuffle_sync(ends, last), Int32(0)
    if reached != 0:
        found = lowest_bit(reached)
        at = (last - found) * WARP_SIZE + last - lane
        mine_before = cute.arch.shuffle_sync(ends - mine, found)
        mine = counts[first + at]
        ends = mine_before + prefix_sum(mine, lane)
        found = lowest_bit(cute.arch.vote_ballot_sync(ends >= topk))
        chosen = cute.arch.shuffle_sync(at, found)
        within = cute.arch.shuffle_sync(mine, found)
        before = cute.arch.shuffle_sync(ends, found) - within
    return chosen, before, within


@cute.jit
def find_cut(x: Part, topk: Int32, counted: Any) -> Cut:
    """Find keys that so few entries have that the list has room for them, or a single key."""
    zero, first = Int32(0), first_count(x)
    low, high, above, within = Uint32(sort_keys.LOWEST_KEY), Uint32(0xFFFFFFFF), zero, zero
    chosen, counts = Int32(-1), first
    if x.peers > 1 or x.end - x.begin > topk:  # else all entries win
        cut, shift = Cut(low, high, zero, zero), Int32(-1)
        if const_expr(counted is None):
            count_part(x, cut, shift)
        elif counted:
            load_counts(x)
            counts = zero
        else:
            count_part(x, cut, shift)
        chosen, above, within = choose_bin(x, counts, topk, zero)
        low = cutlass.max(sort_keys.lowest_key(chosen, RANK_MANTISSA), low)
        high = sort_keys.highest_key(chosen, RANK_MANTISSA)
    if chosen < 0:
        low, high = Uint32(sort_keys.LOWEST_KEY), Uint32(0)
    while within > x.plan.max_candidates and low < high:
        shift = sort_keys.step_bits(high - low, BIN_BITS)
        meet(x.peers)  # all have read the counts
        count_part(x, Cut(low, high, above, within), shift)
        chosen, above, within = choose_bin(x, first, topk, above)
        low, high = sort_keys.step_at(low, high, shift, chosen)
    return Cut(low, high, above, within)


@cute.jit
def before_warp(x: Part, count: Int32, turn: Int32) -> tuple[Int32, Int32]:
    """(sum of the warps before the caller's, of all warps) of a number that a warp has. One sync of
    the CTA; calls in a row have a `turn` of 0 and 1 by turns."""
    warps = x.plan.warps
    sums = x.memory.sums.array(Int32, 2 * warps)
    if x.lane == 0:
        sums[turn * warps + x.warp] = count
    # All threads: every warp's number is there. It is written again after another call's sync.
    cute.arch.sync_threads()
    other = Int32(0)
    if x.lane < warps:
        other = sums[turn * warps + x.lane]
    before = cute.arch.warp_redux_sync(other if x.lane < x.warp else Int32(0), "add")
    return before, cute.arch.warp_redux_sync(other, "add")


@cute.jit
def numbers_of_parts(x: Part, own: Int32, turn: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """(sum of the parts before the caller's, of all) of a number that a part has. Meets."""
    parts = x.memory.parts.array(Int32, 2 * LARGEST_CLUSTER)
    if x.peers > 1 and x.thread < x.peers:
        at = x.memory.parts.address() + WORD * (turn * LARGEST_CLUSTER + x.peer)
        store_to_peer(peer_address(at, x.rank + x.thread), own)
    meet(x.peers)
    other = own if x.lane == 0 else Int32(0)
    if x.peers > 1 and x.lane < x.peers:
        other = parts[turn * LARGEST_CLUSTER + x.lane]
    before = cute.arch.warp_redux_sync(other if x.lane < x.peer else Int32(0), "add")
    return before, cute.arch.warp_redux_sync(other, "add")


@cute.jit
def first_bits(mask: Int32, count: Int32) -> Int32:
    """The lowest `count` of a word's ones."""
    while Int32(cute.arch.popc(mask)) > cutlass.max(count, Int32(0)):
        mask = mask ^ (Int32(1) << (Int32(WARP_SIZE - 1) - Int32(cute.arch.clz(mask))))
    return mask
