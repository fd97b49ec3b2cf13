"""Where a study's kernel runs: on ptxemu, or on a GPU of the architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from flashdsa.errors import UnsupportedError
from ptxemu import Policy
from ptxemu.check import Finding
from workbench.lab.kernels.majorness.plan import MajornessPlan

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


@dataclass(frozen=True)
class RunResult:
    """What a run said besides its outputs."""

    where: str
    findings: list[Finding] = field(default_factory=list)


Runner = Callable[[str, MajornessPlan, list[torch.Tensor]], RunResult]
"""Called with the architecture, a plan and the kernel's arguments on the CPU, which it fills."""


def has_gpu(arch: str) -> bool:
    """Whether there is a GPU of the architecture."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITIES[arch]


def schedule(asynchronous: str, seed: int) -> Policy:
    """One schedule of the emulator: when asynchronous work happens, and who runs next."""
    return Policy(asynchronous=asynchronous, seed=seed)


def runner_for(place: str | None, arch: str, policy: Policy | None = None) -> Runner:
    """The runner of a place; None: the GPU if there is one of the architecture.

    Raises:
        UnsupportedError: a GPU is asked for and there is none of the architecture.
    """
    if place is None:
        place = "gpu" if has_gpu(arch) else "emulator"
    if place == "emulator":
        return emulator_runner(policy or Policy())
    if not has_gpu(arch):
        raise UnsupportedError(f"--on gpu: no {arch} GPU here; --on emulator needs none")
    return gpu_runner


def emulator_runner(policy: Policy) -> Runner:
    """Runs kernels on ptxemu, checked, with one schedule."""

    def run(arch: str, plan: MajornessPlan, tensors: list[torch.Tensor]) -> RunResult:
        require_dsl()
        from ptxemu.cutedsl import emulate

        with emulate(arch=arch, on_finding="collect", policy=policy) as emulation:
            compiled(arch, plan)(*dsl_tensors(tensors))
        schedule = f"{policy.asynchronous} asynchronous work, seed {policy.seed}"
        return RunResult(f"ptxemu ({schedule})", emulation.findings)

    return run


def gpu_runner(arch: str, plan: MajornessPlan, tensors: list[torch.Tensor]) -> RunResult:
    """Runs kernels on the GPU."""
    on_gpu = [tensor.cuda() for tensor in tensors]
    compiled(arch, plan)(*dsl_tensors(on_gpu))
    torch.cuda.synchronize()
    for tensor, result in zip(tensors, on_gpu, strict=True):
        tensor.copy_(result)
    return RunResult(torch.cuda.get_device_name())


def dsl_tensors(tensors: list[torch.Tensor]) -> list[Any]:
    """The kernel's arguments as CuTe DSL takes them: shapes are compile-time constants."""
    from cutlass.cute.runtime import from_dlpack

    return [from_dlpack(tensor, assumed_align=16) for tensor in tensors]


@lru_cache(maxsize=64)
def compiled(arch: str, plan: MajornessPlan) -> Any:
    """The compiled launch of a plan; compiling is most of a run's time."""
    require_dsl()
    from cutlass import cute

    launch = launch_of(arch)
    return cute.compile(launch, *dsl_tensors(empty_arguments(plan)), plan)


def require_dsl() -> None:
    """Raise UnsupportedError where CuTe DSL, which compiles the kernels, is not installed."""
    if find_spec("cutlass") is None:
        raise UnsupportedError("CuTe DSL is not installed: pip install 'flashdsa[emulate]'")


def launch_of(arch: str) -> Any:
    """The architecture's kernel."""
    if arch == "sm_90a":
        from workbench.lab.kernels.majorness.sm90 import kernel as sm90

        return sm90.launch
    from workbench.lab.kernels.majorness.sm100 import kernel as sm100

    return sm100.launch


def empty_arguments(plan: MajornessPlan) -> list[torch.Tensor]:
    """Tensors with the shapes of the kernel's arguments; D is NaN where the kernel leaves it."""
    carrier = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[plan.element_bytes]
    return [
        torch.zeros(plan.k, plan.m, dtype=carrier),
        torch.zeros(plan.k, plan.n, dtype=carrier),
        torch.zeros(2, 2, plan.steps, 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(plan.smem_bytes // 4, dtype=torch.uint32),
        torch.zeros(128, plan.num_a_words, dtype=torch.uint32),
        torch.full((2, plan.num_d_rows, plan.n), float("nan")),
    ]
