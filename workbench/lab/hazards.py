"""Hazards between two MMAs on one accumulator: what ptxemu says, what the ISA says, and a schedule
that gives wrong numbers where nothing orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ptxemu import Policy
from ptxemu.check import Finding
from workbench.lab.inputs import Inputs, make_inputs
from workbench.lab.kernels.majorness.sm90.hazard_plan import WgmmaHazardPlan
from workbench.lab.kernels.majorness.sm100.hazard_plan import HazardPlan
from workbench.lab.majorness import one_line
from workbench.lab.runners import dsl_tensors, require_dsl

SECTION = 'PTX ISA, "TensorCore 5th Generation Memory Consistency Model"'
PIPELINED = f'{SECTION}, "Pipelined tcgen05 Instructions"'
AnyPlan = HazardPlan | WgmmaHazardPlan
_COMPLETION = f'{SECTION}, "mbarrier based completion mechanism"'


@dataclass(frozen=True)
class Hazard:
    """A variant, and what must be seen.

    Attributes:
        what: in words. isa: what the ISA says about it.
        code: of ptxemu's finding, one of these; None where the ISA orders.
        wrong: what an adversarial schedule makes wrong: "D", "readback" or None.
        ws, arch: which MMA: tcgen05.mma, tcgen05.mma.ws, wgmma (sm_90a).
        shapes: (m, n) of the MMAs to run.
    """

    name: str
    what: str
    isa: str
    code: tuple[str, ...] | None
    wrong: str | None
    ws: bool = False
    shapes: tuple[tuple[int, int], ...] = ((64, 64),)
    arch: str = "sm_100a"

    @property
    def variant(self) -> str:
        """The kernel's."""
        return self.name.removesuffix("-ws").removeprefix("wgmma-")

    def plan(self, m: int, n: int, b_major: str) -> AnyPlan:
        """The kernel for one of the shapes."""
        if self.arch == "sm_90a":
            return WgmmaHazardPlan(m=m, n=n, k=64, b_major=b_major, variant=self.variant)
        return HazardPlan(m=m, n=n, k=64, b_major=b_major, variant=self.variant, ws=self.ws)


_SAME_THREAD = (
    "MMAs of one thread with the same cta_group, accumulator, shape and kind execute in the order "
    f"of issue ({PIPELINED})"
)
HAZARDS = (
    Hazard(
        "pair",
        "one thread, same shape, back to back: the reference kernel's pair",
        _SAME_THREAD,
        None,
        None,
        shapes=((64, 64), (128, 128)),
    ),
    Hazard(
        "pair-ws",
        "the reference kernel's pair as tcgen05.mma.ws",
        f"{_SAME_THREAD}; no pair of the list names .ws, and none excludes it",
        None,
        None,
        ws=True,
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
        "tcgen05.ld behind a barrier, no wait for the commit",
        "mma to ld is no pipelined pair: needs tcgen05.commit, a wait on its mbarrier and "
        f"tcgen05.fence::after_thread_sync ({_COMPLETION})",
        ("missing-wait",),
        "D",
    ),
    Hazard(
        "overwrite",
        "B overwritten behind a barrier, no wait for the commit",
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
        "the MMAs of both parts stay a pipelined pair; the read between them is ordered behind "
        f"part 0 by nothing ({_COMPLETION})",
        ("missing-wait", "race"),
        "readback",
    ),
    Hazard(
        "wgmma-pair",
        "both parts in one commit group, waited for before D is read",
        "wgmmas on the same accumulator registers with the same shape execute in order "
        '(PTX ISA, "wgmma.fence")',
        None,
        None,
        arch="sm_90a",
    ),
    Hazard(
        "wgmma-early-read",
        "D's registers read before wgmma.wait_group",
        "touching registers of a wgmma before it has been waited for is undefined "
        '(PTX ISA, "wgmma.mma_async", "wgmma.wait_group")',
        ("wgmma-register-in-flight",),
        "D",
        arch="sm_90a",
    ),
    Hazard(
        "wgmma-overwrite",
        "B overwritten before wgmma.wait_group",
        "a wgmma reads shared memory until its group has been waited for "
        '(PTX ISA, "wgmma.wait_group", "Async proxy")',
        ("missing-wait",),
        "D",
        arch="sm_90a",
    ),
    Hazard(
        "wgmma-no-fence",
        "no wgmma.fence before the first wgmma, whose registers were written",
        'needed before the first wgmma and after registers were written (PTX ISA, "wgmma.fence")',
        ("wgmma-fence-missing",),
        None,
        arch="sm_90a",
    ),
)
NAMES = tuple(hazard.name for hazard in HAZARDS)


