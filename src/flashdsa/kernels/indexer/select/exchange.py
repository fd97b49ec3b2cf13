"""One round of the search for the k-th best: counts of all CTAs that share a row, bin by bin.

Rows of the paged indexer (tiles.py) and queries of shared keys (sm90/prefill/together.py) are
searched by the same verbs. Each CTA sends its counts of groups of 32
bins to all (`coarse`), finds the group of the k-th best, sends its counts of that group's bins
(`fine`), and finds the bin. All find the same bin.

Messages are st.async: they count up bytes of the receiver's mbarrier, so that neither a fence nor a
barrier of the cluster is needed. INVARIANT: a buffer has been read before its next message can
come. A sender's `coarse` of the next round comes after it has this CTA's `fine` of this round,
which this CTA sent after its reads of `coarse`; and its next `fine` comes after it has this CTA's
next `coarse`, which this CTA sends after its reads of `fine`.

One warp searches: an instruction of all sixteen takes four times as long. A CTA that selects in its
part alone looks into its own counts instead.
"""

from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.warp import first_lane_where, neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.sort_keys import reach
from flashdsa.kernels.indexer.sizes import BIN_GROUP
from flashdsa.kernels.indexer.smem_views import Scratch

WORD = 4
LOADED_TOGETHER = 4
"""CTAs whose counts are asked for before the first of them is added."""


COUNTED, GATHERED = EVENTS = ("counted", "gathered")
"""Events whose phases a consumer keeps: coarse_full and fine_full, received_full."""


class Searcher(Protocol):
    """One of the threads of a CTA that search together."""

    @property
    def select(self) -> Any:
        """Memory of these threads: `histogram` (bins,) and `scratch`, both Int32."""

    @property
    def cluster(self) -> Any:
        """Messages: `ClusterBuffers`, or its fields that this module names."""

    @property
    def coord(self) -> Any:
        """`part`, `num_parts` and `first_rank` of `Coord`."""

    @property
    def thread(self) -> Int32:
        """The caller, from 0."""

    @property
    def threads(self) -> int:
        """Number of the threads, whole warps."""

    @property
    def bins(self) -> int:
        """Bins of the histogram, at most 4096."""

    @property
    def most_parts(self) -> int:
        """CTAs that may share a row."""

    def sync(self) -> None:
        """Sync the threads; it orders their accesses to memory."""


class Found(NamedTuple):
    """Result of a round."""

    bin: Int32  # the bin of the k-th best; bin 0 if the entries are fewer
    above: Int32  # entries in better bins
    within: Int32  # entries in the bin
    total: Int32  # entries in all bins


