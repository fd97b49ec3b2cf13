"""Runs CuTe DSL kernels on the emulator: compiled functions are called on CPU tensors.

    import ptxemu.cutedsl
    with ptxemu.cutedsl.emulate(arch="sm_100a") as run:
        compiled(x, y)
    print(run.launches, run.findings)

Importing this makes CuTe DSL keep the PTX of what it compiles from then on.
"""

from __future__ import annotations

from ptxemu.cutedsl import retention
from ptxemu.cutedsl.gpu_stand_in import pretend_gpu
from ptxemu.cutedsl.host_function import MissingPtxError
from ptxemu.cutedsl.session import Emulation, emulate
from ptxemu.driver.rules import DriverError

__all__ = ["DriverError", "Emulation", "MissingPtxError", "emulate", "pretend_gpu"]

retention.install()
