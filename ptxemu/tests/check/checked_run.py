"""Small programs under the check: what was found, by code and level."""

from typing import Any

from tests.kernel_run import aligned, source

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.sched.policy import Policy

POLICIES = [
    Policy(asynchronous="eager", warps="round_robin"),
    Policy(asynchronous="late", warps="round_robin"),
    *(Policy(seed=seed) for seed in range(4)),
]
"""Schedules on each of which a verdict must be the same."""


def check(
    body: str,
    *,
    block: int = 32,
    grid: int = 1,
    cluster: int | None = None,
    policy: Policy | None = None,
    how: dict[str, Any] | None = None,
    **arrays: Any,
) -> list[Finding]:
    """Run a body (see `kernel_run.source`, which `how` is for) on zeroed arrays of uint32."""
    import numpy as np

    own = {
        name: aligned(np.zeros(array, np.uint32) if isinstance(array, int) else array)
        for name, array in arrays.items()
    }
    module = api.load(source(body, own, **(how or {})))
    result = module.launch(
        "k", grid, block, args=list(own.values()), cluster=cluster, policy=policy or Policy(),
        check=True,
    )  # fmt: skip
    return result.findings


def codes(findings: list[Finding], *levels: str) -> list[tuple[str, str]]:
    """(code, level) of the findings of `levels`, by default of errors and warnings."""
    wanted = levels or ("error", "warning")
    return sorted({(f.code, f.level) for f in findings if f.level in wanted})


def errors(findings: list[Finding]) -> set[str]:
    """The codes of the errors."""
    return {f.code for f in findings if f.level == "error"}


def on_all_schedules(body: str, **how: Any) -> set[tuple[tuple[str, str], ...]]:
    """The distinct verdicts of all POLICIES: one, unless the verdict depends on the schedule."""
    return {tuple(codes(check(body, policy=policy, **how))) for policy in POLICIES}
