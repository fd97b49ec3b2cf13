"""One operand form compiled and run on the emulator: its cells of D against float64."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashdsa.errors import UnsupportedError
from workbench.lab.forms_catalog import OperandForm
from workbench.lab.forms_inputs import INTEGERS, KINDS, RANDOM, Inputs, make_inputs
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

ARCH = "sm_100a"
SCHEDULES = ("eager", "late")
"""When asynchronous work happens: at once, or only when nothing can go on without it."""
_ROUNDING = 2.0**-24
"""Of fp32, relative: the emulator rounds once an instruction (`ptxemu.numerics.dot`)."""


@dataclass(frozen=True)
class Emulated:
    """What a form's kernel computed.

    Attributes:
        integers, random: largest difference from float64 of integer and of random operands.
        limit: of `random`; that of `integers` is 0. One rounding to fp32 for each instruction.
        untouched: whether the cells of D's columns that no element of D owns kept their mark.
        findings: what the check found, one line each.
        ptx: the kernel.
    """

    integers: float
    random: float
    limit: float
    untouched: bool
    findings: tuple[str, ...]
    ptx: str

    @property
    def passed(self) -> bool:
        """All of it right."""
        is_close = self.integers == 0 and self.random <= self.limit
        return is_close and self.untouched and not self.findings


def emulate_form(form: OperandForm, seed: int = 0) -> Emulated:
    """Compile the form's kernel; run it on integers and on random numbers, in every schedule.

    Raises:
        UnsupportedError: a package is missing.
        PtxEmuError: the emulator refuses the kernel.
    """
    require_packages()
    from workbench.lab.kernels.operand_forms.sm100.kernel import MARK

    plan = form.plan
    inputs = [make_inputs(plan, kind, seed) for kind in KINDS]
    runs, ptx, findings = _launch(plan, inputs, seed)
    errors, untouched = {}, True
    for index, (kind, given) in enumerate(zip(KINDS, inputs, strict=True)):
        idle = np.isnan(given.expected)
        untouched &= bool((runs[:, index, idle] == MARK).all())
        values = runs[:, index].view(np.float32).astype(np.float64)
        difference = np.abs(values - given.expected)[:, ~idle]
        errors[kind] = float(np.nan_to_num(difference, nan=np.inf).max())
    steps = plan.product.k // plan.product.element.step_k
    limit = steps * _ROUNDING * float(np.nanmax(inputs[1].magnitude))
    return Emulated(errors[INTEGERS], errors[RANDOM], limit, untouched, findings, ptx)


def require_packages() -> None:
    """Check that kernels can be compiled and emulated.

    Raises:
        UnsupportedError: names what is missing.
    """
    missing = [name for name in ("cutlass", "llvmlite") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"the forms' kernels need {' and '.join(missing)}: pip install 'flashdsa[emulate]'"
        )


def _launch(
    plan: FormPlan, inputs: list[Inputs], seed: int
) -> tuple[NDArray[np.uint32], str, tuple[str, ...]]:
    """D's cells (schedules, inputs, CTAs, 128, columns), the kernel's PTX, and what was found."""
    import torch
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    from flashdsa.dsl.fake_tensors import fake_tensor
    from ptxemu import Policy
    from ptxemu.cutedsl import emulate
    from workbench.lab.kernels.operand_forms.sm100.kernel import run_form

    image = np.concatenate([given.image for given in inputs])
    rows = np.concatenate([given.rows for given in inputs])
    if not rows.size:  # A is not in global memory; the kernel does not read this
        rows = np.zeros((len(image), 1, 4), dtype=np.uint32)
    out = np.zeros((len(image), 128, plan.product.columns), dtype=np.uint32)
    tensors = [torch.from_numpy(array.view(np.int32)) for array in (image, rows, out)]
    fakes = [fake_tensor(Int32, tuple(tensor.shape)) for tensor in tensors]
    compiled: Any = None
    runs, found = [], []
    for schedule in SCHEDULES:
        policy = Policy(asynchronous=schedule, seed=seed)
        with emulate(arch=ARCH, check=True, on_finding="collect", policy=policy) as run:
            compiled = compiled or cute.compile(run_form, *fakes, plan)
            compiled(*[from_dlpack(tensor, assumed_align=16) for tensor in tensors])
        found += [f"{finding.level}: {finding.message}" for finding in run.findings]
        runs.append(out.reshape(len(inputs), plan.cta_group, 128, -1).copy())
        out[:] = 0
    return np.stack(runs), str(compiled.__ptx__).rstrip("\0"), tuple(dict.fromkeys(found))
