"""Tiles, budgets, barriers and roles of dKV += P^T dO and dS^T Q, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import IMAGE_BYTES, IMAGES, ROW_BLOCKS
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import CHUNK, CHUNK_BYTES, D_QK, D_V
from flashdsa.plan import (
    Arrives,
    Barrier,
    Role,
    SmemPlan,
    SmemRegion,
    check_barriers,
    check_registers,
    plan_smem,
)

WARPGROUPS = 2
"""That multiply: they take turns with the tiles of keys."""
SLICES = 3
"""Items of a group: parts of the 576 dims."""
SLICE_DIMS = D_QK // SLICES
LAST_LATENT_DIMS = D_V - (SLICES - 1) * SLICE_DIMS
"""Dims of the last slice that dO has too."""
CHUNKS = SLICE_DIMS // CHUNK
"""Chunks of 64 dims of a slice; each is copied by a warp."""
PART_BYTES = CHUNKS * CHUNK_BYTES
"""A row block's slice of Q or of dO."""


@dataclass(frozen=True)
class DkvPlan:
    """One compiled dKV: choices first, then what follows from them.

    Attributes:
        row_blocks: of a group; Q and dO of all of them stay in shared memory for an item.
        load_registers, multiply_registers: of a thread.
    """

    row_blocks: int = 4
    load_registers: int = 88
    multiply_registers: int = 208

    def __post_init__(self) -> None:
        """Hold the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.row_blocks not in ROW_BLOCKS:
            raise ValueError(f"row_blocks: expected one of {ROW_BLOCKS}; got {self.row_blocks}")
        check_registers(self.roles, SM90.registers)
        check_barriers(self.barriers, self.roles)
        _ = self.smem

    @property
    def name(self) -> str:
        """The exported name of its function."""
        return f"mla_bwd_dkv_blocks{self.row_blocks}"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def parts(self) -> int:
        """Products of a tile, in their order: of each row block dS^T Q, and then P^T dO."""
        return self.row_blocks * IMAGES

    @property
    def slots(self) -> int:
        """Images that the ring holds."""
        return 4 if self.row_blocks == 4 else 16

    @property
    def full_barriers(self) -> int:
        """That say that an image is there. There are as many as images in a turn of the
        warpgroups, and so each is awaited by one of them, which sees all its phases."""
        return max(self.slots, WARPGROUPS * self.parts)

    @property
    def regions(self) -> list[SmemRegion]:
        """What shared memory holds, in its order."""
        barriers = sum(barrier.stages for barrier in self.barriers) * 8
        holds = f"Q and dO of {self.row_blocks} row blocks, {SLICE_DIMS} dims, SW128"
        return [
            SmemRegion("rows", self.parts * PART_BYTES, 1024, holds, stages=self.parts),
            SmemRegion("ring", self.slots * IMAGE_BYTES, 1024, "images", stages=self.slots),
            SmemRegion("barriers", barriers, 8, "mbarriers"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def smem(self) -> SmemPlan:
        """Shared memory, the only truth about it."""
        return plan_smem(self.regions, SM90.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.smem.total

    @property
    @cache  # noqa: B019 - plans are few
    def images(self) -> Role:
        """Warp 0."""
        return Role("images", WARP_SIZE, self.load_registers, "P and dS of each tile")

    @property
    @cache  # noqa: B019 - plans are few
    def rows(self) -> Role:
        """Warps 1 to 3, each for a chunk of dims."""
        return Role("rows", CHUNKS * WARP_SIZE, self.load_registers, "Q and dO of each item")

    @property
    @cache  # noqa: B019 - plans are few
    def multiply(self) -> Role:
        """Warpgroups 1 and 2."""
        threads = WARPGROUPS * WARPGROUP_SIZE
        return Role("multiply", threads, self.multiply_registers, "dKV of a tile, and its addition")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warps, in the order of their threads."""
        return self.images, self.rows, self.multiply

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in the order in which they lie in their region.

        Those of images complete a phase for each image in them; those of rows one an item that has
        keys.
        """
        images, rows, multiply = self.roles
        return (
            Barrier(
                "image_full", self.full_barriers, images, Arrives.ONE_THREAD, multiply,
                IMAGE_BYTES, "an image is there",
            ),
            Barrier(
                "image_free", self.slots, multiply, Arrives.WARPS_OF_ONE_GROUP, images, 0,
                "an image has been read",
            ),
            Barrier(
                "rows_full", self.parts, rows, Arrives.EVERY_THREAD, multiply, 0,
                "a row block's Q or dO is there",
            ),
            Barrier(
                "rows_free", self.parts, multiply, Arrives.EVERY_WARP, rows, 0,
                "a row block's Q or dO is not needed any more",
            ),
        )  # fmt: skip
