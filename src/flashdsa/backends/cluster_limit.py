"""FLASHDSA_MAX_CLUSTER: the limit on a launch's clusters, among those that a device runs."""

from __future__ import annotations

from collections.abc import Mapping

from flashdsa.settings import Settings


def allowed_clusters(capacity: Mapping[int, int], usual: int) -> dict[int, int]:
    """Return the entries of `capacity`, clusters of each size, that are not too large.

    Args:
        usual: the most CTAs of a cluster if FLASHDSA_MAX_CLUSTER is not set.
    """
    most = Settings.from_environment().max_cluster or usual
    return {size: number for size, number in capacity.items() if size <= most}
