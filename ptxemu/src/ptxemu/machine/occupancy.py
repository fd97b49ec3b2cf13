"""Number of CTAs of a launch that an SM holds at once (CUDA C++ Programming Guide, "Compute
Capabilities", Technical Specifications per Compute Capability)."""

from __future__ import annotations

from collections.abc import Mapping

from ptxemu.machine.device import Device
from ptxemu.machine.lanes import WARP_SIZE

SYSTEM_SHARED_BYTES = 1024
"""Shared memory that the system keeps for itself, of every CTA."""
MAX_CTAS = 32
MAX_WARPS = 64
MAX_THREADS = MAX_WARPS * WARP_SIZE
_REGISTERS_OF_A_WARP = 256
"""The granule in which a warp gets registers."""


def ctas_per_sm(
    device: Device, threads: int, shared_bytes: int, directives: Mapping[str, tuple[int, ...]]
) -> int:
    """CTAs that an SM has room for, at least 1.

    Registers count where `.maxnreg` says how many there are: what ptxas chooses is not known. TMEM
    does not count: every CTA has one of its own here, where hardware lets the CTAs of an SM share
    one and makes tcgen05.alloc wait.

    Args:
        threads: of a CTA; shared_bytes: static and dynamic shared memory of a CTA.
        directives: of the kernel (`ast.Function.directives`).
    """
    warps = -(-threads // WARP_SIZE)
    shared = device.shared_bytes_per_cta + SYSTEM_SHARED_BYTES
    room = [MAX_CTAS, MAX_WARPS // max(warps, 1), shared // (shared_bytes + SYSTEM_SHARED_BYTES)]
    if "maxnreg" in directives:
        of_a_warp = directives["maxnreg"][0] * WARP_SIZE
        of_a_warp = -(-of_a_warp // _REGISTERS_OF_A_WARP) * _REGISTERS_OF_A_WARP
        room.append(device.registers_per_sm // of_a_warp // max(warps, 1))
    return max(min(room), 1)
