"""Small programs under the check: what was found, by code and level."""

import re
from typing import Any, NamedTuple

from tests.kernel_run import aligned, source

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.errors import DeadlockError, ExecutionError
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


def verdict(findings: list[Finding]) -> str:
    """The level, or "isa" of errors against the ISA alone, and the code of each finding."""
    words = {f"{'isa' if f.kind == 'isa' else f.level} {f.code}" for f in findings}
    return ", ".join(sorted(words))


class Program(NamedTuple):
    """A body, and what is found in it: one of the verdicts that ` | ` parts, the first on some
    schedule. "deadlock" and "error" are runs that end so."""

    body: str
    found: str = ""
    how: dict[str, Any] = {}  # noqa: RUF012
    """Of `check`."""


def judge(program: Program) -> None:
    """Compare the verdicts of all schedules."""
    found = set()
    for policy in POLICIES:
        try:
            found.add(verdict(check(program.body, policy=policy, **program.how)))
        except DeadlockError:
            found.add("deadlock")
        except ExecutionError:
            found.add("error")
    expected = program.found.split(" | ")
    assert expected[0] in found and found <= set(expected), found


def pair(name: str, body: str, missing: str, **how: Any) -> dict[str, Program]:
    """A program with the part between « and », in which nothing is found, and one without it."""
    before, part, behind = re.split("[«»]", body)
    return {
        name: Program(before + part + behind, "", how),
        f"{name}, not": Program(before + behind, missing, how),
    }
