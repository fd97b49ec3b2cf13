"""FLASHDSA_MAX_CLUSTER: which of the clusters that a device runs a launch may have."""

from __future__ import annotations

from collections.abc import Mapping

from flashdsa.settings import Settings


def allowed_clusters(capacity: Mapping[int, int], usual: int) -> dict[int, int]:
    """Of `capacity`, clusters of each size, those that are not too large.

    Args:
        usual: the most CTAs of a cluster where FLASHDSA_MAX_CLUSTER does not say.
    """
    most = Settings.from_environment().max_cluster or usual
    return {size: number for size, number in capacity.items() if size <= most}
