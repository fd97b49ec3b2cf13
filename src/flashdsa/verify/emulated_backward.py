"""The Blackwell backward's compiled kernels on the CPU: what a GPU would run, on ptxemu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from flashdsa.backends.sm100.sparse_mla import run
from flashdsa.errors import UnsupportedError
from flashdsa.jit.loader import compile_plan
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan
from flashdsa.operands import MlaBwdOperands
from ptxemu import Policy
from ptxemu.check import Finding
from ptxemu.launch_setup import LaunchSetup

ARCH = "sm_100a"


@dataclass(frozen=True)
class EmulatedBackward:
    """What the launches said besides their outputs.

    Attributes:
        gradients: dQ, dKV, d_sink. findings: of the check. setups: delta's launch and the
            backward's, and where it is deterministic that of the sum; none where there was nothing
            to launch.
    """

    gradients: tuple[Tensor, Tensor, Tensor]
    findings: tuple[Finding, ...]
    setups: tuple[LaunchSetup, ...]


def backward(operands: MlaBwdOperands, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The backend "emulate-sm100": as the backend "sm100", on CPU tensors.

    Raises:
        ptxemu.HazardError: a kernel has a race, a bad access or another hazard.
    """
    q, kv, dO, lse, O, indices, topk_length, attn_sink = operands
    options |= {"topk_length": topk_length, "attn_sink": attn_sink}
    return emulate_backward(
        BwdPlan(), (q, kv, dO, lse, O), indices, on_finding="raise", **options
    ).gradients


def emulate_backward(
    plan: BwdPlan,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    indices: Tensor,
    *,
    policy: Policy | None = None,
    on_finding: str = "collect",
    **options: Any,
) -> EmulatedBackward:
    """One checked run of the plan's kernels.

    Args:
        operands: q, kv, dO, lse, O. policy: in which order warps and asynchronous work take turns.
        options: those of `backends.sm100.sparse_mla.run`.

    Raises:
        ptxemu.HazardError: with on_finding "raise", the check found an error.
    """
    function = compiled(replace(plan, deterministic=bool(options["deterministic"])))
    from ptxemu.cutedsl import emulate

    setups: list[LaunchSetup] = []
    policy = policy or Policy()
    with emulate(
        arch=ARCH, on_finding=on_finding, policy=policy, on_launch=setups.append
    ) as emulation:
        gradients = run(function, operands, indices, **options)
    return EmulatedBackward(gradients, tuple(emulation.findings), tuple(setups))


@lru_cache(maxsize=8)
def compiled(plan: BwdPlan) -> Any:
    """The plan's function; its PTX is kept for the emulator.

    Raises:
        UnsupportedError: a package is missing.
    """
    for package in ("cutlass", "llvmlite", "tvm_ffi"):
        if find_spec(package) is None:
            raise UnsupportedError(f"the emulator needs {package}: pip install 'flashdsa[emulate]'")
    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on

    return compile_plan(MLA_BWD, plan)
