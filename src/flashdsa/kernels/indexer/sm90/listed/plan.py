"""Budget of the kernel that writes the keys of listed blocks as bits, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.plan import Role, SmemPlan, SmemRegion, plan_smem

WORD = 4


@dataclass(frozen=True)
class ListedPlan:
    """One compiled kernel: a CTA writes a query's bits.

    Attributes:
        threads: of a CTA. window_words: words of bits that are made at a time.
    """

    threads: int = 256
    window_words: int = 4096
    roles: ClassVar[tuple[Role, ...]] = ()  # all warps do the same

    @property
    def name(self) -> str:
        return "prefill_listed"

    @property
    def window_keys(self) -> int:
        return self.window_words * WARP_SIZE

    @cached_property
    def smem(self) -> SmemPlan:
        regions = [
            SmemRegion("bits", self.window_words * WORD, 16, "a bit a key: it is listed"),
            SmemRegion("ones", WORD, 4, "how many are"),
        ]
        return plan_smem(regions, SM90.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.smem.total
