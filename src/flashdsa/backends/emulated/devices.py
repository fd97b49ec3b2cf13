"""Devices that the emulator simulates, as data: the facts that decide how a launch is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flashdsa.hw import SM90, SM100


@dataclass(frozen=True)
class Device:
    """Facts of a GPU.

    Attributes:
        num_sms: streaming multiprocessors.
        clusters: CTAs of a cluster -> clusters that run at once, of CTAs that have an SM each.
        capability: CUDA compute capability.
        smem_bytes: shared memory of one CTA at most, in bytes.
    """

    num_sms: int
    clusters: Mapping[int, int]
    capability: tuple[int, int] = (9, 0)
    smem_bytes: int = SM90.smem_bytes

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Return `clusters`, whatever the CTA."""
        return self.clusters


H200 = Device(
    132, MappingProxyType(dict(enumerate((132, 66, 39, 30, 22, 17, 15, 15, 9, *(7,) * 7), 1)))
)
"""An H200, as its driver describes it."""
_B200_GPCS = (18, 18, 18, 18, 18, 18, 20, 20)
"""SMs of a B200's graphics processing clusters, which no cluster of CTAs exceeds: assumed, pairs
that add up to 148 SMs. workbench/probes/first_hour_b200.py asks the driver of one."""
B200 = Device(
    sum(_B200_GPCS),
    MappingProxyType({size: sum(sms // size for sms in _B200_GPCS) for size in range(1, 17)}),
    SM100.capabilities[0],
    SM100.smem_bytes,
)
"""A B200, as its SMs allow."""
SMALL = Device(4, MappingProxyType({1: 4, 2: 2}))
"""A small device, which is no GPU, but quick: two clusters of two share rows out, and a row too."""
_SMEM_BYTES = {(8, 0): 166_912, (8, 9): 101_376, (12, 0): 101_376}
"""Shared memory of one CTA at most (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability")."""


def small_device(capability: tuple[int, int]) -> Device:
    """`SMALL`, of another compute capability: for kernels of Triton."""
    smem_bytes = _SMEM_BYTES.get(capability, SMALL.smem_bytes)
    return replace(SMALL, capability=capability, smem_bytes=smem_bytes)


A100 = replace(small_device((8, 0)), num_sms=108, clusters=MappingProxyType({1: 108}))
