"""The reference design's own budget of a Blackwell backward, held against the architecture.

The design that this library began with lists the regions of blocks of `B_TOPK` = 32 keys, and of 64
keys, before, only the sum: 225.7 KB. `flashdsa.plan` lays both out and checks them, as it does the
plan that ships (`python -m workbench plan mla_bwd`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.plan import (
    BudgetError,
    LiveRange,
    SmemPlan,
    SmemRegion,
    TmemPlan,
    TmemRegion,
    plan_smem,
    plan_tmem,
)

KB = 1024
BF16, FP32 = 2, 4
HEADS, D_V, D_ROPE = 64, 512, 64
"""Rows of Q of one CTA of the pair; columns of V, and of RoPE."""
PART = 256
"""Dims of a part of dKV in tensor memory."""
LANES_BYTES = 128 * FP32
"""Bytes of a column of tensor memory."""


class Step(IntEnum):
    """Times in which regions share memory: P and dP, the parts of dKV, and dQ's way out."""

    SCORES = 0
    DKV_PARTS = 1
    DKV_ROPE = 2
    OUTPUT = 3


def _live(first: Step, last: Step, holds: str) -> tuple[LiveRange, ...]:
    return (LiveRange(first, last, holds),)


@dataclass(frozen=True)
class ReferencePlan:
    """Regions of one CTA.

    Attributes:
        keys: of a block, the design's `B_TOPK`; half of them lie in each CTA of the pair.
    """

    keys: int = 32

    @property
    def staged_dims(self) -> int:
        """Dims of the staged dKV: all of them; of 64 keys those of a part, the only number with
        which the sum is the one that the design names."""
        return D_V + D_ROPE if self.keys == 32 else PART

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions in order: the union `u`, then the members that stay."""
        half = self.keys // 2 * (D_V + D_ROPE) * BF16
        loop = _live(Step.SCORES, Step.DKV_ROPE, "")
        score = HEADS * self.keys * BF16
        return [
            SmemRegion("kv", half, 128, f"[{self.keys // 2}, 576] bf16", live=loop),
            SmemRegion("kv_peer", half, 128, "the peer's half", live=loop),
            SmemRegion("q_nope", HEADS * D_V * BF16, 128, "[64, 512] bf16", live=loop),
            SmemRegion("q_rope", HEADS * D_ROPE * BF16, 128, "[64, 64] bf16", live=loop),
            SmemRegion(
                "dq", HEADS * (D_V + D_ROPE) * BF16, 128, "[64, 576] bf16", overlays="kv",
                live=_live(Step.OUTPUT, Step.OUTPUT, ""),
            ),
            SmemRegion(
                "sdKV", self.keys * self.staged_dims * FP32, 128,
                f"[{self.keys}, {self.staged_dims}] fp32",
            ),
            SmemRegion("s", score, 128, f"[64, {self.keys}] bf16"),
            SmemRegion("ds", score, 128, f"[64, {self.keys}] bf16"),
            SmemRegion("rowwise", 3 * 128 * FP32, 16, "maximum, sum and delta of 128 rows"),
            SmemRegion("barriers", 19 * 8, 8, "19 mbarriers"),
            SmemRegion("is_k_valid", self.keys // 8, 4, "a bit a key"),
            SmemRegion("tmem_start_addr", 4, 4, "address of the TMEM allocation"),
        ]  # fmt: skip

    @property
    def columns(self) -> list[TmemRegion]:
        """Tensor memory regions; those of 64 keys are the same ones, as wide as they then are."""
        dkv = self.keys * PART * FP32 // LANES_BYTES
        small = HEADS * self.keys * FP32 // LANES_BYTES
        at = 288 + dkv
        return [
            TmemRegion("dQ", 0, 256, "[64, 512] fp32"),
            TmemRegion("dQ_RoPE", 256, 32, "[64, 64] fp32"),
            TmemRegion("dKV", 288, dkv, f"[{self.keys}, 256] fp32, part 0, then part 1"),
            TmemRegion(
                "dKV_RoPE", at, small, f"[{self.keys}, 64] fp32",
                _live(Step.DKV_ROPE, Step.DKV_ROPE, ""),
            ),
            TmemRegion(
                "dP", at, small, f"[64, {self.keys}] fp32",
                _live(Step.SCORES, Step.DKV_PARTS, ""),
            ),
            TmemRegion("P", at + small, small, f"[64, {self.keys}] fp32, then S"),
            TmemRegion("dO", at + 2 * small, 128, "[64, 512] bf16"),
        ]  # fmt: skip

    @property
    def smem(self) -> SmemPlan:
        """Shared memory, laid out and checked."""
        return plan_smem(self.buffers, SM100.smem_bytes)

    @property
    def tmem(self) -> TmemPlan:
        """Tensor memory, checked.

        Raises:
            BudgetError: it has too few columns, as for 64 keys.
        """
        return plan_tmem(self.columns, SM100.tmem_columns)


class Budget(NamedTuple):
    """A plan's line of the comparison."""

    name: str
    keys: int
    smem_bytes: int
    tmem_columns: int | None
    refusal: str

    @property
    def kilobytes(self) -> float:
        """Shared memory in KB, to a tenth."""
        return round(self.smem_bytes / KB, 1)

    @property
    def share(self) -> float:
        """Percent of the shared memory that a CTA may have, to a tenth, as the design counts: of
        tenths of KB. Its 83.6 % is 83.5 % of bytes."""
        return round(100 * self.kilobytes / (SM100.smem_bytes / KB), 1)


def budgets() -> Iterator[Budget]:
    """The design's plan before and after, and the one that ships."""
    for keys, name in ((64, "reference, before"), (32, "reference")):
        plan = ReferencePlan(keys)
        try:
            columns, refusal = plan.tmem.allocated, ""
        except BudgetError as error:
            columns, refusal = None, str(error)
        yield Budget(name, keys, plan.smem.total, columns, refusal)
    shipped = BwdPlan()
    yield Budget("ships", shipped.tile.keys, shipped.smem.total, shipped.tmem.allocated, "")


REASONS = (
    "One cta_group a kernel: the design mixes cta_group::2 (P, dP, dQ) with cta_group::1 .ws "
    "(dKV). The PTX ISA forbids it, and ptxas 13.0 and 13.5 refuse it.",
    "So dims are split between the CTAs of a pair, not heads: each has 128 heads and 288 of 576 "
    "dims. q has as many bytes, kv has two stages, and no keys come from the peer.",
    "dKV reads dO in shared memory, which the design's list leaves out: 65,536 bytes.",
    "Parts of dKV leave by slices of 4 KiB from a ring, not from 73,728 bytes.",
)
"""Reasons why what ships differs (docs/decisions/0011, 0014)."""
