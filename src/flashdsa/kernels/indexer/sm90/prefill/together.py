"""The end of a segment where the CTAs of a cluster share a tile: each has the scores of a stretch
of its keys, and all rank the query together.

Before its last segment a CTA keeps in its log what may be among the best of its own stretch, as if
it were alone. At the last one the CTAs find the bin of the topk-th best of all by exchange.py's
rounds: first in the bins that were counted with the scores; then, if the bin has too many, in bins
of a range of keys. All get the entries of the last bin, the candidates, and compare them. So each
knows which of its own entries win, and how many of the CTAs before it do, which are its rows'
places.

A CTA may leave behind the last message to it, and every message of a round is waited for in it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.dsl import pipeline, static
from flashdsa.dsl.cluster import send
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select import exchange
from flashdsa.kernels.indexer.select.sort_keys import (
    LOWEST,
    MAGNITUDE,
    key_of,
    step_at,
    step_bits,
    word_of,
)
from flashdsa.kernels.indexer.sizes import BIN_GROUP
from flashdsa.kernels.indexer.sm90.prefill import emit, marks, segments, teams
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, CHUNK_MASKS
from flashdsa.kernels.indexer.sm90.prefill.tiles import Tile

ENTRY_BITS = 16
"""Bits of an entry's index in its CTA; above them a candidate has the CTA's rank."""
CANDIDATE_BYTES = 8
"""Bytes of a candidate: its key, and its rank and index."""


class Counted(NamedTuple):
    """A team's bins and counters."""

    histogram: cute.Tensor  # (bins,) Int32, of the team's query
    scratch: cute.Tensor


class Messages(NamedTuple):
    """Messages to a team from the teams with its query in all CTAs of the cluster; senders are
    ranks. When they may be overwritten: see exchange.py, and smem_views.py."""

    coarse: cute.Tensor  # (most_parts * bin_groups,) Int32
    own_coarse: cute.Tensor  # (bin_groups,) Int32
    fine: cute.Tensor  # (most_parts * BIN_GROUP,) Int32
    above: cute.Tensor  # (most_parts,) Int32: entries above the last round's bin
    keys: cute.Tensor  # (CANDIDATES,) Int32, of the candidates of all CTAs
    indices: cute.Tensor  # (CANDIDATES,) Int32, with ranks: in the order of rows
    coarse_full: Any  # Barriers
    fine_full: Any
    received_full: Any


class Parts(NamedTuple):
    """The calling CTA among those that share tiles."""

    part: Int32
    num_parts: Int32
    first_rank: Int32


class Sharer(NamedTuple):
    """A thread of a team, as exchange.py's `Searcher`."""

    team: teams.Team
    select: Counted
    cluster: Messages
    coord: Parts
    thread: Int32  # of the team

    @property
    def plan(self) -> Any:
        return self.team.plan

    @property
    def threads(self) -> int:
        return int(self.plan.team_warps * WARP_SIZE)

    @property
    def bins(self) -> int:
        return int(self.plan.bins)

    @property
    def most_parts(self) -> int:
        return int(self.plan.most_parts)

    def sync(self) -> None:
        teams.team_sync(self.team)


def sharer_of(team: teams.Team) -> Sharer:
    """The calling thread."""
    memory, plan, number = team.memory, team.plan, team.number
    parts = plan.most_parts
    return Sharer(
        team,
        Counted(memory.histogram.array(Int32, plan.bins, number), team.scratch),
        Messages(
            coarse=memory.coarse.array(Int32, parts * plan.bin_groups, number),
            own_coarse=memory.own_coarse.array(Int32, plan.bin_groups, number),
            fine=memory.fine.array(Int32, parts * BIN_GROUP, number),
            above=memory.above.array(Int32, parts, number),
            keys=memory.received.array(Int32, CANDIDATES, 2 * number),
            indices=memory.received.array(Int32, CANDIDATES, 2 * number + 1),
            coarse_full=memory.coarse_full.behind(number),
            fine_full=memory.fine_full.behind(number),
            received_full=memory.received_full.behind(number),
        ),
        Parts(cute.arch.block_idx_in_cluster(), cute.arch.cluster_size(), Int32(0)),
        team.member * WARP_SIZE + team.lane,
    )


