"""Tiles, budgets, barriers, roles and the timeline of the backward whose heads are split.

The reference design's form, as far as the ISA allows it (docs/kernels/mla-bwd-sm100-heads.md): a
CTA has half of the heads and all dims of all 32 keys of a block. It gathers half of the keys and
reads the other half from its peer. Nothing dispatches to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import ClassVar

from flashdsa.hw import SM100, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd.plan import TimelineRow
from flashdsa.kernels.attention.sm100.core.tile import (
    BF16,
    BOX_DIMS,
    CLUSTER,
    FP32,
    PAIR_ROWS,
    PairTile,
)
from flashdsa.plan import Arrives, Barrier, LiveRange, Role, Sm100Plan, SmemRegion, TmemRegion
from flashdsa.plan.kernel_spec import KernelSpec

HEADS = PAIR_ROWS // CLUSTER
"""Heads of a CTA."""
PARTS = 3
"""Parts of a block's dKV: two of 256 dims, and the RoPE dims."""
ROW_PAD = 16
"""Bytes after a row that threads write: neighbouring rows begin in different banks."""


class Step(IntEnum):
    """The MMAs of a block in the order of their issue; before it Q and dO, after it dQ's way
    out."""

    LOAD = 0
    SCORES = 1
    DKV0_S = 2
    DKV0_DS = 3
    DQ = 4
    DKV1 = 5
    DKV2 = 6
    EPILOGUE = 7


