"""ptxemu: runs and checks Hopper and Blackwell PTX on a machine without the GPU.

`load(ptx).launch("kernel", grid, block, args=[...], check=True)` runs a kernel on NumPy arrays or
torch CPU tensors; `ptxemu.cutedsl.emulate()` runs compiled CuTe DSL functions.
"""

from ptxemu.api import LaunchResult, Module, load
from ptxemu.check import Finding
from ptxemu.errors import (
    DeadlockError,
    ExecutionError,
    HazardError,
    IllegalInstructionError,
    LaunchError,
    PtxEmuError,
    PtxSyntaxError,
    UnsupportedInstructionError,
)
from ptxemu.sched.policy import Policy

__all__ = [
    "DeadlockError",
    "ExecutionError",
    "Finding",
    "HazardError",
    "IllegalInstructionError",
    "LaunchError",
    "LaunchResult",
    "Module",
    "Policy",
    "PtxEmuError",
    "PtxSyntaxError",
    "UnsupportedInstructionError",
    "load",
]
