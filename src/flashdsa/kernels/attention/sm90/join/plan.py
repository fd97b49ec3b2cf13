"""Budget of the kernel that joins the lists of a backward's queries, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import Role


@dataclass(frozen=True)
class JoinPlan:
    """The compiled kernel; it has nothing to choose, and takes rows of any columns."""

    name: str = "mla_bwd_join"
    roles: tuple[Role, ...] = ()
    smem_bytes: int = 0
