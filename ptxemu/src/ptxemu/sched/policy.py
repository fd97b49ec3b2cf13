"""Schedules: when asynchronous work happens and in which order warps run, all from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.sched.orders import Orders

DEFAULT_LIMIT = 1_000_000_000
"""Some hours."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Interleaving of a run; the same policy and seed give the same run.

    Attributes:
        asynchronous: "eager": at once; "late": only when no warp can go on without it;
            "slow": like "late", and copies after all else and in the order of their issue, as if
            everything waits for memory; "random": at random moments.
        warps: "round_robin", or "random".
        seed: seed of the random choices.
        probability: probability of an asynchronous step after a warp's step, with "random".
        timeouts: probability that after a warp's step some warp's wait with a time limit
            (mbarrier.try_wait) gives up, as it may at any time; if 0, only when all wait.
        lanes_apart: probability that lanes of a warp part before an instruction; they meet again
            when one waits for them (bar.warp.sync, shfl.sync). If 0, they go in step.
        fill: the byte that shared memory and TMEM hold at first; the check runs a launch again with
            another one if it reads memory that nobody wrote.
        limit: warp instructions after which the run is stopped with a StepLimitError.
        processes: most processes that share the clusters of a long launch, if nothing listens to it
            and no instruction of the kernel ties clusters together. The results are the same if
            there is no race.
    """

    asynchronous: str = "random"
    warps: str = "random"
    seed: int = 0
    probability: float = 0.2
    timeouts: float = 0.0
    lanes_apart: float = 0.0
    limit: int = DEFAULT_LIMIT
    fill: int = 0xFF
    processes: int = 1
    warp_lanes: bool = True

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        for name, value, choices in (
            ("asynchronous", self.asynchronous, ("eager", "late", "slow", "random")),
            ("warps", self.warps, ("round_robin", "random")),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided(Policy):
    """A schedule in which `orders` chooses; asynchronous work is done at once."""

    orders: Orders
