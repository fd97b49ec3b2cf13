"""Base of the plans of the kernels with keys as rows, and their sizes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.shared.plan import OF_CLUSTERS, ClusterPlan
from flashdsa.plan import Arrives, Barrier, Role, SmemRegion
from flashdsa.plan.row_tiles import ROW_BYTES
from flashdsa.row_formats import V32, RowFormat

CONSUMERS = 2
"""Warpgroups that multiply."""
PIECE_KEYS = WARP_SIZE
"""Keys that a warp asks for, a lane each."""
WARPS = WARPGROUP_SIZE // WARP_SIZE
BANK_UNIT = 16
"""Bytes of a row that a lane reads at once: eight rows are in all banks if they are an odd multiple
of it apart."""


@dataclass(frozen=True)
class KeyRowsPlan(ClusterPlan):
    """Base of both kernels' plans: choices, then derived values.

    Attributes:
        formats, joined_formats: of packed rows; those that two sources may have, both the same.
        form: one of them.
        joined: rows of two sources, ranges and blocks of rows, see `core/sources.py`.
        lazy_log2: maxima are updated only if a logit is above one by this, in log2.
    """

    formats: ClassVar[tuple[RowFormat, ...]]
    joined_formats: ClassVar[tuple[RowFormat, ...]]
    form: RowFormat = V32
    joined: bool = False
    lazy_log2: float = 8.0
    packed = True
    by_turns = True
    math_does = ""
    """Work of the role math, in words."""

    @classmethod
    def every(cls) -> tuple[Self, ...]:
        """A plan for rows of each format, and for two sources of each."""
        joined = (cls(form, True) for form in cls.joined_formats)
        return (*(cls(form) for form in cls.formats), *joined)

    @classmethod
    def takes(cls, form: RowFormat, joined: bool) -> bool:
        """Whether there is a plan for such rows."""
        return form in (cls.joined_formats if joined else cls.formats)

    @property
    @abstractmethod
    def gather_registers(self) -> int:
        """Registers of a thread that gathers."""

    @property
    @abstractmethod
    def math_registers(self) -> int:
        """Registers of a thread that multiplies."""

    @property
    def tile(self) -> Tile:  # type: ignore[override]
        """Tile of keys."""
        return Tile(self.form.d_qk)

    @property
    def row_pitch(self) -> int:
        """Bytes from a row to the next one in shared memory."""
        units = -(-self.form.row_bytes // BANK_UNIT)
        return (units + (units + 1) % 2) * BANK_UNIT

    @property
    def piece_bytes(self) -> int:
        """Bytes of a stage."""
        return PIECE_KEYS * self.row_pitch

    @property
    def tile_pieces(self) -> int:
        """Pieces of a tile."""
        return self.tile.keys // PIECE_KEYS

    @property
    def form_suffix(self) -> str:
        """Part of a variant's name."""
        return "" if self.form == V32 else f"_{self.form.name}"

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return f"mla_decode_heads{self.group_heads}{self.form_suffix}" + "_joined" * self.joined

    @property
    def operand_bytes(self) -> int:
        """Bytes of 64 values of each head: a chunk of Q, or P of a tile."""
        return self.group_heads * ROW_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 64 dims of a consumer's half of O."""
        return self.tile.d_v // ROWS // CONSUMERS

    @property
    @cache  # noqa: B019 - plans are few
    def gather(self) -> Role:
        """Warpgroup 0."""
        does = "row numbers and masks, the rows"
        return Role("gather", WARPGROUP_SIZE, self.gather_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def math(self) -> Role:
        """Warpgroups 1 and 2."""
        return Role("math", CONSUMERS * WARPGROUP_SIZE, self.math_registers, self.math_does)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles in the order of their threads."""
        return self.gather, self.math


@dataclass(frozen=True)
class DealtKeyRowsPlan(KeyRowsPlan):
    """Base of the plans of dealt tiles, in front of that of the kernel of whole items."""

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return super().name.replace("_heads", "_dealt_heads")

    @property
    def cluster_buffers(self) -> list[SmemRegion]:
        """Shared memory regions of cuts, tickets and stretches."""
        return self.dealt_buffers

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Those of pieces are a ring, those of P complete a phase for each step, those of parts one
        for each part, each other one a phase for each stretch.
        """
        gather, math = self.roles
        one, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        whole = super().barriers  # type: ignore[safe-super] # of the plan that follows this base
        return (
            *(barrier for barrier in whole if barrier.name not in OF_CLUSTERS),
            Barrier("stretch_full", 1, gather, one, math, 0, "the stretch is stored"),
            Barrier("extent_free", 1, math, warps, gather, 0, "the number of steps has been read"),
            Barrier("stretch_read", 1, math, every, math, 0,
                    "both consumers have read what ends the stretch"),
            Barrier("part_stored", 1, math, every, math, 0, "the part is in its slot"),
            Barrier("ticket_full", 1, math, one, math, 0, "the part's ticket is drawn"),
        )  # fmt: skip
