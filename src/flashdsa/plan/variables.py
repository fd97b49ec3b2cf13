"""What a role keeps in registers, as its author counts it: the estimate beside the measurement."""

from __future__ import annotations

from dataclasses import dataclass

REGISTER_BITS = 32
TEMPORARIES = 10
"""Registers that the compiler takes for addresses and halves of results, on top of variables."""


@dataclass(frozen=True)
class RoleVariable:
    """A value, or an array of values, of each thread.

    Attributes:
        elements: of a thread. bits: of an element; elements narrower than a register are packed.
        first, last: the phases of the role between which it is needed; "" is the role's first or
            last one.
    """

    name: str
    elements: int
    bits: int = REGISTER_BITS
    first: str = ""
    last: str = ""

    @property
    def registers(self) -> int:
        """32-bit registers that it takes."""
        return -(-self.elements * self.bits // REGISTER_BITS)


@dataclass(frozen=True)
class RoleEstimate:
    """The registers of a role by its variables: a floor of what the compiler can reach.

    Attributes:
        phases: of the role, in order; variables live from one to another.
        temporaries: the compiler's, in every phase.
    """

    role: str
    phases: tuple[str, ...]
    variables: tuple[RoleVariable, ...]
    temporaries: int = TEMPORARIES

    def __post_init__(self) -> None:
        """Every variable lives in phases of the role."""
        for variable in self.variables:
            first, last = self._span(variable)
            if first > last:
                raise ValueError(f"{self.role}: {variable.name} ends before it begins")

    def in_phase(self, phase: str) -> tuple[RoleVariable, ...]:
        """The variables that are needed in a phase."""
        at = self.phases.index(phase)
        spans = [(variable, *self._span(variable)) for variable in self.variables]
        return tuple(variable for variable, first, last in spans if first <= at <= last)

    def registers(self, phase: str) -> int:
        """Registers of a phase."""
        return self.temporaries + sum(variable.registers for variable in self.in_phase(phase))

    @property
    def peak_phase(self) -> str:
        """The phase with the most registers, the first of them."""
        return max(self.phases, key=self.registers)

    @property
    def peak(self) -> int:
        """The most registers of a phase."""
        return self.registers(self.peak_phase)

    def _span(self, variable: RoleVariable) -> tuple[int, int]:
        for name in (variable.first, variable.last):
            if name and name not in self.phases:
                raise ValueError(f"{self.role}: {variable.name}: no phase {name!r}")
        first = self.phases.index(variable.first) if variable.first else 0
        last = self.phases.index(variable.last) if variable.last else len(self.phases) - 1
        return first, last
