"""Which operand forms may live in one kernel: pairs of instruction classes, assembled together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from flashdsa.dsl.umma import instruction_descriptor
from flashdsa.toolchain.ptxas import Assembler
from workbench.lab import forms_ptx
from workbench.lab.forms_catalog import OperandForm
from workbench.lab.forms_ptx import Issue
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

PRODUCT, WEIGHT_STATIONARY, COPY = "mma", "mma.ws", "cp"


@dataclass(frozen=True, order=True)
class InstructionClass:
    """What ptxas can tell apart: the shape is in a register.

    Attributes:
        instruction: "mma", "mma.ws" or "cp"; a: "SS" or "TS", "" for a copy.
    """

    cta_group: int
    instruction: str
    a: str = ""

    @property
    def name(self) -> str:
        """For people."""
        dot_ws = " .ws" if self.instruction == WEIGHT_STATIONARY else ""
        what = "tcgen05.cp" if self.instruction == COPY else self.a
        return f"{self.cta_group}-CTA{dot_ws} {what}"

    def issue(self) -> Issue:
        """One instruction."""
        if self.instruction == COPY:
            return Issue(forms_ptx.copy(self.cta_group), 0)
        is_ws = self.instruction == WEIGHT_STATIONARY
        line = forms_ptx.mma(self.cta_group, a_in_tmem=self.a == "TS", ws=is_ws)
        return Issue(line, instruction_descriptor(128, 64, "K", "K"))


@dataclass(frozen=True)
class Together:
    """Which classes were assembled in one kernel.

    Attributes:
        refused: pairs that ptxas refuses, with its words.
        groups: as few sets of classes as can be that ptxas accepts, each as one kernel.
        plan: whether the classes of all forms of the recommended plan make one kernel.
        version: of ptxas.
    """

    classes: tuple[InstructionClass, ...]
    refused: dict[tuple[InstructionClass, InstructionClass], str]
    groups: tuple[tuple[InstructionClass, ...], ...]
    plan: bool
    version: str


def classes_of(plan: FormPlan) -> frozenset[InstructionClass]:
    """What a form's kernel issues."""
    found = {
        InstructionClass(
            product.cta_group,
            WEIGHT_STATIONARY if product.ws else PRODUCT,
            "TS" if product.a_in_tmem else "SS",
        )
        for product in plan.products
    }
    if plan.route == "copy":
        found.add(InstructionClass(plan.cta_group, COPY))
    return frozenset(found)


def combined(classes: frozenset[InstructionClass]) -> str:
    """A kernel with an instruction of each class."""
    parts: dict[int, list[Issue]] = {}
    for one in sorted(classes):
        parts.setdefault(one.cta_group, []).append(one.issue())
    return forms_ptx.kernel(parts)


def judge_together(
    assembler: Assembler,
    forms: tuple[OperandForm, ...],
    before: Callable[[str], None] = lambda what: None,
) -> Together:
    """Assemble every pair of classes, then whole groups."""
    classes = tuple(sorted(frozenset().union(*(classes_of(form.plan) for form in forms))))
    refused: dict[tuple[InstructionClass, InstructionClass], str] = {}
    for one, other in combinations(classes, 2):
        before(f"{one.name} with {other.name}")
        verdict = assembler.judge(combined(frozenset({one, other})))
        if not verdict.accepted:
            refused[one, other] = verdict.message
    groups: list[set[InstructionClass]] = []
    for one in classes:
        for group in groups:
            if not any(tuple(sorted((one, other))) in refused for other in group):
                group.add(one)
                break
        else:
            groups.append({one})
    accepted = [group for group in groups if assembler.judge(combined(frozenset(group))).accepted]
    of_plan = frozenset().union(*(classes_of(form.plan) for form in forms if form.is_of_plan))
    return Together(
        classes,
        refused,
        tuple(tuple(sorted(group)) for group in accepted),
        not of_plan or assembler.judge(combined(of_plan)).accepted,
        assembler.version,
    )
