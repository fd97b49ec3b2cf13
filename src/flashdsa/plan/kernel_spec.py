"""A kernel as a row of data: its name, its sources and its parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import ARCHITECTURES
from flashdsa.plan.roles import Role


class KernelPlan(Hashable, Protocol):
    """A frozen dataclass whose fields are the choices of one compiled kernel."""

    @property
    def name(self) -> str:
        """The exported name of the compiled function: no other plan of any kernel has it."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warps by what they do; empty if all of them do the same."""

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel. Rows are compared by identity: each exists once.

    Attributes:
        name: for people. arch: name of its architecture. operations: it serves.
        plans: `KernelPlan`s that are compiled in advance; the first stands for all in tables.
        build: "module:function" that compiles a plan with CuTe DSL.
        entry: in the name of the kernel's PTX function; others beside it are its helpers.
        roles: name of a role -> names that the kernel uses in this role's warps only: functions,
            or constants that name functions.
        timeline: "module:TIMELINE": rows of a step, its short name, and what each role does in it;
            "": none.
    """

    name: str
    arch: str
    operations: tuple[str, ...]
    plans: tuple[Any, ...]
    build: str
    entry: str
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    timeline: str = ""

    @property
    def backend(self) -> str:
        """The backend that runs it."""
        return ARCHITECTURES[self.arch].backend

    def load_timeline(self) -> tuple[Any, ...]:
        """The timeline's rows; empty if the kernel has none."""
        module, _, name = self.timeline.partition(":")
        return getattr(import_module(module), name) if module else ()

    @property
    def plan(self) -> Any:
        """The plan of a kernel that has nothing to choose."""
        (only,) = self.plans
        return only

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(Variant(self, plan) for plan in self.plans)


class Variant(NamedTuple):
    """A compiled function of a kernel: the kernel's row and the plan."""

    spec: KernelSpec
    plan: Any

    @property
    def name(self) -> str:
        return str(self.plan.name)

    @property
    def choices(self) -> dict[str, Any]:
        """The plan's fields; those of a field with fields of its own, a tile, in its place."""
        found: dict[str, Any] = {}
        for one in fields(self.plan):
            value = getattr(self.plan, one.name)
            found |= asdict(value) if is_dataclass(value) else {one.name: value}  # type: ignore[arg-type]
        return found


def find_kernel(kernels: Sequence[KernelSpec], name: str, arch: str | None = None) -> Variant:
    """The first variant of the kernel of that name, or the variant that is exported under it.

    Args:
        arch: None: the only architecture that it is written for.

    Raises:
        ArgumentValueError: no kernel has the name; lists the kernels.
    """
    found = [spec.variants[0] for spec in kernels if spec.name == name] or [
        variant for spec in kernels for variant in spec.variants if variant.name == name
    ]
    if not found:
        names = ", ".join(dict.fromkeys(spec.name for spec in kernels))
        raise ArgumentValueError(
            f"{name}: no kernel of that name and no such file; kernels: {names}"
        )
    archs = [variant.spec.arch for variant in found]
    if arch is None and len(archs) > 1:
        raise ArgumentValueError(f"{name}: --arch is needed, one of {', '.join(archs)}")
    arch = arch or archs[0]
    if arch not in archs:
        raise ArgumentValueError(f"{name}: written for {', '.join(archs)}; got --arch {arch}")
    return found[archs.index(arch)]
