"""Schedules: when asynchronous work happens and in which order warps run, all from one seed."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_LIMIT = 1_000_000_000
"""Some hours."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a run is interleaved; the same policy and seed give the same run.

    Attributes:
        asynchronous: "eager": at once; "late": only when no warp can go on without it;
            "slow": so, and copies after all else and in the order of their issue, as where
            memory is what all wait for; "random": at random moments.
        warps: "round_robin", or "random".
        seed: of the random choices.
        probability: with "random", that an asynchronous step is taken after a warp's step.
        timeouts: that after a warp's step some warp's wait with a time limit
            (mbarrier.try_wait) gives up, as it may at any time; without, only where all wait.
        lanes_apart: that lanes of a warp part in front of an instruction; they meet again where
            one waits for them (bar.warp.sync, shfl.sync). Without, they go in step.
        fill: the byte that shared memory and TMEM hold at first; a result that depends on it
            depends on memory that nobody wrote.
        limit: warp instructions after which the run is stopped with a StepLimitError.
        processes: among which the clusters of a long launch are dealt, at most, if nothing listens
            to it and no instruction of the kernel ties clusters together. Where there is no race
            the results are the same.
    """

    asynchronous: str = "random"
    warps: str = "random"
    seed: int = 0
    probability: float = 0.2
    timeouts: float = 0.0
    lanes_apart: float = 0.0
    limit: int = DEFAULT_LIMIT
    fill: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        for name, value, choices in (
            ("asynchronous", self.asynchronous, ("eager", "late", "slow", "random")),
            ("warps", self.warps, ("round_robin", "random")),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}")
