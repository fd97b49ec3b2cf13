"""What `flashdsa inspect` needs of a kernel: how to compile it, and which lines a role runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashdsa.plan.roles import Role
from flashdsa.plan.variables import RoleEstimate


@dataclass(frozen=True)
class InspectedRole:
    """A role of the plan and its code.

    Attributes:
        sources: what only this role's warps run: "load.py", or "kernel.py:produce" for a function.
        estimate: its variables; None: not counted.
    """

    role: Role
    sources: tuple[str, ...]
    estimate: RoleEstimate | None = None


@dataclass(frozen=True)
class InspectedKernel:
    """A kernel of ours.

    Attributes:
        compile: makes it with CuTe DSL, without a GPU.
        entry: in the name of the kernel's function; others of the cubin are reported without
            roles. smem_bytes: dynamic shared memory of a CTA.
    """

    name: str
    arch: str
    compile: Callable[[], object]
    entry: str
    roles: tuple[InspectedRole, ...]
    smem_bytes: int
