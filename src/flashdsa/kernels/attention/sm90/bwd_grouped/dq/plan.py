"""Tiles, budgets, barriers and roles of dQ = dS K, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGE_BYTES, ROW_BLOCKS
from flashdsa.kernels.attention.sm90.core.tile import CHUNK_BYTES, D_QK
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

WARPGROUPS = 2
"""Warpgroups that multiply."""
STAGES = 4


def dq_slices(row_blocks: int) -> int:
    """Items of a group of `row_blocks` row blocks: parts of the 576 dims."""
    return 3 if row_blocks == 4 else 2


@dataclass(frozen=True)
class DqPlan(Sm90Plan):
    """One compiled dQ: choices, then derived values.

    Attributes:
        row_blocks: of a group. 4: each warpgroup takes two of them and 192 dims of an item's;
            2: one of them and 288 dims.
        load_registers, multiply_registers: of a thread.
    """

    row_blocks: int = 4
    load_registers: int = 56
    multiply_registers: int = 224

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.row_blocks not in ROW_BLOCKS:
            raise ValueError(f"row_blocks: expected one of {ROW_BLOCKS}; got {self.row_blocks}")
        self.check()

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return f"mla_bwd_dq_blocks{self.row_blocks}"

    @property
    def slices(self) -> int:
        """Items of a group: parts of the 576 dims."""
        return dq_slices(self.row_blocks)

    @property
    def slice_dims(self) -> int:
        """Dims of an item."""
        return D_QK // self.slices

    @property
    def columns(self) -> tuple[int, int]:
        """Dims of the two products of a warpgroup, each with its accumulator."""
        return (192, 192) if self.row_blocks == 4 else (160, 128)

    @property
    def key_chunks(self) -> int:
        """Chunks of a stage for 64 keys; of the third of five only one half is used."""
        return 3 if self.row_blocks == 4 else 5

    @property
    def images_bytes(self) -> int:
        """dS of a stage."""
        return self.row_blocks * IMAGE_BYTES

    @property
    def stage_bytes(self) -> int:
        """dS images, then the keys."""
        return self.images_bytes + self.key_chunks * CHUNK_BYTES

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        holds = f"{self.row_blocks} dS images and {self.key_chunks} chunks of 64 keys, SW128"
        return [
            SmemRegion("stages", STAGES * self.stage_bytes, 1024, holds, stages=STAGES),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def load(self) -> Role:
        """Warpgroup 0."""
        return Role("load", WARPGROUP_SIZE, self.load_registers, "dS images, the keys' rows")

    @property
    @cache  # noqa: B019 - plans are few
    def multiply(self) -> Role:
        """Warpgroups 1 and 2, each with its rows."""
        threads = WARPGROUPS * WARPGROUP_SIZE
        return Role("multiply", threads, self.multiply_registers, "dQ += dS K, dQ to memory")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warpgroups, in thread order."""
        return self.load, self.multiply

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order: a phase for each tile."""
        load, multiply = self.roles
        return (
            Barrier(
                "full", STAGES, load, Arrives.EVERY_THREAD, multiply, self.images_bytes,
                "a tile's dS and keys are there",
            ),
            Barrier(
                "empty", STAGES, multiply, Arrives.EVERY_WARP, load, 0, "the tile has been read"
            ),
        )  # fmt: skip
