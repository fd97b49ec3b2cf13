"""Devices that the emulator simulates, as data: the facts that decide how a launch is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """Facts of a GPU.

    Attributes:
        num_sms: streaming multiprocessors.
        clusters: CTAs of a cluster -> clusters that run at once, of CTAs that have an SM each.
    """

    num_sms: int
    clusters: Mapping[int, int]


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
)
"""A B200, as its SMs allow."""
SMALL = Device(4, MappingProxyType({1: 4, 2: 2}))
"""A small device, which is no GPU, but quick: two clusters of two share rows out, and a row too."""
