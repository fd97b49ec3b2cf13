"""The ways to serve a call of the indexer, and the choice among them, by sizes alone.

The host knows no lengths: a row may be as long as the block table is wide. Kernels that share rows
look at the lengths on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import inf
from typing import NamedTuple

from flashdsa.backends.reasons import Candidate, Choice, Estimate
from flashdsa.backends.runner import Runner, allowed_clusters
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.problem import PAGE_SIZE

# Measured on an H200: workbench/results/indexer/NOTES.md names the documents. Rows are counted for
# each SM, so that they scale with a GPU.
USUAL_CLUSTER = 13
"""The most CTAs without FLASHDSA_MAX_CLUSTER. A cluster starts when one GPC has as many free SMs.
132 SMs are in at most 8 GPCs, so that one has 13 free ones whichever 35 SMs other streams hold."""


class Kind(StrEnum):
    """The kernels that serve a call."""

    UNSCORED = "unscored"
    ROW = "row"
    SHARED = "shared"
    RANKED = "ranked"


SERVES = {
    Kind.UNSCORED: "tables without a row of more than topk tokens: nothing is scored",
    Kind.ROW: "few rows of a table that is not too wide: a cluster has a row",
    Kind.SHARED: "wide tables, and many rows: clusters share the rows by their lengths",
    Kind.RANKED: "two or four queries a request: a page is scored for two, then rows are ranked",
}
"""Calls that each kind is for, and what it does; `explain` says them."""


class Way(NamedTuple):
    """A way to serve a call."""

    kind: Kind
    clusters: int = 0  # of the fused launch; the others have what they need
    size: int = 0  # CTAs of each

    def __str__(self) -> str:
        """The kind and its clusters."""
        clusters = f", {self.clusters} clusters of {self.size}" if self.clusters else ""
        return f"{self.kind}{clusters}"


class Call(NamedTuple):
    """Sizes of a call; the width of its table comes later."""

    rows: int
    requests: int  # each has next_n neighbouring rows, which share a row of the table
    unscored_pages: int = -1  # of the widest table in which nothing is scored; -1: no kernel
    ranks: bool = False  # there are kernels that score and rank in two launches

    @property
    def next_n(self) -> int:
        """Neighbouring rows of a request."""
        return self.rows // max(self.requests, 1)


class Gpu(NamedTuple):
    """A GPU, as far as the choice asks."""

    num_sms: int
    clusters: Mapping[int, int]  # CTAs of a cluster -> clusters that run at once


def gpu_of(runner: Runner, plan: SelectPlan) -> Gpu:
    """The runner's, for the plan's threads and shared memory, without clusters that are too large
    for FLASHDSA_MAX_CLUSTER."""
    capacity = runner.cluster_capacity(plan.threads, plan.smem_bytes)
    return Gpu(runner.num_sms, allowed_clusters(capacity, USUAL_CLUSTER))


def choose(call: Call, pages: int, gpu: Gpu) -> Way:
    """Choose the way of a call of at least one row, whose table has `pages` pages a row."""
    return decide(call, pages, gpu)[0]


def decide(call: Call, pages: int, gpu: Gpu) -> tuple[Way, str]:
    """Return the way of a call, as `choose` does, and the rule that takes it."""
    rows, many = call.rows, Indexer.MANY_ROWS * gpu.num_sms
    number, size = clusters_for(gpu, rows)
    if pages <= call.unscored_pages:
        return Way(Kind.UNSCORED), f"{pages} pages of {PAGE_SIZE} tokens hold no more than topk"
    widest = Indexer.PAGES_ALONE * (size + 1)
    if rows <= number and pages < widest:
        most = Indexer.NARROW_CLUSTER if pages <= Indexer.NARROW_PAGES else size
        why = f"{rows} of {number} clusters of {size} CTAs, and {pages} pages: below {widest}"
        return Way(Kind.ROW, rows, min(size, most)), why
    if call.ranks and call.next_n in (2, 4):
        return Way(Kind.RANKED), f"{call.next_n} queries a request; too many or too wide for a row"
    few = rows < many
    sharing = Indexer.SHARING_FEW if few else Indexer.SHARING_MANY
    why = f"{rows} rows, {'below' if few else 'no fewer than'} {many:.0f}: up to {sharing} CTAs"
    return Way(Kind.SHARED, *clusters_up_to(gpu, sharing)), why


def ways(call: Call, pages: int, gpu: Gpu) -> dict[Way, float]:
    """Every way that serves a call: 0 of the one that is taken, infinite of the others, in the
    order in which they would replace it. The judge of ways times them."""
    return {way: estimate.counted for way, estimate in weigh(call, pages, gpu).items()}


def explain(call: Call, pages: int, gpu: Gpu) -> Choice:
    """Say why a way is taken, as a table of all of them."""
    rows = (
        Candidate(str(way), SERVES[way.kind], estimate.reason, taken=not estimate.counted)
        for way, estimate in weigh(call, pages, gpu).items()
    )
    return Choice("the first of these is taken", tuple(rows))


def weigh(call: Call, pages: int, gpu: Gpu) -> dict[Way, Estimate]:
    """Return every way that serves a call, in the order of `ways`, and why it is taken."""
    taken, why = decide(call, pages, gpu)
    found = [taken]
    sizes = Indexer.SHARING_FEW, Indexer.SHARING_MANY
    if call.rows >= Indexer.MANY_ROWS * gpu.num_sms:
        sizes = sizes[::-1]
    found += [Way(Kind.SHARED, *clusters_up_to(gpu, size)) for size in sizes]
    found.append(Way(Kind.ROW, *clusters_for(gpu, call.rows)))
    if call.ranks:
        found.append(Way(Kind.RANKED))
    others = Estimate(inf, "would serve the call, too")
    return dict.fromkeys(found, others) | {taken: Estimate(0.0, f"rule: {why}")}


def clusters_for(gpu: Gpu, rows: int) -> tuple[int, int]:
    """(clusters, CTAs of each): the largest clusters of which every row has one, or half of one of
    four; of more rows each cluster of two has several."""
    for size in Indexer.SIZES:
        if size == 2 and rows <= 2 * gpu.clusters.get(4, 0):
            return gpu.clusters[4], 4
        if gpu.clusters.get(size, 0) >= rows:
            return rows, size
    pairs = gpu.clusters.get(2, 0)
    return (pairs, 2) if pairs else (min(rows, gpu.clusters[1]), 1)


def clusters_up_to(gpu: Gpu, most: int) -> tuple[int, int]:
    """(clusters that run at once, CTAs of each): the largest of up to `most` CTAs."""
    size = max(size for size, number in gpu.clusters.items() if number and size <= most)
    return gpu.clusters[size], size
