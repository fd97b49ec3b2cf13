"""Tiles, budgets, barriers and roles of dKV += P^T dO and dS^T Q, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGE_BYTES, IMAGES, ROW_BLOCKS
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, CHUNK_BYTES, D_QK, D_V
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

WARPGROUPS = 2
"""Warpgroups that multiply: they take turns with the tiles of keys."""
SLICES = 3
"""Items of a group: parts of the 576 dims."""
SLICE_DIMS = D_QK // SLICES
LAST_LATENT_DIMS = D_V - (SLICES - 1) * SLICE_DIMS
"""Dims of the last slice that dO has too."""
CHUNKS = SLICE_DIMS // CHUNK
"""Chunks of 64 dims of a slice; each is copied by a warp."""
WORDS = 16
"""Words of an item, if additions are in order: see order.py. Two are used; the others keep those of
different items apart."""
PART_BYTES = CHUNKS * CHUNK_BYTES
"""A row block's slice of Q or of dO."""


@dataclass(frozen=True)
class DkvPlan(Sm90Plan):
    """One compiled dKV: choices, then derived values.

    Attributes:
        row_blocks: of a group; Q and dO of all of them stay in shared memory for an item.
        ordered: additions to an element are in the order of the groups: see order.py.
        load_registers, multiply_registers: of a thread.
    """

    row_blocks: int = 4
    ordered: bool = False
    load_registers: int = 88
    multiply_registers: int = 208

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
        return f"mla_bwd_dkv_blocks{self.row_blocks}" + "_ordered" * self.ordered

    @property
    def parts(self) -> int:
        """Products of a tile, in their order: dS^T Q and then P^T dO of each row block."""
        return self.row_blocks * IMAGES

    @property
    def slots(self) -> int:
        """Images that the ring holds."""
        return 4 if self.row_blocks == 4 else 16

    @property
    def full_barriers(self) -> int:
        """Barriers that say that an image has come. They are as many as images in a turn of the
        warpgroups, so each is awaited by one of them, which sees all its phases."""
        return max(self.slots, WARPGROUPS * self.parts)

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        holds = f"Q and dO of {self.row_blocks} row blocks, {SLICE_DIMS} dims, SW128"
        counters = WARPGROUPS * WARPGROUP_SIZE // WARP_SIZE * 4
        added = SmemRegion("added", counters, 16, "tiles that each warp has added")
        return [
            SmemRegion("rows", self.parts * PART_BYTES, 1024, holds, stages=self.parts),
            SmemRegion("ring", self.slots * IMAGE_BYTES, 1024, "images", stages=self.slots),
            *([added] if self.ordered else []),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def images(self) -> Role:
        """Warp 0."""
        return Role("images", WARP_SIZE, self.load_registers, "P and dS of each tile")

    @property
    def row_warps(self) -> int:
        """Warps that copy Q and dO; if additions are in order a third one publishes instead."""
        return 2 if self.ordered else 3

    @property
    @cache  # noqa: B019 - plans are few
    def rows(self) -> Role:
        """Warps 1 to 3, each for a chunk of dims; ordered: 1 and 2."""
        threads = self.row_warps * WARP_SIZE
        return Role("rows", threads, self.load_registers, "Q and dO of each item")

    @property
    @cache  # noqa: B019 - plans are few
    def publish(self) -> Role:
        """Warp 3, if additions are in order."""
        does = "says to other CTAs what has been added"
        return Role("publish", WARP_SIZE, self.load_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def multiply(self) -> Role:
        """Warpgroups 1 and 2."""
        threads = WARPGROUPS * WARPGROUP_SIZE
        return Role("multiply", threads, self.multiply_registers, "dKV of a tile, and its addition")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warps, in thread order."""
        publish = [self.publish] if self.ordered else []
        return self.images, self.rows, *publish, self.multiply

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of images complete a phase for each image in them; those of rows one for each item
        that has keys.
        """
        images, rows, multiply = self.images, self.rows, self.multiply
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