@cute.jit
def select_share(
    ctx: segments.SelectContext, team: teams.Team, tile: Tile, seen: segments.Seen, begin: Int32
) -> None:
    """Select the best of the team's query among the key tiles of a segment of this CTA's stretch,
    of which `begin` is the first; after the last one, with the other CTAs. Starts and ends
    synced."""
    if tile.first_query + seen.query < ctx.ranges.num_queries:
        # They come while the bin is searched.
        ahead = marks.load_ahead(team, seen.entries, segments.first_chunk(team, seen))
        topk = ctx.ranges.topk
        source = segments.source_of(ctx, team, tile, seen, begin)
        if seen.is_last:
            write_share(ctx, team, tile, source, seen, ahead)
        else:
            histogram = team.memory.histogram.array(Int32, team.plan.bins, seen.query)
            bounds = segments.own_bounds(team, seen, histogram, topk)
            logged = segments.log_best(team, source, seen, bounds, ahead, topk)
            count_log(team, seen.query, source.entries, logged)
    if seen.is_last:
        segments.clear_counts(team, seen.query)


@cute.jit
def count_log(team: teams.Team, query: Int32, entries: teams.Entries, logged: Int32) -> None:
    """Count the entries of the log, and no others: what was dropped is in no bin, so that bins and
    entries agree. Starts after a sync since bins were read; the next segment's scores are counted
    after a barrier of all warps that score."""
    plan = team.plan
    histogram = team.memory.histogram.array(Int32, plan.bins, query)
    windows = team.memory.windows.array(Float32, 2 * plan.tile_queries)
    factor, offset = windows[2 * query], windows[2 * query + 1]
    teams.clear(team, histogram, plan.bins)
    # The team: all bins are 0, and all warps have written what they log.
    teams.team_sync(team)
    log = teams.Entries(
        entries.words, entries.segment, segments.chunks_of(logged), segments.chunks_of(logged)
    )
    first = teams.address_of(histogram) - Int32(teams.FIRST_BIN_OFFSET)
    for chunk in cutlass.range(team.member, log.count, plan.team_warps, unroll=1):
        words = teams.load_chunk(log, chunk, team.lane)
        for i in cutlass.range_constexpr(teams.WORDS_EACH):
            teams.count(first + (teams.bin_bits(words[i], factor, offset, plan) << 2))


@cute.jit
def write_share(
    ctx: segments.SelectContext,
    team: teams.Team,
    tile: Tile,
    source: emit.Source,
    seen: segments.Seen,
    ahead: Any,
) -> None:
    """Write the rows of this CTA's winners to their places among those of all. Starts synced, ends
    not synced."""
    topk, s = ctx.ranges.topk, sharer_of(team)
    before = seen.before
    if seen.whole > topk:
        before = mark_together(s, source.entries, ahead, topk)
    else:
        marks.mark(
            team, source.entries, marks.Threshold(Int32(LOWEST), Int32(0), cutlass.Boolean(False))
        )
        teams.team_sync(team)
    own = teams.number_of_ones(team, Int32(0), source.entries.count * CHUNK_MASKS)
    end = own
    if s.coord.part == s.coord.num_parts - 1:
        end = topk - before  # the last one writes what no key is for, too
    query = tile.first_query + seen.query
    to = emit.row_of(ctx.topk_indices, query, topk) + before
    # Nothing is counted before the query's bins are cleared, so that indices may lie in them.
    emit.write_rows(team, source, teams.address_of(s.select.histogram), to, own, end)


class Cut(NamedTuple):
    """Entries of the bin that has the topk-th best."""

    keys: teams.KeyRange
    wanted: Int32  # of them, by all CTAs
    within: Int32  # of all CTAs
    before: Int32  # of the CTAs before
    own: Int32
    above: Int32  # this CTA's entries with greater keys


