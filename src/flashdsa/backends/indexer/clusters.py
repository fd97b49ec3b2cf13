"""Number of CTAs that share a row: the largest clusters of which one for every row runs at once.

A long row is split among several of them if they are enough for all rows. The kernel looks at the
lengths if the rows are more than the clusters, and may halve the clusters (see its
row_schedule.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flashdsa.backends.cluster_limit import allowed_clusters
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.kernels.indexer.sizes import SPLITS_BY_SIZE

SIZES = (16, 14, 13, 12, 10, 8, 7, 6, 5, 4, 3, 2)
"""Clusters to choose from, largest first; of two that run equally often the larger one is better. 9
is missing: eight rows of 16K tokens take as long with 9 CTAs each as with 8, or 0.6 us longer."""
USUAL_CLUSTER = 13
"""The most CTAs without FLASHDSA_MAX_CLUSTER. A cluster starts when one GPC has as many free SMs.
132 SMs are in at most 8 GPCs, so that one has 13 free ones whichever 35 SMs other streams hold."""
NARROW_PAGES = 64
"""Pages of a block table's row up to which more than NARROW_CLUSTER CTAs do not help a row."""
NARROW_CLUSTER = 8


class Clusters(NamedTuple):
    """Clusters of a launch."""

    number: int
    size: int  # CTAs of each
    num_splits: int  # clusters of a long row

    def without_splits(self) -> Clusters:
        """Clusters for kernels that split no row."""
        return Clusters(self.number // self.num_splits, self.size, 1)


def clusters_for(runner: Runner, plan: SelectPlan, rows: int) -> Clusters:
    """Choose the clusters of a launch of `rows` rows, by the plan's threads and shared memory."""
    return choose_clusters(clusters_at_once(runner, plan), rows)


def clusters_at_once(runner: Runner, plan: SelectPlan) -> Mapping[int, int]:
    """Clusters that run at once, by size, on the device without other work."""
    return runner.cluster_capacity(plan.threads, plan.smem_bytes)


def clusters_of(runner: Runner, plan: SelectPlan, size: int) -> tuple[int, int] | None:
    """(clusters of so many CTAs that run at once, their CTAs); None: none is allowed."""
    number = allowed_clusters(clusters_at_once(runner, plan), USUAL_CLUSTER).get(size)
    return (number, size) if number else None


def choose_clusters(capacity: Mapping[int, int], rows: int) -> Clusters:
    """Same as `clusters_for`, by the number of clusters of each size that run at once."""
    capacity = allowed_clusters(capacity, USUAL_CLUSTER)
    for size in SIZES:
        if size == 2 and rows <= 2 * capacity.get(4, 0):
            return Clusters(capacity[4], 4, 1)
        if capacity.get(size, 0) >= rows:
            num_splits = min(capacity[size] // rows, SPLITS_BY_SIZE * size)
            return Clusters(rows * num_splits, size, num_splits)
    pairs = capacity.get(2, 0)
    return Clusters(pairs, 2, 1) if pairs else Clusters(min(rows, capacity[1]), 1, 1)
