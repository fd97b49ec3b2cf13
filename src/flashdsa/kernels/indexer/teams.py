"""Rows in pairs: each half of the consumers, a *team*, selects in a row of its own.

All consumers score pages together (score_together.py); select/by_pairs.py is what a team does.
"""

from typing import Any

from cutlass import Int32, Int64, cute

from flashdsa.dsl.static import Static
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.plan import TeamPlan
from flashdsa.kernels.indexer.score_batch import PageSource
from flashdsa.kernels.indexer.score_together import (
    TogetherSource,
    memory_of,
    score_together,
    select_buffers_of,
)
from flashdsa.kernels.indexer.select.by_pairs import select_by_team
from flashdsa.kernels.indexer.select.published import Published
from flashdsa.kernels.indexer.select.tiles import select_tiles
from flashdsa.kernels.indexer.sizes import ROW_COUNTERS
from flashdsa.kernels.indexer.smem_views import ClusterBuffers, IndexerMemory, cluster_buffers_in


@cute.jit
def select_in_teams(
    s: Selecting,
    memory: IndexerMemory,
    pages: PageSource,
    num_ctas: Int32,
) -> None:
    """Role select for rows in pairs: select in each team's, in its own memory.

    Args:
        s: of the whole CTA.
    """
    thread, plan = s.thread, s.plan
    one = TeamPlan(plan)
    team = cute.arch.make_warp_uniform(thread // one.consumer_threads)
    mine = thread % one.consumer_threads
    source = TogetherSource(pages, memory, thread, Static(plan))
    team_s = s._replace(
        select=select_buffers_of(memory, team, plan),
        cluster=cluster_buffers_of(memory, team, plan),
        published=published_of(s.published, team, num_ctas, plan),
        thread=mine,
        static=Static(one),
        team=team,
    )
    select_tiles(team_s, source, score_together, select_by_team)


def published_of(published: Published, team: Int32, num_ctas: Int32, plan: Any) -> Published:
    """Device memory of a team's rows: counters and slots of the first team come first."""
    arrivals = published.arrivals.iterator + team * num_ctas * ROW_COUNTERS
    slots = [
        cute.make_tensor(words.iterator + Int64(2 * team * num_ctas) * words.shape[1], words.layout)
        for words in published[1:]
    ]
    return Published(cute.make_tensor(arrivals, published.arrivals.layout), *slots)


def cluster_buffers_of(memory: IndexerMemory, team: Int32, plan: Any) -> ClusterBuffers:
    """Return the buffers to which the same teams of other CTAs write."""
    return cluster_buffers_in(memory_of(memory, team), plan)._replace(
        coarse_full=memory.coarse_full.behind(team),
        fine_full=memory.fine_full.behind(team),
        received_full=memory.received_full.behind(team),
    )
