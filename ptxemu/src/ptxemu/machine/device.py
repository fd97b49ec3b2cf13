"""Limits of the emulated GPU that a driver checks at a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ptxemu.errors import UnknownDeviceError
from ptxemu.machine.lanes import WARP_SIZE


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of one architecture (CUDA C++ Programming Guide, "Technical Specifications")."""

    arch: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes_per_cta: int
    """Largest shared memory of a CTA, static and dynamic: 227 KiB."""
    max_threads_per_cta: int = 1024
    registers_per_sm: int = 65536
    max_nonportable_cluster: int = 16
    """Largest cluster; portable ones have at most 8 CTAs."""
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    """CTAs along x, y and z."""
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    """Threads of a CTA along x, y and z."""


SM_90A = Device("sm_90a", (9, 0), num_sms=132, shared_bytes_per_cta=232448)
SM_100A = Device("sm_100a", (10, 0), num_sms=148, shared_bytes_per_cta=232448)
SM_103A = replace(SM_100A, arch="sm_103a", capability=(10, 3))
"""Emulated as sm_100a, whose numbers these are; what it has beyond sm_100a is not there."""

_DEVICES = {
    "sm_90": SM_90A,
    "sm_90a": SM_90A,
    "sm_100": SM_100A,
    "sm_100a": SM_100A,
    "sm_100f": SM_100A,
    "sm_103": SM_103A,
    "sm_103a": SM_103A,
    "sm_103f": SM_103A,
}

_num_sms: int | None = None


def limit_sms(count: int | None) -> None:
    """Give the devices of `device_for` so many SMs from now on; None: as many as the real ones.

    With few SMs a persistent kernel goes around its loop over tiles on a small problem.
    """
    global _num_sms
    if count is not None and count < 1:
        raise ValueError(f"sms: expected a positive number; got {count}")
    _num_sms = count


def device_for(target: str) -> Device:
    """The device that runs PTX of `.target` (its first word).

    Raises:
        UnknownDeviceError: an architecture that ptxemu does not emulate.
    """
    device = _DEVICES.get(target)
    if device is None:
        raise UnknownDeviceError(
            f"target: ptxemu emulates {', '.join(_DEVICES)}; got {target!r}. PTX for an older "
            "target runs on these too: say which with arch='sm_90a' (--arch sm_90a)"
        )
    return device if _num_sms is None else replace(device, num_sms=_num_sms)


def runs_on(target: str, arch: str) -> bool:
    """Whether a driver loads code for `target` on the device `arch` (PTX ISA, ".target").

    Code for a target in "a" runs on that device alone, for one in "f" on its family from it on.
    """
    here, built_for = device_for(arch).capability, _DEVICES.get(target)
    if built_for is None or not target.endswith(("a", "f")):
        return True
    if target.endswith("a"):
        return here == built_for.capability
    return here[0] == built_for.capability[0] and here >= built_for.capability


# Number of CTAs of a launch that an SM holds at once (CUDA C++ Programming Guide, "Compute
# Capabilities", Technical Specifications per Compute Capability).

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
