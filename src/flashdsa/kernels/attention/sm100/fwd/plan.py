"""Tiles, budgets, barriers and roles of the Blackwell forward, as data.

A pair of CTAs takes 128 (query, head) rows of Q, 64 each. Every CTA gathers half of the dims of all
keys (docs/decisions/0020), which are its half of N in Q K^T and its value dims in P V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.core import tile as tiles
from flashdsa.plan import Arrives, Barrier, Role, Sm100Plan, SmemRegion, TmemRegion, row_tiles

ROWS = tiles.PAIR_ROWS // tiles.CLUSTER
"""(query, head) rows of a CTA."""
BOX_BYTES = ROWS * row_tiles.ROW_BYTES
"""Bytes of a box of 64 rows: of Q, of O and of P."""
P_STAGES = 2


@dataclass(frozen=True)
class FwdPlan(Sm100Plan):
    """One compiled forward: choices, then derived values.

    Attributes:
        group: neighbouring queries whose 128 / group heads share the rows of a pair, over the union
            of their keys; 1: a pair takes 128 heads of one query.
        tile: of keys. kv_stages: tiles in flight. mask_stages: tiles whose valid keys are kept.
        kv_apart: RoPE columns of the keys are a tensor of their own.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
    """

    group: int = 1
    tile: tiles.PairTile = tiles.PairTile(64)
    kv_stages: int = 5
    mask_stages: int = 4
    softmax_registers: int = 240
    load_registers: int = 80
    mma_registers: int = 80
    lazy_log2: float = 8.0
    kv_apart: bool = False

    def __post_init__(self) -> None:
        if self.group not in tiles.GROUPS:
            raise ValueError(f"group: expected one of {tiles.GROUPS}; got {self.group}")
        if self.kv_stages * self.tile.bytes < self.q_bytes or self.kv_stages < 3:
            # Q overlays the last two of the first tiles, and another tile comes meanwhile.
            raise ValueError(f"kv_stages: expected at least 3; got {self.kv_stages}")
        super().__post_init__()

    @property
    def name(self) -> str:
        group = f"_group{self.group}" if self.group > 1 else ""
        return f"sm100_mla_fwd{group}" + "_kv_apart" * self.kv_apart

    @property
    def group_heads(self) -> int:
        return tiles.PAIR_ROWS // self.group

    @property
    def rope_column(self) -> int:
        """First RoPE column of the keys in the tensor that has them."""
        return 0 if self.kv_apart else self.tile.d_v

    @property
    def half_keys(self) -> int:
        """Keys of a row whose P a thread computes."""
        return self.tile.keys // 2

    @property
    def warp_keys(self) -> int:
        """Keys of a tile that each of four warps gathers: one lane of a warp issues at a time."""
        return self.tile.keys // (WARPGROUP_SIZE // WARP_SIZE)

    @property
    def q_boxes(self) -> int:
        return self.tile.d_qk // tiles.BOX_DIMS

    @property
    def q_bytes(self) -> int:
        return self.q_boxes * BOX_BYTES

    @property
    def q_stages(self) -> int:
        """Stages of keys, the first ones, whose bytes Q has until it is in tensor memory."""
        return -(-self.q_bytes // self.tile.bytes)

    # -- resources --------------------------------------------------------------------------------
    @property
    def buffers(self) -> list[SmemRegion]:
        masks = self.mask_stages * self.group * self.tile.mask_words * 4
        threads = self.role("softmax").threads
        return [
            SmemRegion("kv", self.kv_stages * self.tile.bytes, 1024,
                       "keys, SW128 and SW64; Q before them, O behind", stages=self.kv_stages),
            SmemRegion("p", P_STAGES * BOX_BYTES, 1024, "P bf16, [64, 64] SW128", stages=P_STAGES),
            SmemRegion("partial", threads * self.half_keys * tiles.FP32, 1024,
                       "scores over the other half's dims"),
            SmemRegion("maxima", threads * tiles.FP32, 16, "of half a row; at the end its sum"),
            SmemRegion("masks", masks, 16, "valid keys: a bit each, a query",
                       stages=self.mask_stages),
        ]  # fmt: skip

    @property
    def columns(self) -> list[TmemRegion]:
        """Tensor memory regions; lanes 0 to 63 and 64 to 127 have the CTA's 64 rows each."""
        dims, keys = self.tile.dims, self.tile.keys
        q_columns, rope_columns = dims // 2, self.tile.own_rope_dims // 2
        rope = dims + q_columns
        return [
            TmemRegion("o", 0, dims, "O fp32: upper lanes have dims 256 to 511"),
            TmemRegion("q", dims, q_columns, "Q bf16, two dims a column; upper lanes likewise"),
            TmemRegion("q_rope", rope, rope_columns, "Q's RoPE dims; upper lanes the last 32"),
            TmemRegion("s", rope + rope_columns, keys, "scores over the lane's dims, fp32"),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("softmax", WARPGROUP_SIZE, self.softmax_registers,
                 "Q into TMEM; adds the halves of the scores; P; O's scale; O and lse out"),
            Role("load", WARPGROUP_SIZE, self.load_registers,
                 "Q (warp 1), masks (warp 0), and the gather of the rows"),
            Role("mma", WARPGROUP_SIZE, self.mma_registers,
                 "one thread of the pair's first CTA issues every MMA"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """The MMAs wait at the first CTA's barriers, which count for both CTAs; the commits arrive
        in both. Two of softmax's warps may finish a tile before the others, so p_ready has a stage
        for each of two tiles."""
        softmax, load, mma = self.roles
        one, commit, warps = Arrives.ONE_THREAD, Arrives.COMMIT, Arrives.EVERY_WARP
        return (
            Barrier("q_full", 1, load, one, softmax, self.q_bytes, "Q is in shared memory"),
            Barrier("q_read", 1, softmax, warps, load, 0, "keys may overwrite Q"),
            Barrier("q_stored", 1, softmax, warps, mma, 0, "Q is in TMEM", ctas=tiles.CLUSTER),
            Barrier("kv_full", self.kv_stages, load, one, mma, tiles.CLUSTER * self.tile.bytes,
                    "both CTAs' halves of the keys are there", bytes_from_peer=True),
            Barrier("kv_free", self.kv_stages, mma, commit, load, 0, "P V has read the keys"),
            Barrier("s_ready", 1, mma, commit, softmax, 0, "the scores' halves are in TMEM"),
            Barrier("s_free", 1, softmax, warps, mma, 0, "they have been read", ctas=tiles.CLUSTER),
            Barrier("p_ready", P_STAGES, softmax, warps, mma, 0,
                    "P is in shared memory, O is scaled", ctas=tiles.CLUSTER),
            Barrier("p_free", P_STAGES, mma, commit, softmax, 0, "P V is added to O"),
            Barrier("masks_full", self.mask_stages, load, one, softmax, 0,
                    "the tile's masks are there"),
            Barrier("masks_free", self.mask_stages, softmax, warps, load, 0,
                    "they have been read"),
        )  # fmt: skip
