"""Tiles, budgets, barriers and roles of the Hopper decode, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import BULK_ALIGNMENT, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS, TILES, Tile
from flashdsa.kernels.attention.sm90.decode.shared.plan import F16, OF_CLUSTERS, ClusterPlan
from flashdsa.plan import Arrives, Barrier, Role, SmemRegion
from flashdsa.problem import D_V, KV_GROUP
from flashdsa.row_formats import (
    INTERLEAVED,
    ROW_FORMATS,
    SHIPPED,
    V32,
    RowFormat,
    takes,
    takes_multiples,
)

FORMATS = SHIPPED
"""Formats of packed rows that kernels are compiled for in advance, V32 first."""
JOINED_FORMATS = FORMATS[1:]
"""Those of which two sources may have one, both the same."""
MIXED_FORMATS = tuple(ROW_FORMATS[name] for name in ("v41", "v41_fp4"))
"""Those of which each source may have its own: one variant serves both orders."""
MIXED_PAIRS = (MIXED_FORMATS, INTERLEAVED)
"""Formats of sources of two; the kernel of the second pair is compiled at its first call."""
JOINED_PAIRS = (*((form, "") for form in JOINED_FORMATS), (MIXED_FORMATS[0], MIXED_FORMATS[1].name))
"""Formats of a variant's sources, the second one by its name; "": they have one."""
SHAPES = ("512 + 0", "512 + 64", "448 + 64")
"""Coded and bf16 columns of rows that are expanded."""
GROUPS: dict[bool, dict[str, tuple[int, ...]]] = {
    False: {"fp32": (KV_GROUP,), "e8m0": (32, 64)},
    True: {"e4m3": (16,)},
}
"""Columns that share a scale of each code, of rows that are expanded; True: of e2m1."""


def words_of_scales(form: RowFormat) -> int:
    """Words of the scales of two neighbouring parts of a row, which a lane loads."""
    return 2 * KV_GROUP // form.group * form.stored_scales // form.num_scales // 4


def objections(form: RowFormat) -> Iterator[str]:
    """Object to packed rows that `expand.py` and `scales.py` do not expand to f16."""
    yield from takes("columns + rope", f"{form.columns} + {form.rope}", *SHAPES)
    yield from takes(f"scale of {form.code}", form.scale, *GROUPS[form.fp4])
    groups = GROUPS[form.fp4].get(form.scale, ())
    if groups:
        yield from takes(f"group of {form.scale} scales", form.group, *groups)
    # A lane loads its words of scales at once.
    scales = 4 * words_of_scales(form) if form.group in groups else 1
    yield from takes_multiples(form, BULK_ALIGNMENT, BULK_ALIGNMENT, scales)


def joined_objections(form: RowFormat) -> Iterator[str]:
    """Object to packed rows that two sources, ranges and blocks of rows may not have."""
    yield from takes("columns + rope of two sources, a range or blocks", form.d_qk, D_V)
    yield from objections(form)


def mixed_objections(form: RowFormat) -> Iterator[str]:
    """Object to packed rows beside which a second source has others."""
    yield from takes("kv_format", form, *(one for pair in MIXED_PAIRS for one in pair))