@dataclass(frozen=True)
class HeadsPlan(Sm100Plan):
    """The compiled backward of 128 heads, 64 a CTA; attributes as of `BwdPlan`."""

    tile: PairTile = PairTile(WARP_SIZE)
    index_stages: int = 2
    softmax_registers: int = 136
    load_registers: int = 104
    reduce_registers: int = 152
    mma_registers: int = 120
    group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.tile.keys != WARP_SIZE:
            raise ValueError(f"keys: expected one a lane, {WARP_SIZE}; got {self.tile.keys}")
        self.check()

    @property
    def name(self) -> str:
        return "mla_bwd_heads"

    # -- shapes of one CTA ------------------------------------------------------------------------
    @property
    def own_keys(self) -> int:
        """Keys of a block that a CTA gathers; the others are its peer's."""
        return self.tile.keys // CLUSTER

    @property
    def boxes(self) -> int:
        """Boxes of a row's 576 dims."""
        return self.tile.d_qk // BOX_DIMS

    @property
    def head_box_bytes(self) -> int:
        """A box of Q or dO."""
        return HEADS * BOX_DIMS * BF16

    @property
    def part_dims(self) -> int:
        """Dims of dKV's parts 0 and 1."""
        return self.tile.d_v // 2

    @property
    def part_row_bytes(self) -> int:
        """From a row of a part of dKV to the next one, in shared memory."""
        return self.part_dims * FP32 + ROW_PAD

    @property
    def dq_row_bytes(self) -> int:
        """From a head's row of dQ to the next one, in shared memory."""
        return self.tile.d_qk * BF16 + ROW_PAD

    # -- resources --------------------------------------------------------------------------------
    @property
    def buffers(self) -> list[SmemRegion]:
        keys, stages = self.tile.keys, self.index_stages
        scores, kv = HEADS * keys * BF16, keys * self.tile.d_qk * BF16
        loop, end = LiveRange(Step.LOAD, Step.DKV2, ""), LiveRange(Step.EPILOGUE, Step.EPILOGUE, "")
        here = LiveRange(Step.LOAD, Step.DQ, "K(b)")
        comes = LiveRange(Step.DKV1, Step.DKV2, "K(b+1) comes")
        q, do = (HEADS * dims * BF16 for dims in (self.tile.d_qk, self.tile.d_v))
        out = HEADS * self.dq_row_bytes
        return [
            SmemRegion("q", q, 1024, "Q, 9 x [64, 64] SW128", live=(loop,)),
            SmemRegion("do", do, 1024, "dO, 8 x [64, 64] SW128", live=(loop,)),
            SmemRegion("dq", out, 1024, "dQ bf16, a padded row a head", "q", live=(end,)),
            SmemRegion("kv", kv, 1024, "keys, 9 x [32, 64] SW128", live=(here, comes)),
            SmemRegion("s", scores, 128, "S bf16 transposed, on its way to TMEM"),
            SmemRegion("ds", scores, 128, "dS likewise"),
            SmemRegion("ds_rows", scores, 128, "dS, a row of 32 keys a head"),
            SmemRegion("sdkv", keys * self.part_row_bytes, 128, "a part of dKV, fp32"),
            SmemRegion(
                "rows", stages * keys * 4, 16, "kv rows of a block, -1: none", stages=stages
            ),
        ]

    @property
    def columns(self) -> list[TmemRegion]:
        return [
            TmemRegion("dq", 0, 256, "dQ fp32, lane = head, dims halved over the lanes"),
            TmemRegion("dq_rope", 256, 32, "dQ's RoPE dims likewise"),
            TmemRegion("dkv", 288, 64, "part 0, then 1: lane = key, dims in four lane groups"),
            TmemRegion("dkv_rope", 352, 16, "part 2 likewise"),
            TmemRegion("p", 368, 32, "P fp32, 16 of a warp's lanes = head"),
            TmemRegion("dp", 400, 32, "dP likewise"),
            TmemRegion("s", 432, 32, "S bf16, lane = key, four times"),
            TmemRegion("ds", 464, 32, "dS likewise"),
            TmemRegion("ds_rows", 496, 16, "dS bf16, lane = head, twice"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def roles(self) -> tuple[Role, ...]:
        mma = "a thread issues every MMA (warp 0), another Q's and dO's copies (warp 1)"
        named = (
            ("softmax", self.softmax_registers, "S, dS, from and to TMEM; dQ's way out"),
            ("load", self.load_registers, "gathers half of the keys, reads the peer's half"),
            ("reduce", self.reduce_registers, "merges dKV with the peer's, adds it to memory"),
            ("mma", self.mma_registers, mma),
        )
        return tuple(Role(name, WARPGROUP_SIZE, regs, does) for name, regs, does in named)

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        softmax, load, reduce, mma = self.roles
        one, commit, every = Arrives.ONE_THREAD, Arrives.COMMIT, Arrives.EVERY_THREAD
        lanes, warps = Arrives.EVERY_LANE_OF_ONE_WARP, Arrives.EVERY_WARP
        stages, keys = self.index_stages, self.own_keys * self.tile.d_qk * BF16
        q, do = (HEADS * dims * BF16 for dims in (self.tile.d_qk, self.tile.d_v))

        def from_peer(name: str, role: Role, arrives: Arrives, completed: str) -> Barrier:
            return Barrier(name, 1, role, arrives, role, 0, completed, from_peer=True)

        return (
            Barrier("q_full", 1, mma, one, mma, q, "Q is in shared memory"),
            Barrier("do_full", 1, mma, one, mma, do, "dO is in shared memory"),
            Barrier("kv_full", 1, load, one, load, keys, "the own keys are there"),
            from_peer("kv_peer_full", load, one, "the peer's keys are in its memory"),
            Barrier("kv_peer_ready", 1, load, every, mma, 0, "both halves of the keys are there"),
            from_peer("kv_peer_read", load, warps, "the peer has read the own keys"),
            Barrier("kv_free", 1, mma, commit, load, 0, "dQ has read the keys"),
            Barrier("p_ready", 1, mma, commit, softmax, 0, "P is in TMEM, the dKV before computed"),
            Barrier("dp_ready", 1, mma, commit, softmax, 0, "dP is in TMEM"),
            Barrier("s_ready", 1, softmax, every, mma, 0, "S is in TMEM, and P has been read"),
            Barrier("ds_ready", 1, softmax, every, mma, 0, "dS is in TMEM, and dP has been read"),
            Barrier("dkv_ready", PARTS, mma, commit, reduce, 0, "a part of dKV is in TMEM"),
            Barrier("dkv_done", PARTS, reduce, every, mma, 0, "the part has landed"),
            from_peer("merge_full", reduce, every, "the peer's part is in its memory"),
            from_peer("merge_free", reduce, warps, "the peer has read the own part"),
            Barrier(
                "rows_full", stages, load, lanes, softmax, 0, "the block's row numbers are there",
                also_awaited_by=(reduce,),
            ),
            Barrier(
                "rows_free", stages, softmax, warps, load, 0, "row numbers have been read",
                also_produced_by=reduce,
            ),
            Barrier("dq_ready", 1, mma, commit, softmax, 0, "dQ is in TMEM, every MMA is done"),
        )  # fmt: skip


TIMELINE = (
    TimelineRow(Step.LOAD, "load", "rows and K of block 0", "Q, dO", "", ""),
    TimelineRow(Step.SCORES, "scores", "", "P = Q K^T, dP = dO V^T", "P(b) -> S(b)", ""),
    TimelineRow(Step.DKV0_S, "S dO", "", "part 0 = S^T dO", "S(b) -> TMEM; dP(b) -> dS(b)", ""),
    TimelineRow(Step.DKV0_DS, "dS Q", "", "part 0 += dS^T Q", "dS(b) -> TMEM", ""),
    TimelineRow(Step.DQ, "dQ", "", "dQ += dS K: 128 + 128 + 32 columns", "", "part 0 merged, sent"),
    TimelineRow(
        Step.DKV1, "part 1", "own K(b+1)", "part 1 = S^T dO + dS^T Q", "", "part 1 likewise"
    ),
    TimelineRow(Step.DKV2, "part 2", "peer's K(b+1)", "part 2 = dS^T Q", "", "part 2 likewise"),
    TimelineRow(Step.EPILOGUE, "end", "", "", "dQ -> shared memory -> global", ""),
)
SPLIT_HEADS = KernelSpec(
    name="mla_bwd_heads",
    arch=SM100.name,
    operations=("mla_bwd",),
    plans=(HeadsPlan(),),
    build="workbench.lab.kernels.split_heads.kernel:compile_heads",
    entry="heads_kernel",
    timeline="workbench.lab.kernels.split_heads.plan:TIMELINE",
)
"""The kernel's row, which is not in the library's catalog."""
