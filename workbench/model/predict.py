"""The prediction from traffic and timeline: time, TFLOPS and the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workbench.model.machine import GpuModel
from workbench.model.timeline import Step, ends, period
from workbench.model.traffic import Footprint, Traffic, chip_seconds

BUSY_SHARE = 0.5
"""Share of the time above which a working tensor core makes the clock the busy one."""
CHAIN = "waiting between roles"
CHIP = "L2 and HBM"


@dataclass(frozen=True)
class Work:
    """A kernel on a shape.

    Attributes:
        units: of all CTAs together. steps: of the roles; () when only the bounds are known.
        footprint: the device memory that the units come back to.
        item_units: of an item, of which an SM takes one after the other; 0: units are all alike.
    """

    name: str
    traffic: Traffic
    units: float
    steps: tuple[Step, ...] = ()
    footprint: Footprint = field(default_factory=Footprint)
    item_units: int = 0


@dataclass(frozen=True)
class Prediction:
    """The time of a kernel, and its bound.

    Attributes:
        demands: clocks a unit of each resource of an SM, and of the chip.
        cycles: clocks a unit of an SM, with waiting. bound: the resource that sets it.
        ends: clocks an item of an SM beyond its units'. seconds: with them, in whole items of an
            SM where the kernel has items.
    """

    name: str
    machine: str
    demands: dict[str, float]
    cycles: float
    seconds: float
    tflops: float
    bound: str
    ends: float


def predict(work: Work, machine: GpuModel) -> Prediction:
    """Take the slower of the demands on an SM and on the chip."""
    traffic, sms = work.traffic, machine["sms"]
    demands = traffic.demands(machine)
    worst = max(demands, key=lambda name: demands[name])
    cycles, bound = demands[worst], worst
    if work.steps:
        chain = period(work.steps, traffic.other_port_cycles(machine))
        if chain > cycles:
            cycles, bound = chain, worst if chain < 1.1 * cycles else f"{worst}, {CHAIN}"
    busy = traffic.tensor_cycles(machine) > BUSY_SHARE * cycles
    clock = machine["busy_clock" if busy else "clock"]
    moved = traffic.read_bytes * work.units, traffic.reduce_bytes * work.units
    demands[CHIP] = chip_seconds(machine, *moved, work.footprint) * clock * sms / work.units
    if demands[CHIP] > cycles:
        cycles, bound = demands[CHIP], CHIP
    of_ends, seconds = 0.0, cycles * work.units / sms / clock
    if work.item_units:
        of_ends = ends(work.steps, traffic.other_port_cycles(machine))
        items = math.ceil(work.units / work.item_units / sms)
        seconds = items * (work.item_units * cycles + of_ends) / clock
    tflops = traffic.useful_flop * work.units / seconds / 1e12
    return Prediction(work.name, machine.name, demands, cycles, seconds, tflops, bound, of_ends)
