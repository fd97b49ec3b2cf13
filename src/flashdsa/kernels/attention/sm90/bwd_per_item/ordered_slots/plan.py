"""Stages, barriers and roles of the sums of the slots' rows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARP_SIZE
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

WORD_BYTES = 4
CHUNK_WORDS = 4
"""Words of a chunk's description: key, rows, FIRST and LAST, and one that is not used."""
FIRST, LAST, FROM_ZERO = 1, 2, 4
"""The chunk has the key's first rows; its last ones; no dKV before the first rows, as it is 0."""


@dataclass(frozen=True)
class SumPlan(Sm90Plan):
    """The kernel that sums. A key's rows come in chunks, each into a stage.

    Attributes:
        d_qk: columns of dKV. packs: of a row, a thread of role add each. slot_words: of a row.
        stages: chunks in flight. chunk_rows: most rows of a chunk.
        sm_ctas: CTAs on each streaming multiprocessor, for which shared memory has just room.
    """

    d_qk: int
    packs: int
    slot_words: int
    stages: int = 3
    chunk_rows: int = 16
    sm_ctas: int = 4

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        self.check()

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row of the slots."""
        return self.slot_words * WORD_BYTES

    @property
    def dkv_bytes(self) -> int:
        """Bytes of a row of dKV, with which a stage begins."""
        return self.d_qk * WORD_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.dkv_bytes + self.chunk_rows * self.slot_bytes

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        rows, chunks = self.stages * self.stage_bytes, self.stages * CHUNK_WORDS * WORD_BYTES
        return [
            SmemRegion("rows", rows, 128, "dKV and rows of a chunk", stages=self.stages),
            SmemRegion("chunks", chunks, 16, "their descriptions", stages=self.stages),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def load(self) -> Role:
        """Warp 0."""
        return Role("load", WARP_SIZE, 64, "keys, their dKV and their rows")

    @property
    @cache  # noqa: B019 - plans are few
    def add(self) -> Role:
        """The warps behind it."""
        threads = -(-self.packs // WARP_SIZE) * WARP_SIZE
        return Role("add", threads, 64, "dKV += one row after another")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles, in thread order."""
        return self.load, self.add

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order; each completes a phase for each chunk. A chunk's bytes vary."""
        load, add = self.load, self.add
        return (
            Barrier(
                "rows_full", self.stages, load, Arrives.ONE_THREAD, add, 0,
                "a chunk has come",
            ),
            Barrier(
                "rows_free", self.stages, add, Arrives.EVERY_THREAD, load, 0,
                "a chunk has been read",
            ),
        )  # fmt: skip
