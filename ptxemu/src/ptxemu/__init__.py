"""ptxemu: runs and checks Hopper and Blackwell PTX on a machine without the GPU.

`load(ptx).launch("kernel", grid, block, args=[...], check=True)` runs a kernel on NumPy arrays or
torch CPU tensors; `ptxemu.cutedsl.emulate()` runs compiled CuTe DSL functions. `save_launch` (what
`ptxemu exec --save` does) writes a launch to a file, `load_launch(file).launch(check=True)` runs it
again without CuTe DSL and torch.
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
    StepLimitError,
    UnknownDeviceError,
    UnsupportedInstructionError,
)
from ptxemu.saved_launch import load_launch, save_launch
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
    "StepLimitError",
    "UnknownDeviceError",
    "UnsupportedInstructionError",
    "load",
    "load_launch",
    "save_launch",
]
