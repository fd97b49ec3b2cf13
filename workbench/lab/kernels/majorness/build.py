"""Compiles the majorness study for both architectures; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute

from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import TMEM_LANES
from workbench.lab.kernels.majorness.plan import NUM_PARTS, MajornessPlan
from workbench.lab.kernels.majorness.sm90.kernel import launch as launch_sm90
from workbench.lab.kernels.majorness.sm100.kernel import launch as launch_sm100


def compile_sm90(plan: MajornessPlan) -> Any:
    """With wgmma."""
    return _compile(launch_sm90, plan)


def compile_sm100(plan: MajornessPlan) -> Any:
    """With tcgen05.mma."""
    return _compile(launch_sm100, plan)


def _compile(launch: Callable[..., Any], plan: MajornessPlan) -> Any:
    shapes = (
        (Uint16, (plan.k, plan.m)),
        (Uint16, (plan.k, plan.n)),
        (Int64, (NUM_PARTS, 2, plan.steps, 2)),
        (Int32, (2,)),
        (Uint32, (plan.smem_bytes // 4,)),
        (Uint32, (TMEM_LANES, plan.num_a_words)),
        (Float32, (NUM_PARTS, plan.num_d_rows, plan.n)),
    )
    return cute.compile(launch, *(fake_tensor(*one) for one in shapes), plan)
