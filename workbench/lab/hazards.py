"""Hazards between two MMAs on one accumulator: ptxemu's finding, the ISA's rule, and a schedule
that gives wrong numbers where nothing orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ptxemu import Policy
from ptxemu.check import Finding
from workbench.lab.kernels.majorness.sm90.plan import WgmmaHazardPlan
from workbench.lab.kernels.majorness.sm100.plan import HazardPlan
from workbench.lab.majorness import one_line
from workbench.lab.runs import Inputs, dsl_tensors, make_inputs, require_dsl

SECTION = 'PTX ISA, "TensorCore 5th Generation Memory Consistency Model"'
PIPELINED = f'{SECTION}, "Pipelined tcgen05 Instructions"'
AnyPlan = HazardPlan | WgmmaHazardPlan
_COMPLETION = f'{SECTION}, "mbarrier based completion mechanism"'


@dataclass(frozen=True)
class Hazard:
    """A variant, and its expected outcome.

    Attributes:
        what: in words. isa: the ISA's rule.
        code: of ptxemu's finding, one of these; () where the ISA orders.
        wrong: the result that an adversarial schedule makes wrong: "D", "readback" or None.
        shapes: (m, n) of the MMAs to run.
    """

    name: str
    what: str
    isa: str
    code: tuple[str, ...] = ()
    wrong: str | None = None
    shapes: tuple[tuple[int, int], ...] = ((64, 64),)

    @property
    def arch(self) -> str:
        """The architecture whose MMA it is."""
        return "sm_90a" if self.name.startswith("wgmma-") else "sm_100a"

    def plan(self, m: int, n: int, b_major: str) -> AnyPlan:
        """Make the kernel's plan for one of the shapes."""
        variant = self.name.removesuffix("-ws").removeprefix("wgmma-")
        if self.arch == "sm_90a":
            return WgmmaHazardPlan(m=m, n=n, k=64, b_major=b_major, variant=variant)
        ws = self.name.endswith("-ws")
        return HazardPlan(m=m, n=n, k=64, b_major=b_major, variant=variant, ws=ws)


_SAME_THREAD = (
    "MMAs of one thread with the same cta_group, accumulator, shape and kind execute in the order "
    f"of issue ({PIPELINED})"
)
HAZARDS = (
    Hazard(
        "pair",
        "one thread, same shape, back to back: the reference kernel's pair",
        _SAME_THREAD,
        shapes=((64, 64), (128, 128)),
    ),
    Hazard(
        "pair-ws",
        "the reference kernel's pair as tcgen05.mma.ws",
        f"{_SAME_THREAD}; no pair of the list names .ws, and none excludes it",
        shapes=((32, 64), (32, 256), (64, 64), (64, 128), (64, 256)),
    ),
    Hazard(
        "threads",
        "part 0 by a thread of warp 0, part 1 by one of warp 1",
        "between threads a pair is pipelined only if tcgen05.fence::before_thread_sync, a "
        f'synchronisation and ::after_thread_sync lie between ({SECTION}, "Pipelined instructions, '
        'different thread")',
        ("unordered-mma",),
        "D",
    ),
    Hazard(
        "shapes",
        "part 1 as two MMAs of N / 2 on the halves of the accumulator",
        "only MMAs of the same shape on the same accumulator are pipelined; others may complete in "
        f"any order ({PIPELINED})",
        ("unordered-mma",),
        "D",
        shapes=((64, 256),),
    ),
    Hazard(
        "early-read",
        "tcgen05.ld after a barrier, no wait for the commit",
        "mma to ld is no pipelined pair: needs tcgen05.commit, a wait on its mbarrier and "
        f"tcgen05.fence::after_thread_sync ({_COMPLETION})",
        ("missing-wait",),
        "D",
    ),
    Hazard(
        "overwrite",
        "B overwritten after a barrier, no wait for the commit",
        f"that an MMA has read its operands is known once its commit has arrived ({_COMPLETION})",
        ("missing-wait",),
        "D",
    ),
    Hazard(
        "late-operand",
        "part 1 of B written by other warps while part 0 is issued, no barrier before part 1",
        "generic writes need fence.proxy.async and a synchronisation before an MMA reads them "
        '(PTX ISA, "Proxies" and "Async proxy")',
        ("race", "missing-proxy-fence"),
        "D",
    ),
    Hazard(
        "fence-only",
        "between the parts a fence, a barrier and D read back, but no commit",
        "the MMAs of both parts stay a pipelined pair; nothing orders the read between them "
        f"after part 0 ({_COMPLETION})",
        ("missing-wait", "race"),
        "readback",
    ),
    Hazard(
        "wgmma-pair",
        "both parts in one commit group, waited for before D is read",
        "wgmmas on the same accumulator registers with the same shape execute in order "
        '(PTX ISA, "wgmma.fence")',
    ),
    Hazard(
        "wgmma-early-read",
        "D's registers read before wgmma.wait_group",
        "touching registers of a wgmma before it has been waited for is undefined "
        '(PTX ISA, "wgmma.mma_async", "wgmma.wait_group")',
        ("wgmma-register-in-flight",),
        "D",
    ),
    Hazard(
        "wgmma-overwrite",
        "B overwritten before wgmma.wait_group",
        "a wgmma reads shared memory until its group has been waited for "
        '(PTX ISA, "wgmma.wait_group", "Async proxy")',
        ("missing-wait",),
        "D",
    ),
    Hazard(
        "wgmma-no-fence",
        "no wgmma.fence before the first wgmma, whose registers were written",
        'needed before the first wgmma and after registers were written (PTX ISA, "wgmma.fence")',
        ("wgmma-fence-missing",),
    ),
)
NAMES = tuple(hazard.name for hazard in HAZARDS)


