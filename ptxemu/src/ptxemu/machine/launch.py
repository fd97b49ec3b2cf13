"""The shape and the parameters of a launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of a launch; `cluster` divides `grid`."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: bytes
    explicit_cluster: bool = False

    @property
    def clusters(self) -> tuple[int, int, int]:
        """Clusters along each axis."""
        gx, gy, gz = self.grid
        cx, cy, cz = self.cluster
        return gx // cx, gy // cy, gz // cz