@cute.jit
def mark_together(s: Sharer, entries: teams.Entries, ahead: Any, k: Int32) -> Int32:
    """Mark this CTA's entries among the best `k` of all CTAs, which have more; return how many of
    the CTAs before it are. Starts and ends synced. ahead: result of `load_ahead`, overwritten."""
    team, coord = s.team, s.coord
    phases = pipeline.PackedPhases(
        s.select.scratch[teams.TeamScratch.PHASES], static.Static(exchange.EVENTS)
    )
    cut, phases = find_cut(s, entries, k, phases)
    compares = are_few(cut)
    if s.thread == 0:
        candidates = cut.within if compares else Int32(0)
        # received_full: its phase ends with this arrival and the last of these bytes, which may
        # come before it.
        expected = candidates * CANDIDATE_BYTES + coord.num_parts * 4
        s.cluster.received_full.arrive_and_expect_tx(expected)
    if team.member == s.plan.team_warps - 1:
        exchange.send_above(s, cut.above, team.lane)
    equal = cutlass.min(cutlass.max(cut.wanted - cut.before, Int32(0)), cut.own)
    if compares:
        bounds = teams.Bounds(
            word_of(cutlass.max(cut.keys.low, key_of(Int32(teams.NO_SCORE)))).bitcast(Float32),
            word_of(cut.keys.high + 1).bitcast(Float32),
            cutlass.Boolean(True),
        )
        first, end = emit.share_of(team, Int32(0), entries.count)
        marks.mark_chunks(team, entries, bounds, first, end, ahead, True)
        marks.collect(team, first, end)
        fill_up(s, cut.within)
        teams.team_sync(team)
        send_candidates(s, entries, cut)
    else:
        marks.mark(team, entries, marks.Threshold(cut.keys.low, equal, equal < cut.own))
    # received_full, the row's phase: every CTA's candidates and counts have come (st.async). They
    # may be read until this CTA sends its `coarse` counts of the next row.
    s.cluster.received_full.wait(phases.phase(exchange.GATHERED))
    phases = phases.passed(exchange.GATHERED)
    before = exchange.above_before(s, team.lane)
    if compares:
        mark_winners(s, cut)
    else:
        before += cutlass.min(cut.before, cut.wanted)
    # The team: all bits are set, and the winners of the CTAs before are counted.
    teams.team_sync(team)
    if compares:
        before += s.select.scratch[teams.TeamScratch.WINNERS]
    if s.thread == 0:
        s.select.scratch[teams.TeamScratch.PHASES] = phases.bits
    return before


@cute.jit
def find_cut(
    s: Sharer, entries: teams.Entries, k: Int32, phases: pipeline.PackedPhases
) -> tuple[Cut, pipeline.PackedPhases]:
    """Find the bin of the `k`-th best of all CTAs' entries, in rounds. Each narrows a range of keys
    to one of its bins, until that has few entries, or one key, or all of them win. Returns the
    events' phases, too. The histogram holds the bins of the entries in their window; it is
    destroyed. Starts and ends synced."""
    team, plan = s.team, s.plan
    lane, number = team.lane, team.number
    zero = Int32(0)
    cut = Cut(
        teams.KeyRange(Int32(LOWEST), Int32(MAGNITUDE)), k, Int32(MAGNITUDE), zero, zero, zero
    )
    in_window, searches = cutlass.Boolean(True), cutlass.Boolean(True)
    while searches:
        low, high = Uint32(cut.keys.low), Uint32(cut.keys.high)
        shift = step_bits(high - low, plan.bin_bits)
        if not in_window:
            count_again(s, entries, cut.keys, shift)
        found = exchange.find_kth(s, True, cut.wanted, phases.phase(exchange.COUNTED))
        phases = phases.passed(exchange.COUNTED)
        first, last = step_at(low, high, shift, found.bin)
        keys, usable = teams.KeyRange(Int32(first), Int32(last)), cutlass.Boolean(True)
        if in_window:
            keys, usable = teams.keys_of_bin(team.memory, number, found.bin, lane, plan)
        if usable:
            cut = Cut(
                keys,
                cut.wanted - found.above,
                found.within,
                exchange.within_before(s, True, found.bin, lane),
                s.select.histogram[found.bin],
                cut.above + exchange.own_above(s, found.bin, lane),
            )
        searches = not (are_few(cut) or cut.within == cut.wanted or cut.keys.low == cut.keys.high)
        in_window = cutlass.Boolean(False)
    return cut, phases


