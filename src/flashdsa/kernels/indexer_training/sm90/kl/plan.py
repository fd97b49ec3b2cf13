"""Output of a compiled divergence, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import Role


@dataclass(frozen=True)
class KlPlan:
    """One compiled kernel.

    Attributes:
        gradient: the gradient of the scores is written, not the divergence.
    """

    gradient: bool = False

    @property
    def roles(self) -> tuple[Role, ...]:
        return ()

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: none."""
        return 0

    @property
    def name(self) -> str:
        return "indexer_kl_bwd" if self.gradient else "indexer_kl"