@dataclass(frozen=True)
class HazardRow:
    """What one hazard with one shape did under all schedules tried.

    Attributes:
        findings: ptxemu's, one line for each code, the expected code first.
        wrong_schedule: of the first wrong result, "late, seed 1"; None if there was none.
        wrong_max_abs: its largest error.
        wrong_columns: which columns of D were wrong, as often as it differed.
        wrong_schedules: how many gave wrong numbers; schedules: how many were tried.
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

    def to_json_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def schedules_of(seeds: Sequence[int]) -> list[Policy]:
    """Schedules to try: work as late and as early as may be, then at random."""
    kinds = ("late", "eager", "random")
    return [Policy(asynchronous=kind, seed=seed) for seed in seeds for kind in kinds]


def run_hazards(
    names: Sequence[str] = NAMES,
    *,
    b_major: str = "mn",
    policies: Sequence[Policy],
    all_shapes: bool = True,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> list[HazardRow]:
    """Run hazards under schedules.

    Args:
        all_shapes: all of a hazard's shapes, or the first only.
    """
    require_dsl()
    cases = [
        (hazard, shape)
        for hazard in HAZARDS
        if hazard.name in names
        for shape in (hazard.shapes if all_shapes else hazard.shapes[:1])
    ]
    rows = []
    for done, (hazard, (m, n)) in enumerate(cases):
        if on_progress is not None:
            on_progress(done, len(cases), f"{hazard.name} {m}x{n}")
        rows.append(_row(hazard, hazard.plan(m, n, b_major), policies))
    return rows


def _row(hazard: Hazard, plan: AnyPlan, policies: Sequence[Policy]) -> HazardRow:
    inputs = make_inputs(plan.k, plan.m, plan.n, dtype="bf16", data="integer", seed=0)
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
            findings.setdefault(finding.code, finding)
        for name, product in products.items():
            error = np.abs(product - expected[name])
            if (name == "readback" and hazard.wrong != "readback") or error.max() == 0:
                continue
            if name != hazard.wrong:
                other_wrong = True
            schedule = f"{policy.asynchronous}, seed {policy.seed}"
            wrong.append((schedule, float(error.max()), _columns(error)))
    relevant = {code: f for code, f in findings.items() if f.level in ("error", "warning")}
    if hazard.code is None:
        passed = not relevant and not other_wrong
    else:
        found_one = bool(set(relevant) & set(hazard.code))
        passed = found_one and (bool(wrong) or hazard.wrong is None) and not other_wrong
    first = hazard.code or ()
    ordered = sorted(relevant.values(), key=lambda finding: finding.code not in first)
    return HazardRow(
        hazard.name,
        plan.m,
        plan.n,
        hazard.what,
        hazard.isa,
        "silence" if hazard.code is None else " or ".join(hazard.code),
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
    tensors = [*inputs.bits(), raw]
    with emulate(arch=arch, on_finding="collect", policy=policy) as emulation:
        _compiled(arch, plan)(*dsl_tensors(tensors))
    rows, columns = np.indices((plan.m, plan.n))
    places = np.array(
        [plan.place_of_d(int(r), int(c)) for r, c in zip(rows.flat, columns.flat, strict=True)]
    )
    values = raw.numpy()[:, places[:, 0], places[:, 1]].reshape(2, plan.m, plan.n)
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
    """Which columns are wrong: "all", "128-255", or how many between the first and the last."""
    wrong = np.flatnonzero(error.max(axis=0) > 0)
    first, last = int(wrong[0]), int(wrong[-1])
    if len(wrong) == error.shape[1]:
        return "all"
    if len(wrong) == last - first + 1:
        return f"{first}-{last}"
    return f"{len(wrong)} in {first}-{last}"