def are_few(cut: Cut) -> cutlass.Boolean:
    """Whether the bin's entries are compared: few, and none of them NaN."""
    return cutlass.Boolean(cut.within <= CANDIDATES) & cutlass.Boolean(cut.keys.low > LOWEST)


@cute.jit
def count_again(s: Sharer, entries: teams.Entries, range_: teams.KeyRange, shift: Int32) -> None:
    """Count the entries of a range of keys in its bins of 2**shift keys. Ends synced."""
    team, plan = s.team, s.plan
    teams.team_sync(team)  # everyone has read what the round before counted
    teams.clear(team, s.select.histogram, plan.bins)
    teams.team_sync(team)
    turns = teams.Turns(team.member, plan.team_warps)
    teams.count_range(
        entries, range_, shift, teams.address_of(s.select.histogram), turns, team.lane
    )
    teams.team_sync(team)


@cute.jit
def fill_up(s: Sharer, within: Int32) -> None:
    """Fill the candidates up to a multiple of `COMPARED` with keys below any, where no message
    comes."""
    padded = (within + marks.COMPARED - 1) // marks.COMPARED * marks.COMPARED
    for own in cutlass.range(within + s.thread, padded, s.threads, unroll=1):
        s.cluster.keys[own] = Int32(-MAGNITUDE - 1)
        s.cluster.indices[own] = Int32(0)


@cute.jit
def send_candidates(s: Sharer, entries: teams.Entries, cut: Cut) -> None:
    """Send this CTA's candidates to all CTAs: those of the CTAs before come first."""
    cluster, coord = s.cluster, s.coord
    for own in cutlass.range(s.thread, cut.own, s.threads, unroll=1):
        index = s.team.indices[own]
        word = teams.first_word(entries, index // CHUNK) + index % CHUNK
        key = key_of((entries.words + word).load())
        at, barrier = cut.before + own, cluster.received_full.at()
        for peer in cutlass.range(coord.num_parts, unroll=1):
            send(cluster.keys.iterator + at, [key], barrier, peer)
            ranked = coord.part << ENTRY_BITS | index
            send(cluster.indices.iterator + at, [ranked], barrier, peer)


@cute.jit
def mark_winners(s: Sharer, cut: Cut) -> None:
    """Set the bits of this CTA's candidates among the best ones, where of equal keys the first rows
    win; count those of the CTAs before. Ends not synced."""
    cluster, team, rank = s.cluster, s.team, s.coord.part
    masks, before = teams.address_of(team.masks), Int32(0)
    for own in cutlass.range(s.thread, cut.within, s.threads, unroll=1):
        key, ranked = cluster.keys[own], cluster.indices[own]
        better = marks.number_of_better(cluster.keys, cluster.indices, cut.within, key, ranked)
        if better < cut.wanted:
            owner, index = ranked >> ENTRY_BITS, ranked & (1 << ENTRY_BITS) - 1
            if owner == rank:
                marks.set_bit(masks + 4 * (index // WARP_SIZE), Int32(1) << index % WARP_SIZE)
            if owner < rank:
                before += 1
    before = Int32(cute.arch.warp_redux_sync(before, "add"))
    if team.lane == 0:
        counter = s.select.scratch.iterator + teams.TeamScratch.WINNERS
        cute.arch.atomic_add(counter, before, sem="relaxed", scope="cta")
