"""The warps that rank a query together, their shared memory, and searches in bins."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.smem import load4, store4
from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.keys import reach
from flashdsa.kernels.indexer.sm90.prefill.memory import PrefillMemory
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, ROUND_BINS

FIRST_TEAM = 2
"""The named barrier of the first team."""
SCRATCH_COUNT, SCRATCH_SURE, SCRATCH_LOW, SCRATCH_HIGH = range(4)
SCRATCH_WINNERS, SCRATCH_PHASES = 4, 5
"""If CTAs share tiles: winners among the candidates of the CTAs before, and phases of messages."""
BINS_READ = 4 * WARP_SIZE
"""Bins that a warp reads at once."""


class Team(NamedTuple):
    """A team, as one of its warps sees it."""

    memory: PrefillMemory
    number: Int32
    member: Int32  # the calling warp
    lane: Int32
    masks: cute.Tensor  # (plan.masks,) Int32: a bit for each entry
    maybes: cute.Tensor  # likewise
    rounds: cute.Tensor  # (ROUND_BINS,) Int32
    keys: cute.Tensor  # (CANDIDATES,) Int32, the first half of the same
    indices: cute.Tensor  # (CANDIDATES,) Int32, the second one
    scratch: cute.Tensor  # (scratch_words,) Int32

    @property
    def plan(self) -> Any:
        """The plan."""
        return self.memory.plan


@cute.jit
def team_of(memory: PrefillMemory, thread: Int32, plan: cutlass.Constexpr) -> Team:
    """The calling warp's team."""
    warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
    number = warp // plan.team_warps
    return Team(
        memory,
        number,
        warp % plan.team_warps,
        thread % WARP_SIZE,
        memory.masks.array(Int32, plan.masks, number),
        memory.maybes.array(Int32, plan.masks, number),
        memory.candidates.array(Int32, ROUND_BINS, number),
        memory.candidates.array(Int32, CANDIDATES, 2 * number),
        memory.candidates.array(Int32, CANDIDATES, 2 * number + 1),
        memory.scratch.array(Int32, plan.scratch_words, number),
    )


@cute.jit
def team_sync(team: Team) -> None:
    """Sync the team's warps; it orders their accesses to memory."""
    plan = team.plan
    if cutlass.const_expr(plan.team_warps == 1):
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(
            barrier_id=FIRST_TEAM + team.number, number_of_threads=plan.team_warps * WARP_SIZE
        )


@cute.jit
def clear(team: Team, histogram: cute.Tensor, bins: cutlass.Constexpr) -> None:
    """Set all bins to 0, by all warps of the team; the caller syncs before and after."""
    plan = team.plan
    nothing = cute.make_rmem_tensor(4, Int32)
    nothing.fill(0)
    for i in cutlass.range_constexpr(bins // BINS_READ // plan.team_warps):
        at = (team.member + i * plan.team_warps) * WARP_SIZE + team.lane
        store4(histogram, at, nothing.load())


class Found(NamedTuple):
    """The bin that has the k-th best entry."""

    bin: Int32
    above: Int32  # entries in the bins above
    within: Int32  # entries in it


@cute.jit
def find_bin(histogram: cute.Tensor, bins: cutlass.Constexpr, k: Int32, lane: Int32) -> Found:
    """Find the bin of the k-th best in a histogram of at least k entries; all lanes get it."""
    totals = []
    for row in cutlass.range_constexpr(bins // BINS_READ):
        counts = load4(histogram, row * WARP_SIZE + lane)
        mine = counts[0] + counts[1] + counts[2] + counts[3]
        totals.append(Int32(cute.arch.warp_redux_sync(mine, "add")))
    row, above, so_far = Int32(0), Int32(0), Int32(0)
    for back in cutlass.range_constexpr(bins // BINS_READ - 1):
        so_far += totals[bins // BINS_READ - 1 - back]
        row += Int32(1) if so_far >= k else Int32(0)
        above = so_far if so_far < k else above
    counts = load4(histogram, row * WARP_SIZE + lane)
    mine = counts[0] + counts[1] + counts[2] + counts[3]
    # Entries above this lane's bins: those of the higher lanes.
    through = prefix_sum(mine, lane)
    above += cute.arch.shuffle_sync(through, WARP_SIZE - 1) - through
    crosses = above < k and above + mine >= k
    index, above, within = reach(counts, above, k)
    source = lowest_bit(Int32(cute.arch.vote_ballot_sync(crosses)))
    return Found(
        cute.arch.shuffle_sync(row * BINS_READ + 4 * lane + index, source),
        cute.arch.shuffle_sync(above, source),
        cute.arch.shuffle_sync(within, source),
    )


@cute.jit
def number_of_ones(team: Team, begin: Int32, end: Int32) -> Int32:
    """Ones in the masks of the words `begin` to `end` - 1; every warp counts them itself."""
    ones = Int32(0)
    for i in cutlass.range(begin + team.lane, end, WARP_SIZE, unroll=4):
        ones += Int32(cute.arch.popc(team.masks[i]))
    return Int32(cute.arch.warp_redux_sync(ones, "add"))


def address_of(array: cute.Tensor) -> Int32:
    """The array's address in shared memory."""
    return Int32(array.iterator.toint())
