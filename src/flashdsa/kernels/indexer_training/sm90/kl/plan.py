"""Output of a compiled divergence, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import UniformPlan


@dataclass(frozen=True)
class KlPlan(UniformPlan):
    """One compiled kernel. `gradient`: that of the scores is written, not the divergence."""

    gradient: bool = False

    @property
    def name(self) -> str:
        return "indexer_kl_bwd" if self.gradient else "indexer_kl"
