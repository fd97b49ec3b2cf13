"""Tiles, budgets, barriers and roles of the Blackwell forward, as data.

A pair of CTAs takes 128 (query, head) rows of Q, 64 each. Every CTA gathers half of the dims of all
keys (docs/decisions/0020), which are its half of N in Q K^T and its value dims in P V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.plan import (
    Arrives,
    Barrier,
    Role,
    Sm100Plan,
    SmemRegion,
    TmemRegion,
)

CLUSTER = 2
ROWS = 64
"""(query, head) pairs of a CTA."""
PAIR_ROWS = CLUSTER * ROWS
TILE_KEYS = 64
D_QK = 576
D_V = 512
BF16 = 2
FP32 = 4
BOX_DIMS = 64
"""bf16 in a span of the 128-byte swizzle: columns of a box."""
BOX_BYTES = ROWS * BOX_DIMS * BF16
"""Bytes of a box of 64 rows: of Q, of O, of P, and of keys, whose tiles have 64."""
DIMS = D_V // CLUSTER
"""Value dims of the keys in one CTA."""
ROPE_DIMS = (D_QK - D_V) // CLUSTER
"""RoPE dims of the keys in one CTA."""
VALUE_BOXES = DIMS // BOX_DIMS
"""Boxes of a CTA's value dims; the RoPE dims follow them."""
Q_BOXES = D_QK // BOX_DIMS
HALF_KEYS = TILE_KEYS // 2
"""Keys of a row whose P a thread computes."""
MASK_WORDS = TILE_KEYS // WARP_SIZE
P_STAGES = 2
GROUPS = (1, 2, 4, 8)
HEADS = tuple(PAIR_ROWS // group for group in GROUPS)
"""Heads of a query."""


@dataclass(frozen=True)
class FwdPlan(Sm100Plan):
    """One compiled forward: choices, then derived values.

    Attributes:
        group: neighbouring queries whose 128 / group heads share the rows of a pair, over the union
            of their keys; 1: a pair takes 128 heads of one query.
        kv_stages: tiles of keys in flight. mask_stages: tiles whose valid keys are kept.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
    """

    group: int = 1
    kv_stages: int = 5
    mask_stages: int = 4
    softmax_registers: int = 240
    load_registers: int = 80
    mma_registers: int = 80
    lazy_log2: float = 8.0

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.group not in GROUPS:
            raise ValueError(f"group: expected one of {GROUPS}; got {self.group}")
        if self.kv_stages * self.kv_bytes < Q_BOXES * BOX_BYTES or self.kv_stages < 3:
            # Q overlays the last two of the first tiles, and another tile comes meanwhile.
            raise ValueError(f"kv_stages: expected at least 3; got {self.kv_stages}")
        self.check()

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return "sm100_mla_fwd" + (f"_group{self.group}" if self.group > 1 else "")

    @property
    def group_heads(self) -> int:
        """Heads of each query of a group."""
        return PAIR_ROWS // self.group

    @property
    def kv_value_bytes(self) -> int:
        """The CTA's value dims of a tile of keys."""
        return TILE_KEYS * DIMS * BF16

    @property
    def kv_bytes(self) -> int:
        """A tile of keys: value dims, then RoPE dims."""
        return self.kv_value_bytes + TILE_KEYS * ROPE_DIMS * BF16

    @property
    def q_stages(self) -> int:
        """Stages of keys, the first ones, whose bytes Q has until it is in tensor memory."""
        return -(-Q_BOXES * BOX_BYTES // self.kv_bytes)

    # -- resources --------------------------------------------------------------------------------
    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        masks = self.mask_stages * self.group * MASK_WORDS * 4
        threads = self.softmax.threads
        return [
            SmemRegion(
                "kv", self.kv_stages * self.kv_bytes, 1024,
                "keys, SW128 and SW64; Q before them, O behind", stages=self.kv_stages,
            ),
            SmemRegion("p", P_STAGES * BOX_BYTES, 1024, "P bf16, [64, 64] SW128", stages=P_STAGES),
            SmemRegion(
                "partial", threads * HALF_KEYS * FP32, 1024, "scores over the other half's dims"
            ),
            SmemRegion("maxima", threads * FP32, 16, "of half a row; at the end its sum"),
            SmemRegion(
                "masks", masks, 16, "valid keys: a bit each, a query", stages=self.mask_stages
            ),
        ]  # fmt: skip

    @property
    def columns(self) -> list[TmemRegion]:
        """Tensor memory regions; lanes 0 to 63 and 64 to 127 have the CTA's 64 rows each."""
        q_columns, rope_columns = DIMS // 2, ROPE_DIMS // 2
        rope = DIMS + q_columns
        return [
            TmemRegion("o", 0, DIMS, "O fp32: upper lanes have dims 256 to 511"),
            TmemRegion("q", DIMS, q_columns, "Q bf16, two dims a column; upper lanes likewise"),
            TmemRegion("q_rope", rope, rope_columns, "Q's RoPE dims; upper lanes the last 32"),
            TmemRegion("s", rope + rope_columns, TILE_KEYS, "scores over the lane's dims, fp32"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def softmax(self) -> Role:
        """Warpgroup 0."""
        does = "Q into TMEM; adds the halves of the scores; P; O's scale; O and lse out"
        return Role("softmax", WARPGROUP_SIZE, self.softmax_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def load(self) -> Role:
        """Warpgroup 1."""
        does = "Q (warp 1), masks (warp 0), and the gather of the rows"
        return Role("load", WARPGROUP_SIZE, self.load_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def mma(self) -> Role:
        """Warpgroup 2."""
        does = "one thread of the pair's first CTA issues every MMA"
        return Role("mma", WARPGROUP_SIZE, self.mma_registers, does)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warpgroups, in thread order."""
        return self.softmax, self.load, self.mma

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        The MMAs wait at the first CTA's barriers, which count for both CTAs; the commits arrive in
        both. Two of softmax's warps may finish a tile before the others, so p_ready has a stage for
        each of two tiles.
        """
        softmax, load, mma = self.roles
        one, commit, warps = Arrives.ONE_THREAD, Arrives.COMMIT, Arrives.EVERY_WARP
        return (
            Barrier(
                "q_full", 1, load, one, softmax, Q_BOXES * BOX_BYTES, "Q is in shared memory"
            ),
            Barrier("q_read", 1, softmax, warps, load, 0, "keys may overwrite Q"),
            Barrier("q_stored", 1, softmax, warps, mma, 0, "Q is in TMEM", ctas=CLUSTER),
            Barrier(
                "kv_full", self.kv_stages, load, one, mma, CLUSTER * self.kv_bytes,
                "both CTAs' halves of the keys are there", bytes_from_peer=True,
            ),
            Barrier("kv_free", self.kv_stages, mma, commit, load, 0, "P V has read the keys"),
            Barrier("s_ready", 1, mma, commit, softmax, 0, "the scores' halves are in TMEM"),
            Barrier("s_free", 1, softmax, warps, mma, 0, "they have been read", ctas=CLUSTER),
            Barrier(
                "p_ready", P_STAGES, softmax, warps, mma, 0,
                "P is in shared memory, O is scaled", ctas=CLUSTER,
            ),
            Barrier("p_free", P_STAGES, mma, commit, softmax, 0, "P V is added to O"),
            Barrier(
                "masks_full", self.mask_stages, load, one, softmax, 0, "the tile's masks are there"
            ),
            Barrier(
                "masks_free", self.mask_stages, softmax, warps, load, 0, "they have been read"
            ),
        )  # fmt: skip