@dataclass(frozen=True)
class DecodePlan(ClusterPlan):
    """One compiled decode: choices, then derived values.

    Attributes:
        packed: kv has packed rows, which are expanded to f16 in shared memory.
        joined: rows of two sources, ranges and blocks of rows, see `core/sources.py`.
        form: of packed rows. extra: name of the other format, if the sources have two; the bytes
            of a row say which source has which.
        single_cta: a CTA has an item, and writes its rows; else a cluster has, and adds them up.
        gather_registers, consumer0_registers, consumer1_registers: of a thread.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
        tile: of keys.
    """

    packed: bool = False
    joined: bool = False
    form: RowFormat = V32
    extra: str = ""
    single_cta: bool = False
    gather_registers: int = 104
    consumer0_registers: int = 208
    consumer1_registers: int = 192
    lazy_log2: float = 8.0
    tile: Tile = Tile()

    group = 1
    """Queries of an item, as in the forward's plan."""
    group_heads = ROWS
    single_cta_tiles = 2
    stream_k = False
    """Whether a CTA takes stretches of several items."""

    @property
    def name(self) -> str:
        extra = f"_and_{self.extra}" if self.extra else ""
        name = "mla_decode" + self.suffix + extra + "_joined" * self.joined
        return name + "_single_cta" * self.single_cta

    @property
    def extra_form(self) -> RowFormat | None:
        """The other format, if the sources have two."""
        return ROW_FORMATS[self.extra] if self.extra else None

    @property
    def scores_in_loop(self) -> bool:
        """Whether one code computes the scores of both halves of a tile: the CTAs of a cluster have
        few steps, and code is fetched. A step takes 2 % longer by it, without RoPE's columns
        12 %."""
        return self.tile.has_rope and not self.single_cta and not self.stream_k

    @property
    def scale_words(self) -> int:
        """Words of a lane's scales, of the format that has most."""
        return max(words_of_scales(form) for form in (self.form, self.extra_form) if form)

    @property
    def buffers(self) -> list[SmemRegion]:
        tile = self.tile
        statistics, rows = "; then all CTAs' statistics", "all CTAs' O of this one's dims"
        if self.single_cta:
            statistics, rows = "", "rows of O in bf16"
        return [
            SmemRegion("q", tile.q_bytes, 1024,
                       f"Q of the item, {tile.chunks} x [64, 64] SW128{statistics}"),
            SmemRegion("k", max(TILES * tile.bytes, self.staged_at + ROWS * tile.d_v * F16),
                       1024, f"keys of a step likewise{tile.with_p0}; then {rows}"),
            tile.p_region,
            SmemRegion("masks", TILES * tile.mask_words * 4, 16, "valid keys: a bit each, a tile"),
            SmemRegion("row_max", TILES * ROWS * FP32, 16, "maximum that each tile's P is against"),
            SmemRegion("row_sum", 2 * 2 * ROWS * FP32, 16, "each consumer's sums and maxima"),
            SmemRegion("row_unit", ROWS * FP32, 16, "what a row of Q is a multiple of, if packed"),
            *self.cluster_buffers,
        ]  # fmt: skip

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers,
                 "row numbers and masks, the rows, Q"),
            Role("consumer0", WARPGROUP_SIZE, self.consumer0_registers,
                 "S and P of tile 0, O's low dims; then a share of O, lse"),
            Role("consumer1", WARPGROUP_SIZE, self.consumer1_registers,
                 "S and P of tile 1, O's high dims; then a share of O"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers of tiles complete a phase for each step, those of Q and O one in all."""
        gather, zero, one = self.roles
        thread, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        slices, q_bytes = self.tile.slices, self.tile.q_bytes
        barriers = (
            Barrier("extent_full", 1, gather, thread, zero, 0, "the number of steps is stored",
                    also_awaited_by=(one,)),
            Barrier("k0_full", slices, gather, every, zero, 0, "a slice of tile 0 has come"),
            Barrier("k1_full", slices, gather, every, one, 0, "a slice of tile 1 has come"),
            Barrier("masks_full", TILES, gather, thread, zero, 0, "a tile's masks are stored",
                    also_awaited_by=(one,)),
            Barrier("low_free", TILES, zero, warps, gather, 0, "a tile's low half has been read"),
            Barrier("high_free", TILES, one, warps, gather, 0, "a tile's high half has been read"),
            Barrier("q_full", 1, gather, thread, zero, q_bytes, "Q has come",
                    also_awaited_by=(one,)),
            Barrier("p0_full", 1, zero, every, one, 0, "P of tile 0 and its maxima are stored"),
            Barrier("p1_full", 1, one, every, zero, 0, "P of tile 1 and its maxima are stored"),
            Barrier("sums0_full", 1, zero, every, one, 0, "consumer0's sums are stored",
                    also_awaited_by=(zero,)),
            Barrier("sums1_full", 1, one, every, zero, 0, "consumer1's sums are stored",
                    also_awaited_by=(one,) if self.single_cta else ()),
            Barrier("q_converted", 1, zero, every, one, 0,
                    "packed: Q is as the products take it", also_produced_by=one,
                    also_awaited_by=(zero,)),
            Barrier("staged", 1, zero, every, one, 0, "this CTA's O and statistics are staged",
                    also_produced_by=one, also_awaited_by=(zero,)),
            Barrier("o_full", 1, zero, thread, zero, 0, "all CTAs' O and statistics have come",
                    also_awaited_by=(one,), bytes_from_peer=True),
            Barrier("ready", 1, zero, thread, zero, 0, "no CTA reads keys any more",
                    bytes_from_peer=True),
            Barrier("done", 1, zero, thread, zero, 0, "all CTAs have what this one sent",
                    bytes_from_peer=True),
        )  # fmt: skip
        return tuple(x for x in barriers if not self.single_cta or x.name not in OF_CLUSTERS)