@dataclass(frozen=True)
class HazardRow:
    """The outcome of one hazard with one shape under all schedules tried.

    Attributes:
        findings: ptxemu's, one line for each code, the expected code first.
        wrong_schedule: of the first wrong result, "late, seed 1"; None if there was none.
        wrong_max_abs: its largest error.
        wrong_columns: the wrong columns of D, as often as they differed.
        wrong_schedules: the number of schedules with wrong numbers; schedules: of those tried.
    """

    name: str
    m: int
    n: int
    what: str
    isa: str
    expected: str
    findings: list[str]
    wrong_schedule: str | None
    wrong_max_abs: float | None
    wrong_columns: list[str]
    wrong_schedules: int
    schedules: int
    passed: bool


def schedules_of(seeds: Sequence[int]) -> list[Policy]:
    """List schedules to try: work as late and as early as may be, then at random."""
    kinds = ("late", "eager", "random")
    return [Policy(asynchronous=kind, seed=seed) for seed in seeds for kind in kinds]


def run_hazards(
    names: Sequence[str] = NAMES,
    *,
    b_major: str = "mn",
    policies: Sequence[Policy],
    all_shapes: bool = True,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[HazardRow]:
    """Run hazards under schedules, with all of a hazard's shapes or the first only."""
    require_dsl()
    cases = [
        (hazard, shape)
        for hazard in HAZARDS
        if hazard.name in names
        for shape in (hazard.shapes if all_shapes else hazard.shapes[:1])
    ]
    rows = []
    for done, (hazard, (m, n)) in enumerate(cases):
        on_progress(done, len(cases), f"{hazard.name} {m}x{n}")
        rows.append(_row(hazard, hazard.plan(m, n, b_major), policies))
    return rows


def _row(hazard: Hazard, plan: AnyPlan, policies: Sequence[Policy]) -> HazardRow:
    inputs = make_inputs(plan, "integer", 0)
    expected = {
        "readback": inputs.reference(slice(plan.part_k)).numpy(),
        "D": inputs.reference().numpy(),
    }
    findings: dict[str, Finding] = {}
    wrong: list[tuple[str, float, str]] = []
    other_wrong = False
    for policy in policies:
        found, products = _run(hazard.arch, plan, inputs, policy)
        for finding in found:
            if finding.level in ("error", "warning"):
                findings.setdefault(finding.code, finding)
        for name, product in products.items():
            error = np.abs(product - expected[name])
            if (name == "readback" and hazard.wrong != "readback") or error.max() == 0:
                continue
            other_wrong |= name != hazard.wrong
            schedule = f"{policy.asynchronous}, seed {policy.seed}"
            wrong.append((schedule, float(error.max()), _columns(error)))
    if hazard.code:
        seen = not findings.keys().isdisjoint(hazard.code)
        passed = seen and (bool(wrong) or hazard.wrong is None) and not other_wrong
    else:
        passed = not findings and not other_wrong
    ordered = sorted(findings.values(), key=lambda finding: finding.code not in hazard.code)
    return HazardRow(
        hazard.name,
        plan.m,
        plan.n,
        hazard.what,
        hazard.isa,
        " or ".join(hazard.code) or "silence",
        [one_line(finding) for finding in ordered],
        wrong[0][0] if wrong else None,
        wrong[0][1] if wrong else None,
        list(dict.fromkeys(columns for _, _, columns in wrong)),
        len(wrong),
        len(policies),
        passed,
    )


def _run(
    arch: str, plan: AnyPlan, inputs: Inputs, policy: Policy
) -> tuple[list[Finding], dict[str, np.ndarray[Any, Any]]]:
    from ptxemu.cutedsl import emulate

    raw = torch.full((2, plan.num_d_rows, plan.d_columns), float("nan"))
    with emulate(arch=arch, on_finding="collect", policy=policy) as emulation:
        _compiled(arch, plan)(*dsl_tensors([*inputs.bits(), raw]))
    cells = np.array([plan.cell_of_d(*index) for index in np.ndindex(plan.m, plan.n)])
    values = raw.numpy()[:, cells[:, 0], cells[:, 1]].reshape(2, plan.m, plan.n)
    return emulation.findings, {"readback": values[0], "D": values[1]}


@lru_cache(maxsize=32)
def _compiled(arch: str, plan: AnyPlan) -> Any:
    from cutlass import cute

    if arch == "sm_90a":
        from workbench.lab.kernels.majorness.sm90.hazards import launch
    else:
        from workbench.lab.kernels.majorness.sm100.hazards import launch
    shapes = ((plan.k, plan.m), (plan.k, plan.n))
    tensors = [torch.zeros(shape, dtype=torch.uint16) for shape in shapes]
    tensors.append(torch.zeros(2, plan.num_d_rows, plan.d_columns))
    return cute.compile(launch, *dsl_tensors(tensors), plan)


def _columns(error: np.ndarray[Any, Any]) -> str:
    """Name the wrong columns: "all", "128-255", or their number between the first and the last."""
    wrong = np.flatnonzero(error.max(axis=0) > 0)
    first, last = int(wrong[0]), int(wrong[-1])
    if len(wrong) == error.shape[1]:
        return "all"
    if len(wrong) == last - first + 1:
        return f"{first}-{last}"
    return f"{len(wrong)} in {first}-{last}"
