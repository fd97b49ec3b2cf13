"""Tiles, budgets, barriers, roles and the timeline of the Blackwell backward, as data.

The pair of CTAs of a query is split by dims (docs/decisions/0011): each holds all heads, half of
the value dims and half of the RoPE dims of the keys.

Block b of the timeline is the one whose dKV is computed. The MMAs' steps are the plan's; the other
roles' work is in the earliest possible step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.core.tile import BF16, FP32, GROUPS, PAIR_ROWS, PairTile
from flashdsa.plan import Arrives, Barrier, LiveRange, Role, Sm100Plan, SmemRegion, TmemRegion

QUERY_STEPS = 2
"""Steps in which Q and dO of an item come, as the parts of dKV of the item before that read them
end."""


class Step(IntEnum):
    """The steps in whose terms regions live. P to DKV2 are a period: the MMAs from P of the next
    block to dKV of this one, block b, in the order of their issue. A role is in a step from the
    wait or arrival on that lets the step begin."""

    LOAD = 0
    P = 1
    DKV0_S = 2
    DKV0_DS = 3
    DQ = 4
    DP = 5
    DKV1 = 6
    DKV2 = 7
    EPILOGUE = 8


@dataclass(frozen=True)
class BwdPlan(Sm100Plan):
    """One compiled backward: choices, then derived values.

    Attributes:
        group: neighbouring queries whose 128 / group heads share the rows of a pair, over the union
            of their keys; 1: a pair takes 128 heads of one query.
        tile: a block of keys. kv_stages: blocks in flight.
        index_stages: blocks whose row numbers are kept.
        ring_slots: slices of dKV on their way out. slot_bytes: of one.
        deterministic: each slot of `indices` gets a row of dKV, summed in a fixed order afterwards
            (docs/decisions/0012); else dKV is added to in memory. Requires group 1.
    """

    group: int = 1
    tile: PairTile = PairTile(32)
    kv_stages: int = 2
    index_stages: int = 4
    ring_slots: int = 3
    slot_bytes: int = 4096
    softmax_registers: int = 136
    load_registers: int = 72
    reduce_registers: int = 184
    mma_registers: int = 120
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group: expected one of {GROUPS}; got {self.group}")
        if self.deterministic and self.group > 1:
            raise ValueError("deterministic: expected group=1")
        if self.ring_slots < 2:
            raise ValueError(f"ring_slots: expected at least 2; got {self.ring_slots}")
        if self.kv_stages < 2:
            # P of the next block is issued before dQ of this one, which frees its stage.
            raise ValueError(f"kv_stages: expected at least 2; got {self.kv_stages}")
        super().__post_init__()

    @property
    def name(self) -> str:
        name = "mla_bwd" + (f"_group{self.group}" if self.group > 1 else "")
        return name + ("_deterministic" if self.deterministic else "")

    # -- shapes of one CTA ------------------------------------------------------------------------
    @property
    def group_heads(self) -> int:
        return PAIR_ROWS // self.group

    @property
    def mask_words(self) -> int:
        """Words of the keys of a block for each query; row numbers give them for one query."""
        return self.group if self.group > 1 else 0

    @property
    def q_bytes(self) -> int:
        """The CTA's value dims of Q, or of dO."""
        return PAIR_ROWS * self.tile.dims * BF16

    @property
    def q_rope_bytes(self) -> int:
        """All RoPE dims of Q."""
        return PAIR_ROWS * self.tile.rope_dims * BF16

    @property
    def part_dims(self) -> int:
        """Dims of dKV's parts 0 and 1: one for each lane."""
        return PAIR_ROWS

    @property
    def score_bytes(self) -> int:
        return PAIR_ROWS * self.tile.keys * BF16

    @property
    def partial_bytes(self) -> int:
        return PAIR_ROWS * self.tile.keys * FP32

    # -- resources --------------------------------------------------------------------------------
    @property
    def buffers(self) -> list[SmemRegion]:
        row_bytes = self.index_stages * self.tile.keys * 4
        mask_bytes = self.index_stages * self.mask_words * 4

        def loop(holds: str) -> tuple[LiveRange]:
            return (LiveRange(Step.LOAD, Step.DKV2, holds),)

        kv_live = (
            LiveRange(Step.LOAD, Step.DQ, "K(b)", 0),
            LiveRange(Step.DP, Step.DKV2, f"K(b+{self.kv_stages}) comes", 0),
            *(LiveRange(Step.LOAD, Step.DKV2, f"K(b+{i})", i) for i in range(1, self.kv_stages)),
        )
        partial_live = (
            LiveRange(Step.DKV0_DS, Step.DP, "P(b+1)"),
            LiveRange(Step.DKV1, Step.DKV0_S, "dP(b+1)"),
        )
        s_live = (LiveRange(Step.P, Step.DKV1, "S(b)"),)
        ds_live = (LiveRange(Step.DKV0_S, Step.DKV2, "dS(b)"),)
        return [
            SmemRegion("q", self.q_bytes, 1024, "Q, 4 x [128, 64] SW128", live=loop("Q")),
            SmemRegion("q_rope", self.q_rope_bytes, 1024, "Q's RoPE dims, SW128",
                       live=loop("Q rope")),
            SmemRegion("do", self.q_bytes, 1024, "dO, 4 x [128, 64] SW128", live=loop("dO")),
            SmemRegion("kv", self.kv_stages * self.tile.bytes, 1024, "keys, SW128 and SW64",
                       live=kv_live, stages=self.kv_stages),
            SmemRegion("s", self.score_bytes, 1024, "S bf16, a row of 32 keys a head, SW64",
                       live=s_live),
            SmemRegion("ds", self.score_bytes, 1024, "dS likewise", live=ds_live),
            SmemRegion("partial", self.partial_bytes, 1024, "the peer's P or dP, fp32",
                       live=partial_live),
            SmemRegion("ring", self.ring_slots * self.slot_bytes, 128, "slices of dKV, fp32",
                       stages=self.ring_slots),
            SmemRegion("rows", row_bytes, 16, "kv rows of a block, -1: none",
                       stages=self.index_stages),
            *(
                SmemRegion("masks", size, 16, "valid keys of a block: a bit each, a query",
                           stages=self.index_stages)
                for size in (mask_bytes,) if size
            ),
        ]  # fmt: skip

    @property
    def columns(self) -> list[TmemRegion]:
        tile = self.tile
        dkv_live = (
            LiveRange(Step.DKV0_S, Step.DP, "part 0"),
            LiveRange(Step.DKV1, Step.DKV1, "part 1"),
            LiveRange(Step.DKV2, Step.P, "part 2"),
        )
        p_live = (LiveRange(Step.P, Step.DQ, "P(b+1)"),)
        dp_live = (LiveRange(Step.DP, Step.P, "dP(b+1)"),)
        ds_live = (LiveRange(Step.DKV0_S, Step.DQ, "dS(b)"),)
        do_live = (LiveRange(Step.LOAD, Step.DKV2, "dO"),)
        dkv = self.tile.dims + self.tile.own_rope_dims
        p, dp, do = (dkv + i * self.tile.keys for i in (1, 2, 3))
        return [
            TmemRegion("dq", 0, tile.dims, "dQ fp32, lane = head"),
            TmemRegion("dq_rope", tile.dims, tile.own_rope_dims, "dQ's RoPE dims"),
            TmemRegion("dkv", dkv, tile.keys, "a part of dKV, lane = dim, column = key", dkv_live),
            TmemRegion("p", p, tile.keys, "P fp32, lane = head, column = key", p_live),
            TmemRegion("dp", dp, tile.keys, "dP likewise", dp_live),
            TmemRegion("ds", dp, tile.keys // 2, "dS bf16, two keys a column", ds_live),
            TmemRegion("do", do, tile.dims // 2, "dO bf16, two dims a column", do_live),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("softmax", WARPGROUP_SIZE, self.softmax_registers,
                 "exchanges P and dP with the peer; S, dS; dQ's way out"),
            Role("load", WARPGROUP_SIZE, self.load_registers,
                 "row numbers (warp 0) and their gather"),
            Role("reduce", WARPGROUP_SIZE, self.reduce_registers,
                 "dO into TMEM; adds dKV to global memory"),
            Role("mma", WARPGROUP_SIZE, self.mma_registers,
                 "a thread issues every MMA (warp 0), another Q's and dO's copies (warp 1)"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        softmax, load, reduce, mma = self.roles
        one, commit, every = Arrives.ONE_THREAD, Arrives.COMMIT, Arrives.EVERY_THREAD
        q_bytes, kv_stages = self.q_bytes + self.q_rope_bytes, self.kv_stages
        lanes, warps = Arrives.EVERY_LANE_OF_ONE_WARP, Arrives.EVERY_WARP
        rows = "the block's row numbers"
        return (
            Barrier("q_full", 1, mma, one, mma, q_bytes, "the item's Q is in shared memory"),
            Barrier("do_full", 1, mma, one, reduce, self.q_bytes, "its dO is in shared memory",
                    also_awaited_by=(mma,)),
            Barrier("query_free", QUERY_STEPS, mma, commit, mma, 0,
                    "half of Q and dO has been read"),
            Barrier("do_stored", 1, reduce, every, mma, 0, "dO is in TMEM"),
            Barrier("kv_full", kv_stages, load, one, mma, self.tile.bytes, "the keys are there"),
            Barrier("kv_free", kv_stages, mma, commit, load, 0,
                    "dQ has read the keys, and dS in TMEM", also_awaited_by=(mma,)),
            Barrier("p_ready", 1, mma, commit, softmax, 0, "P's partial sums are in TMEM"),
            Barrier("p_free", 1, softmax, every, mma, 0, "P has been read"),
            Barrier("dp_ready", 1, mma, commit, softmax, 0, "dP's partial sums are in TMEM"),
            Barrier("partial_full", 1, softmax, one, softmax, self.partial_bytes,
                    "the peer's partial sums have come", bytes_from_peer=True),
            Barrier("partial_free", 1, softmax, every, softmax, 0, "the peer has read what came",
                    from_peer=True),
            Barrier("s_ready", 1, softmax, every, mma, 0, "S is in shared memory"),
            Barrier("ds_ready", 1, softmax, every, mma, 0, "dS is in shared memory and TMEM"),
            Barrier("s_ds_free", 1, mma, commit, softmax, 0, "the block's dKV is computed"),
            Barrier("dkv_ready", 3, mma, commit, reduce, 0, "a part of dKV is in TMEM"),
            Barrier("dkv_free", 3, reduce, every, mma, 0, "the part has been read"),
            Barrier("rows_full", self.index_stages, load, lanes, softmax, 0, rows + " are there",
                    also_awaited_by=(reduce,)),
            Barrier("rows_free", self.index_stages, softmax, warps, load, 0,
                    rows + " have been read", also_produced_by=reduce),
            Barrier("dq_ready", 1, mma, commit, softmax, 0, "the item's dQ is in TMEM"),
        )  # fmt: skip


class TimelineRow(NamedTuple):
    """One step. `name`: short. `load`, `mma`, `softmax`, `reduce`: work of the role of that name;
    "": it continues."""

    step: IntEnum
    name: str
    load: str
    mma: str
    softmax: str
    reduce: str


TIMELINE = (
    TimelineRow(
        Step.LOAD, "load", "rows and K of blocks 0, 1", "Q, dO; P(0), then dP(0)",
        "P(0) and dP(0) as below", "dO: shared memory -> TMEM",
    ),
    TimelineRow(
        Step.P, "P", "", "P(b+1) = Q K^T", "S(b) -> shared memory", "last part of b-1 leaves",
    ),
    TimelineRow(
        Step.DKV0_S, "S dO", "", "part 0 = S dO", "+ peer's dP(b); dS(b) stored", "",
    ),
    TimelineRow(Step.DKV0_DS, "dS Q", "", "part 0 += dS Q", "P(b+1) -> peer", ""),
    TimelineRow(Step.DQ, "dQ", "", "dQ += dS K", "+ peer's P(b+1); S(b+1)", "part 0 -> dKV"),
    TimelineRow(
        Step.DP, "dP", "K(b+2) into b's stage", "dP(b+1) = dO K^T", "S(b+1), in registers", "",
    ),
    TimelineRow(
        Step.DKV1, "part 1", "", "part 1 = S dO + dS Q", "dP(b+1) -> peer", "",
    ),
    TimelineRow(
        Step.DKV2, "part 2", "", "owner: part 2 = dS Q", "waits until dKV(b) is computed",
        "part 1 -> dKV",
    ),
    TimelineRow(
        Step.EPILOGUE, "end", "K of the next item", "its Q and dO, by halves, as parts 0 and 1 end",
        "dQ -> global", "last parts -> dKV",
    ),
)  # fmt: skip
