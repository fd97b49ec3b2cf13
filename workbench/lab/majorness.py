"""The majorness study: dV = S^T dO with B K-major and MN-major, and every step of the way."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ptxemu.check import Finding
from ptxemu.descriptors import InstructionDescriptor, decode
from workbench.lab.kernels.majorness.plan import MajornessPlan
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan
from workbench.lab.kernels.majorness.sm100.plan import Sm100Plan
from workbench.lab.operand_view import CORNER, Recording, StepView, step_views
from workbench.lab.runs import DISTRIBUTIONS, Inputs, Runner, empty_arguments, make_inputs

PLANS: dict[str, type[MajornessPlan]] = {"sm_90a": Sm90Plan, "sm_100a": Sm100Plan}
REFERENCE_MAX_ABS = 2.0**-17
"""7.629395e-06, the error of the reference kernel when it was right."""
STUDY_MAGNITUDE = 16.0
"""Largest |dV| for which REFERENCE_MAX_ABS is the limit: larger ones have larger ulps."""
STUDY_K = 128
"""Largest k for which it is."""
NARROW_ACCUMULATION = 2.0**-12
"""Relative error of fp8 products on Hopper, whose tensor cores add them with about 14 bits."""


@dataclass(frozen=True)
class MajorResult:
    """One run, with B of one major.

    Attributes:
        instruction, instruction_fields: the instruction descriptor; wgmma has none: its opcode.
        part0_max_abs: of D after part 0 against the reference of its heads; None if not read back.
        max_abs: of D after part 1 against the reference.
        corners: D's first rows and columns, "after part 0" (or not), "after part 1", "reference".
        findings: ptxemu's, one line each.
    """

    b_major: str
    instruction: str
    instruction_fields: dict[str, Any]
    steps: list[StepView]
    cuts_identical: bool
    part0_max_abs: float | None
    max_abs: float
    corners: dict[str, list[list[float]]]
    findings: list[str]
    where: str


@dataclass(frozen=True)
class MajornessReport:
    """Both majors of one plan; k_vs_mn: max_abs between the two results, None if one was run."""

    arch: str
    plan: dict[str, Any]
    data: str
    distribution: str
    seed: int
    max_reference: float
    limit: float
    results: dict[str, MajorResult]
    k_vs_mn: float | None

    @property
    def failures(self) -> list[str]:
        found = []
        for name, result in self.results.items():
            label = name.upper()
            if not result.max_abs <= self.limit:
                found.append(f"{label} vs reference: {result.max_abs:.6e} > {self.limit:.6e}")
            if not result.cuts_identical:
                found.append(f"{label}: Tile and Shape give different descriptors")
            if any(step.difference is not None for step in result.steps):
                found.append(f"{label}: an operand is not what the tensor core should see")
            found += [f"{label}: {finding}" for finding in result.findings]
        if self.k_vs_mn is not None and self.k_vs_mn != 0:
            found.append(f"K vs MN: {self.k_vs_mn:.6e}, expected exactly 0")
        return found

    def to_json_dict(self) -> dict[str, Any]:
        return asdict(self) | {"failures": self.failures, "passed": not self.failures}


@dataclass(frozen=True)
class Study:
    """A plan to run, with each of the majors as b_major, on the data of a seed."""

    arch: str
    plan: MajornessPlan
    majors: tuple[str, ...] = ("k", "mn")
    data: str = "random"
    seed: int = 0

    def plans(self) -> dict[str, MajornessPlan]:
        """Make the plan of each major.

        Raises:
            InstructionLimitError: the instruction does not take one of the majors.
        """
        return {major: replace(self.plan, b_major=major) for major in self.majors}

    def inputs(self) -> Inputs:
        return make_inputs(self.plan, self.data, self.seed)


def run_study(study: Study, runner: Runner) -> tuple[MajornessReport, dict[str, Recording]]:
    """Run the kernel once for each major and compare."""
    inputs = study.inputs()
    results, recordings = {}, {}
    for major, plan in study.plans().items():
        results[major], recordings[major] = _run_major(study.arch, plan, inputs, runner)
    k_vs_mn = None
    if set(study.majors) == {"k", "mn"}:
        both = [torch.from_numpy(recordings[major].accumulators[1]) for major in ("k", "mn")]
        k_vs_mn = _max_abs(both[0], both[1])
    largest = float(inputs.reference().abs().max())
    on_hardware = not all(result.where.startswith("ptxemu") for result in results.values())
    report = MajornessReport(
        study.arch,
        asdict(study.plan),
        study.data,
        DISTRIBUTIONS[study.data],
        study.seed,
        largest,
        limit_of(study, largest, on_hardware=on_hardware),
        results,
        k_vs_mn,
    )
    return report, recordings


def limit_of(study: Study, largest: float, *, on_hardware: bool) -> float:
    """Set the largest max_abs against the fp32 reference: 0 for integers, the study's 2^-17 for
    values and K of its size, in proportion for larger ones."""
    if study.data == "integer":
        return 0.0
    if on_hardware and study.arch == "sm_90a" and study.plan.element_bytes == 1:
        return NARROW_ACCUMULATION * largest
    scale = max(1.0, largest / STUDY_MAGNITUDE) * max(1.0, study.plan.k / STUDY_K)
    return REFERENCE_MAX_ABS * scale


def _run_major(
    arch: str, plan: MajornessPlan, inputs: Inputs, runner: Runner
) -> tuple[MajorResult, Recording]:
    tensors = empty_arguments(plan)
    for tensor, bits in zip(tensors, inputs.bits(), strict=False):
        tensor.copy_(bits)
    run = runner(arch, plan, tensors)
    recording = Recording.of(plan, tensors)
    references = [inputs.reference(slice(plan.part_k)), inputs.reference()]
    products = [torch.from_numpy(part) for part in recording.accumulators]
    corners = {
        "after part 0": products[0],
        "reference of part 0": references[0],
        "after part 1": products[1],
        "reference": references[1],
    }
    if not plan.boundary:
        del corners["after part 0"]
    result = MajorResult(
        plan.b_major,
        *_instruction(plan, recording),
        step_views(arch, plan, inputs, recording),
        recording.cuts_identical,
        _max_abs(products[0], references[0]) if plan.boundary else None,
        _max_abs(products[1], references[1]),
        {name: value[:CORNER, :CORNER].tolist() for name, value in corners.items()},
        [one_line(finding) for finding in run.findings],
        run.where,
    )
    return result, recording


def one_line(finding: Finding) -> str:
    """Write a finding without the kernel's name, which CuTe DSL makes long."""
    text = re.sub(r"kernel \S+: ", "", finding.message, count=1)
    return f"{finding.level}: {text}"


def _instruction(plan: MajornessPlan, recording: Recording) -> tuple[str, dict[str, Any]]:
    if isinstance(plan, Sm100Plan):
        fields = decode(recording.instruction, "instruction", kind=plan.kind)
        assert isinstance(fields, InstructionDescriptor)
        return f"0x{recording.instruction:08x}", asdict(fields)
    assert isinstance(plan, Sm90Plan)
    if plan.element_bytes == 1:
        return plan.opcode, {}
    majors = {"transpose_a": plan.a_major, "transpose_b": plan.b_major}
    return plan.opcode, {name: major == "mn" for name, major in majors.items()}


def _max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    """Find the largest difference; NaN if there is one."""
    return float((a - b).abs().max())
