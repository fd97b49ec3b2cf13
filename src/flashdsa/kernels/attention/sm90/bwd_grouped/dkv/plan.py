"""Tiles, budgets, barriers and roles of dKV += P^T dO and dS^T Q, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import MATRICES, ROW_BLOCKS
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, ROWS, Tile
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, row_tiles

WARPGROUPS = 2
"""Warpgroups that multiply: they take turns with the tiles of keys."""
ROW_WARPS = 3
"""Warps that copy Q and dO, each a chunk of dims."""
PARTS = ROW_BLOCKS * MATRICES
"""Products of a tile, in their order: dS^T Q and then P^T dO of each row block."""
SLOTS = 4
"""Matrices that the ring holds."""
FULL_BARRIERS = WARPGROUPS * PARTS
"""Barriers that say that a matrix has come. They are as many as matrices in a turn of the
warpgroups, so each is awaited by one of them, which sees all its phases."""


@dataclass(frozen=True)
class DkvPlan(Sm90Plan):
    """One compiled dKV: choices, then derived values.

    Attributes:
        tile: of keys. slices: items of a group, parts of the dims, in whole chunks, of which the
            last one may have fewer; Q and dO of the group's row blocks stay in shared memory for an
            item.
        load_registers, multiply_registers: of a thread.
    """

    tile: Tile = Tile()
    slices: int = 3
    load_registers: int = 88
    multiply_registers: int = 208

    def __post_init__(self) -> None:
        if self.last_value_dims <= 0:
            raise ValueError(f"slices: {self.tile.chunks} chunks; got {self.slices}")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"mla_bwd_dkv{self.tile.suffix}_blocks{ROW_BLOCKS}"

    @property
    def slice_chunks(self) -> int:
        """Chunks of a slice of Q or dO; each is copied by a warp."""
        return -(-self.tile.chunks // self.slices)

    @property
    def slice_dims(self) -> int:
        """Dims of an item."""
        return self.slice_chunks * CHUNK

    @property
    def last_dims(self) -> int:
        """Dims of an item of the last slice."""
        return self.tile.d_qk - (self.slices - 1) * self.slice_dims

    @property
    def last_value_dims(self) -> int:
        """Dims of the last slice that dO has too."""
        return self.tile.d_v - (self.slices - 1) * self.slice_dims

    @property
    def part_bytes(self) -> int:
        """Bytes of a row block's slice of Q or of dO."""
        return self.slice_chunks * ROWS * row_tiles.ROW_BYTES

    @property
    def buffers(self) -> list[SmemRegion]:
        holds = f"Q and dO of {ROW_BLOCKS} row blocks, {self.slice_dims} dims, SW128"
        ring = SLOTS * self.tile.p_bytes
        return [
            SmemRegion("rows", PARTS * self.part_bytes, 1024, holds, stages=PARTS),
            SmemRegion("ring", ring, 1024, "matrices", stages=SLOTS),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("matrices", WARP_SIZE, self.load_registers, "P and dS of each tile"),
            # The warps after it.
            Role("rows", ROW_WARPS * WARP_SIZE, self.load_registers, "Q and dO of each item"),
            Role("multiply", WARPGROUPS * WARPGROUP_SIZE, self.multiply_registers,
                 "dKV of a tile, and its addition"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers of matrices complete a phase for each matrix; those of rows one for each item
        that has keys."""
        matrices, rows, multiply = self.roles
        return (
            Barrier("matrix_full", FULL_BARRIERS, matrices, Arrives.ONE_THREAD, multiply,
                    self.tile.p_bytes, "a matrix is there"),
            Barrier("matrix_free", SLOTS, multiply, Arrives.WARPS_OF_ONE_GROUP, matrices, 0,
                    "a matrix has been read"),
            Barrier("rows_full", PARTS, rows, Arrives.EVERY_THREAD, multiply, 0,
                    "a row block's Q or dO is there"),
            Barrier("rows_free", PARTS, multiply, Arrives.EVERY_WARP, rows, 0,
                    "a row block's Q or dO is not needed any more"),
        )  # fmt: skip
