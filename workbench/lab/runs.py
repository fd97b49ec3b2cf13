"""The study's inputs, and the runners of its kernels: ptxemu, or a GPU of the architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashdsa.dsl.compile_options import options_for
from flashdsa.errors import UnsupportedError
from flashdsa.hw import ARCHITECTURES
from ptxemu import Policy
from ptxemu.check import Finding
from workbench.lab.kernels.majorness.plan import MajornessPlan

_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.uint16}
DISTRIBUTIONS = {
    "random": "S uniform in [0, 1), dO normal with deviation 1/2, rounded to the type",
    "integer": "S and dO integers, uniform in -8..8",
}
"""The values of --data, in words."""
_LARGEST_INTEGER = 8


@dataclass(frozen=True)
class Inputs:
    """S (k heads, m keys) and dO (k heads, n dims), row-major."""

    s: torch.Tensor
    do: torch.Tensor

    def bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """View S and dO as unsigned integers, which the kernels move."""
        s, do = (x.view(_BITS[x.element_size()]) for x in (self.s, self.do))
        return s, do

    def reference(self, heads: slice = slice(None)) -> torch.Tensor:
        """Compute dV (m, n) of some heads, by torch in fp32."""
        return self.s.float()[heads].T @ self.do.float()[heads]


def make_inputs(plan: MajornessPlan, data: str, seed: int) -> Inputs:
    """Draw inputs of one of DISTRIBUTIONS; the same seed gives the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (plan.k, plan.m), (plan.k, plan.n)
    if data == "integer":
        low, high = -_LARGEST_INTEGER, _LARGEST_INTEGER + 1
        s, do = (torch.randint(low, high, one, generator=generator).float() for one in shapes)
    else:
        s = torch.rand(shapes[0], generator=generator)
        do = 0.5 * torch.randn(shapes[1], generator=generator)
    return Inputs(s.to(_DTYPES[plan.dtype]), do.to(_DTYPES[plan.dtype]))


def empty_arguments(plan: MajornessPlan) -> list[torch.Tensor]:
    """Make the kernel's arguments; D is NaN where the kernel leaves it."""
    carrier = _BITS[plan.element_bytes]
    return [
        torch.zeros(plan.k, plan.m, dtype=carrier),
        torch.zeros(plan.k, plan.n, dtype=carrier),
        torch.zeros(2, 2, plan.steps, 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(plan.smem_bytes // 4, dtype=torch.uint32),
        torch.full((2, plan.num_d_rows, plan.n), float("nan")),
    ]


@dataclass(frozen=True)
class RunResult:
    """The machine of a run, and the emulator's findings."""

    where: str
    findings: list[Finding] = field(default_factory=list)


Runner = Callable[[str, MajornessPlan, list[torch.Tensor]], RunResult]
"""Called with the architecture, a plan and the kernel's arguments on the CPU, which it fills."""


def runner_for(
    place: str | None, arch: str, policy: Policy | None = None, compiled: Path | None = None
) -> Runner:
    """Choose the runner of a place; None: the GPU if there is one of the architecture.

    Args:
        compiled: a file of `compile_to`, which the GPU's runner takes kernels from.

    Raises:
        UnsupportedError: a GPU is asked for and there is none of the architecture.
    """
    has_gpu = torch.cuda.is_available()
    has_gpu = has_gpu and torch.cuda.get_device_capability() in ARCHITECTURES[arch].capabilities
    if place == "emulator" or (place is None and not has_gpu):
        return emulator_runner(policy or Policy())
    if not has_gpu:
        raise UnsupportedError(f"--on gpu: no {arch} GPU here; --on emulator needs none")
    return gpu_runner(compiled)


def emulator_runner(policy: Policy) -> Runner:
    """Make a runner on ptxemu, checked, with one schedule."""

    def run(arch: str, plan: MajornessPlan, tensors: list[torch.Tensor]) -> RunResult:
        require_dsl()
        from ptxemu.cutedsl import emulate  # before anything is compiled: it keeps the PTX

        with emulate(arch=arch, on_finding="collect", policy=policy) as emulation:
            compiled_launch(arch, plan)(*dsl_tensors(tensors))
        schedule = f"{policy.asynchronous} asynchronous work, seed {policy.seed}"
        return RunResult(f"ptxemu ({schedule})", emulation.findings)

    return run


def gpu_runner(compiled: Path | None) -> Runner:
    """Make a runner on the GPU, which compiles kernels or takes them from a file."""

    def run(arch: str, plan: MajornessPlan, tensors: list[torch.Tensor]) -> RunResult:
        on_gpu = [tensor.cuda() for tensor in tensors]
        if compiled is None:
            compiled_launch(arch, plan)(*dsl_tensors(on_gpu))
        else:
            from flashdsa.jit.shared_object import load_shared_object

            try:
                function = load_shared_object(compiled)(exported_name(plan))
            except AttributeError as error:
                raise UnsupportedError(f"{compiled}: compiled with other options") from error
            function(*on_gpu)
        torch.cuda.synchronize()
        for tensor, result in zip(tensors, on_gpu, strict=True):
            tensor.copy_(result)
        return RunResult(torch.cuda.get_device_name())

    return run


def exported_name(plan: MajornessPlan) -> str:
    """Name a plan's function in a file of compiled kernels."""
    return "_".join(["majorness", *map(str, asdict(plan).values())])


def compile_to(path: Path, arch: str, plans: Sequence[MajornessPlan]) -> None:
    """Write the plans' kernels to a shared object; needs CuTe DSL and a C compiler, no GPU."""
    require_dsl()
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from flashdsa.jit.shared_object import build_shared_object

    types = {torch.uint8: cute.Uint8, torch.uint16: cute.Uint16, torch.uint32: cute.Uint32}
    types |= {torch.int32: cute.Int32, torch.int64: cute.Int64, torch.float32: cute.Float32}
    found = {}
    for plan in plans:
        fakes = [
            make_fake_compact_tensor(
                types[tensor.dtype],
                tuple(tensor.shape),
                stride_order=tuple(range(tensor.dim()))[::-1],
                assumed_align=16,
            )
            for tensor in empty_arguments(plan)
        ]
        options = options_for(ARCHITECTURES[arch])
        found[exported_name(plan)] = cute.compile(launch_of(arch), *fakes, plan, options=options)
    build_shared_object(path, found, "")


def dsl_tensors(tensors: list[torch.Tensor]) -> list[Any]:
    """Wrap the kernel's arguments for CuTe DSL: shapes are compile-time constants."""
    from cutlass.cute.runtime import from_dlpack

    return [from_dlpack(tensor, assumed_align=16) for tensor in tensors]


@lru_cache(maxsize=64)
def compiled_launch(arch: str, plan: MajornessPlan) -> Any:
    """Compile the launch of a plan, which is most of a run's time."""
    require_dsl()
    from cutlass import cute

    return cute.compile(launch_of(arch), *dsl_tensors(empty_arguments(plan)), plan)


def launch_of(arch: str) -> Any:
    """Import the architecture's kernel."""
    if arch == "sm_90a":
        from workbench.lab.kernels.majorness.sm90 import kernel as sm90

        return sm90.launch
    from workbench.lab.kernels.majorness.sm100 import kernel as sm100

    return sm100.launch


def require_dsl() -> None:
    """Raise UnsupportedError where CuTe DSL, which compiles the kernels, is not installed."""
    if find_spec("cutlass") is None:
        raise UnsupportedError(
            "CuTe DSL is not installed: pip install 'nvidia-cutlass-dsl>=4.8,<5'"
        )