@cute.jit
def sum_groups(s: Searcher) -> None:
    """Sum the histogram's groups of bins into `own_coarse`; the caller syncs."""
    select, cluster, thread = s.select, s.cluster, s.thread
    vectors = s.bins // VECTOR // s.threads  # of a thread
    lanes = BIN_GROUP // VECTOR // vectors
    mine = Int32(0)
    for i in cutlass.range_constexpr(vectors):
        # Eight neighbours, which have four or eight vectors each, read all banks.
        turn = (i + thread // lanes) % vectors if const_expr(vectors >= VECTOR) else i
        four = load4(select.histogram, vectors * thread + turn)
        mine += four[0] + four[1] + four[2] + four[3]
    mine = neighbours_sum(mine, lanes)
    if thread % lanes == 0:
        cluster.own_coarse[thread // lanes] = mine


@cute.jit
def send_coarse(s: Searcher) -> None:
    """Send the counts of all groups to every CTA's `coarse`. Lanes of one warp send to a CTA: their
    bytes arrive sooner together than in pieces from all warps."""
    cluster, coord, thread = s.cluster, s.coord, s.thread
    groups = s.bins // BIN_GROUP
    messages = groups // VECTOR  # to a CTA
    assert const_expr(messages <= WARP_SIZE)
    lane = thread % messages
    peer = thread // messages
    four = load4(cluster.own_coarse, lane)
    words = [four[i] for i in range(VECTOR)]
    dst = (cluster.coarse.iterator + (coord.part * groups + VECTOR * lane)).align(VECTOR * WORD)
    peers = s.threads // messages  # at the same time
    if const_expr(peers >= s.most_parts):
        if peer < coord.num_parts:
            send(dst, words, cluster.coarse_full.at(), coord.first_rank + peer)
    else:
        for other in cutlass.range(peer, coord.num_parts, peers, unroll=1):
            send(dst, words, cluster.coarse_full.at(), coord.first_rank + other)


@cute.jit
def send_fine(s: Searcher, first: Int32, lane: Int32) -> None:
    """One warp: send the counts of a group's bins, from bin `first` on, to every CTA's `fine`."""
    select, cluster, coord = s.select, s.cluster, s.coord
    messages = BIN_GROUP // VECTOR
    message = lane % messages
    four = load4(select.histogram, first // VECTOR + message)
    words = [four[i] for i in range(VECTOR)]
    dst = (cluster.fine.iterator + (coord.part * BIN_GROUP + message * VECTOR)).align(VECTOR * WORD)
    for peer in cutlass.range(lane // messages, coord.num_parts, WARP_SIZE // messages, unroll=4):
        send(dst, words, cluster.fine_full.at(), coord.first_rank + peer)


@cute.jit
def find_group(
    s: Searcher, shared: cutlass.Boolean, k: Int32, phase: Int32, lane: Int32
) -> tuple[Int32, Int32, Int32]:
    """One warp, four groups a lane, lane 0 the best: (the group of the `k`-th best or the lowest
    one, entries above it, all entries)."""
    cluster, coord = s.cluster, s.coord
    quads = s.bins // BIN_GROUP // VECTOR
    quad = Int32(quads - 1) - lane
    has_groups = cutlass.Boolean(True)
    if const_expr(quads < WARP_SIZE):
        has_groups = quad >= 0
        quad = cutlass.max(quad, Int32(0))
    counts = cute.make_rmem_tensor(VECTOR, Int32)
    counts.fill(0)
    if shared:
        # coarse_full, the round's phase: every CTA's counts have come (st.async), and `coarse` may
        # be read until this CTA sends `fine`.
        cluster.coarse_full.wait(phase)
        for block in cutlass.range(0, coord.num_parts, LOADED_TOGETHER, unroll=1):
            for ahead in cutlass.range_constexpr(LOADED_TOGETHER):
                peer = cutlass.min(block + ahead, coord.num_parts - 1)
                four = load4(cluster.coarse, peer * quads + quad)
                present = Int32(block + ahead < coord.num_parts)
                if const_expr(quads < WARP_SIZE):
                    present = Int32(has_groups and block + ahead < coord.num_parts)
                for i in cutlass.range_constexpr(VECTOR):
                    counts[i] += present * four[i]
    else:
        counts.store(load4(cluster.own_coarse, quad))
        if const_expr(quads < WARP_SIZE):
            counts.store(counts.load() * Int32(has_groups))
    inclusive = prefix_sum(counts[0] + counts[1] + counts[2] + counts[3], lane)
    above = inclusive - counts[0] - counts[1] - counts[2] - counts[3]
    found = first_lane_where(above < k and inclusive >= k)
    within, above, _ = reach(counts, above, k)
    return (
        cute.arch.shuffle_sync(VECTOR * quad + within, found),
        cute.arch.shuffle_sync(above, found),
        cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1),
    )


@cute.jit
def search(s: Searcher, shared: cutlass.Boolean, k: Int32, phase: Int32, lane: Int32) -> None:
    """One warp: write what a round finds into scratch: bin 0 if the entries are fewer than `k`."""
    select, cluster, coord = s.select, s.cluster, s.coord
    group, above, total = find_group(s, shared, k, phase, lane)
    first = group * BIN_GROUP
    bin_ = Int32(BIN_GROUP - 1) - lane  # of the group, lane 0 the best
    count = Int32(0)
    if shared:
        send_fine(s, first, lane)
        # fine_full, the round's phase: every CTA's counts of the group have come, and `fine` may be
        # read until this CTA sends its next `coarse`.
        cluster.fine_full.wait(phase)
        for block in cutlass.range(0, coord.num_parts, LOADED_TOGETHER, unroll=1):
            for ahead in cutlass.range_constexpr(LOADED_TOGETHER):
                peer = cutlass.min(block + ahead, coord.num_parts - 1)
                own = cluster.fine[peer * BIN_GROUP + bin_]
                count += own if block + ahead < coord.num_parts else Int32(0)
    else:
        count = select.histogram[first + bin_]
    inclusive = above + prefix_sum(count, lane)
    if lane == first_lane_where(inclusive - count < k and inclusive >= k):
        found = Found(first + bin_, inclusive - count, count, total)
        for i in cutlass.range_constexpr(len(Found._fields)):
            select.scratch[Scratch.FOUND + i] = found[i]


@cute.jit
def find_kth(s: Searcher, shared: cutlass.Boolean, k: Int32, phase: Int32) -> Found:
    """Find the bin of the `k`-th best (1 = best) among the entries of all CTAs of the group, or of
    the caller if not `shared`. Ends synced. The histogram is complete and synced, and keeps its
    counts."""
    select, cluster, coord, thread = s.select, s.cluster, s.coord, s.thread
    assert const_expr(s.bins % (s.threads * VECTOR) == 0)
    groups = s.bins // BIN_GROUP
    if shared and thread == 0:
        for barrier, counts in ((cluster.coarse_full, groups), (cluster.fine_full, BIN_GROUP)):
            barrier.arrive_and_expect_tx(coord.num_parts * (counts * WORD))
    sum_groups(s)
    # All that search: own_coarse is complete.
    s.sync()
    if shared:
        send_coarse(s)
    if thread < WARP_SIZE:
        search(s, shared, k, phase, thread)
    # All that search: the first warp has stored the result.
    s.sync()
    return Found(*(select.scratch[Scratch.FOUND + i] for i in range(len(Found._fields))))


@cute.jit
def own_above(s: Searcher, bin_: Int32, lane: Int32) -> Int32:
    """One warp: return the number of the caller's entries in better bins than a round's bin."""
    select, cluster = s.select, s.cluster
    quads = s.bins // BIN_GROUP // VECTOR
    four = load4(cluster.own_coarse, lane % quads if const_expr(quads < WARP_SIZE) else lane)
    counts = [four[i] for i in range(VECTOR)]
    above = Int32(0)
    for i in cutlass.range_constexpr(VECTOR):
        above += counts[i] if VECTOR * lane + i > bin_ // BIN_GROUP else Int32(0)
    if const_expr(quads < WARP_SIZE):
        if lane >= quads:
            above = Int32(0)
    if lane > bin_ % BIN_GROUP:
        above += select.histogram[bin_ // BIN_GROUP * BIN_GROUP + lane]
    return cute.arch.warp_redux_sync(above, "add")


@cute.jit
def within_before(s: Searcher, shared: cutlass.Boolean, bin_: Int32, lane: Int32) -> Int32:
    """One warp: return the number of entries in a round's bin, of the CTAs before the caller."""
    cluster, coord = s.cluster, s.coord
    within = Int32(0)
    if shared and lane < coord.part:
        within = cluster.fine[lane * BIN_GROUP + bin_ % BIN_GROUP]
    return cute.arch.warp_redux_sync(within, "add")


@cute.jit
def send_above(s: Searcher, above: Int32, lane: Int32) -> None:
    """One warp: send the number of the caller's entries above the last round's bin to every CTA of
    the group."""
    cluster, coord = s.cluster, s.coord
    if lane < coord.num_parts:
        send(
            cluster.above.iterator + coord.part,
            [above],
            cluster.received_full.at(),
            coord.first_rank + lane,
        )


@cute.jit
def above_before(s: Searcher, lane: Int32) -> Int32:
    """One warp, after the wait for received_full: return what the CTAs before the caller sent."""
    cluster, coord = s.cluster, s.coord
    above = Int32(0)
    if lane < coord.part:
        above = cluster.above[lane]
    return cute.arch.warp_redux_sync(above, "add")
