"""Tiles, budgets, barriers and roles of dQ = dS K, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import ROW_BLOCKS
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, Tile
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

WARPGROUPS = 2
"""Warpgroups that multiply, each for its row blocks of a group."""
STAGES = 4


@dataclass(frozen=True)
class DqPlan(Sm90Plan):
    """One compiled dQ: choices, then derived values. `tile`: of keys. `slices`: items of a group,
    parts of the dims, in whole chunks; the last one may have fewer. `load_registers`,
    `multiply_registers`: of a thread."""

    tile: Tile = Tile()
    slices: int = 3
    load_registers: int = 56
    multiply_registers: int = 224

    def __post_init__(self) -> None:
        if self.last_dims <= 0:
            raise ValueError(f"slices: {self.tile.chunks} chunks; got {self.slices}")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"mla_bwd_dq{self.tile.suffix}_blocks{ROW_BLOCKS}"

    @property
    def key_chunks(self) -> int:
        return -(-self.tile.chunks // self.slices)

    @property
    def slice_dims(self) -> int:
        """Dims of an item."""
        return self.key_chunks * CHUNK

    @property
    def last_dims(self) -> int:
        """Dims of an item of the last slice."""
        return self.tile.d_qk - (self.slices - 1) * self.slice_dims

    @property
    def ds_bytes(self) -> int:
        return ROW_BLOCKS * self.tile.p_bytes

    @property
    def stage_bytes(self) -> int:
        """dS, then the keys."""
        return self.ds_bytes + self.key_chunks * self.tile.chunk_bytes

    @property
    def buffers(self) -> list[SmemRegion]:
        holds = f"{ROW_BLOCKS} x dS and {self.key_chunks} chunks of {self.tile.keys} keys, SW128"
        return [SmemRegion("stages", STAGES * self.stage_bytes, 1024, holds, stages=STAGES)]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("load", WARPGROUP_SIZE, self.load_registers, "dS, the keys' rows"),
            # Warpgroups 1 and 2, each with its rows.
            Role("multiply", WARPGROUPS * WARPGROUP_SIZE, self.multiply_registers,
                 "dQ += dS K, dQ to memory"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order: a phase for each tile."""
        load, multiply = self.roles
        return (
            Barrier("full", STAGES, load, Arrives.EVERY_THREAD, multiply, self.ds_bytes,
                    "a tile's dS and keys are there"),
            Barrier("empty", STAGES, multiply, Arrives.EVERY_WARP, load, 0,
                    "the tile has been read"),
        )  # fmt: skip
