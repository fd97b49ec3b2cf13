"""The backward's timeline as data, each role's work in each step, for `flashdsa plan` and the docs.

Block b is the one whose dKV is computed. The MMAs' steps are the plan's; the other roles' work is
in the earliest possible step.
"""

from __future__ import annotations

from typing import NamedTuple

from flashdsa.kernels.attention.sm100.bwd.plan import Step


class TimelineRow(NamedTuple):
    """One step.

    Attributes:
        name: short. load, mma, softmax, reduce: work of the role of that name; "": it continues.
    """

    step: Step
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
