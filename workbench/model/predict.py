"""From traffic and timeline to time: the bounds, what binds, and TFLOPS."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from workbench.model.machine import GpuModel
from workbench.model.timeline import Step, ends, period
from workbench.model.traffic import Footprint, Traffic, chip_seconds

BUSY_SHARE = 0.5
"""With the tensor core at work for more of the time than this, the clock is the busy one."""
CHAIN = "waiting between roles"
CHIP = "L2 and HBM"


@dataclass(frozen=True)
class Work:
    """A kernel on a shape.

    Attributes:
        units: of all CTAs together. steps: of the roles; () when only the bounds are known.
        footprint: what the units come back to in device memory. sms: that the kernel uses.
        item_units: of an item, of which an SM takes one after the other; 0: units are all alike.
    """

    name: str
    traffic: Traffic
    units: float
    steps: tuple[Step, ...] = ()
    footprint: Footprint = field(default_factory=Footprint)
    sms: float | None = None
    item_units: int = 0


@dataclass(frozen=True)
class Prediction:
    """What the model says of a kernel.

    Attributes:
        demands: clocks a unit of each resource of an SM; chip: the same of L2 and HBM.
        cycles: clocks a unit of an SM, with waiting. bound: what sets it.
        ends: clocks an item of an SM beyond its units'. seconds: with them, in whole items of an
            SM where the kernel has items.
    """

    name: str
    machine: str
    demands: dict[str, float]
    chip_cycles: float
    cycles: float
    seconds: float
    tflops: float
    bound: str
    ends: float = 0.0

    def to_json_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "kernel": self.name,
            "machine": self.machine,
            "cycles_a_unit": self.cycles,
            "cycles_of_the_ends_of_an_item": self.ends,
            "demands_cycles_a_unit": self.demands | {CHIP: self.chip_cycles},
            "seconds": self.seconds,
            "tflops": self.tflops,
            "bound": self.bound,
        }


def predict(work: Work, machine: GpuModel) -> Prediction:
    """The slower of what an SM and what the chip needs."""
    traffic = work.traffic
    demands = traffic.demands(machine)
    worst = max(demands, key=lambda name: demands[name])
    cycles, bound = demands[worst], worst
    if work.steps:
        chain = period(work.steps, traffic.other_port_cycles(machine))
        if chain > cycles:
            cycles, bound = chain, worst if chain < 1.1 * cycles else f"{worst}, {CHAIN}"
    busy = traffic.tensor_cycles(machine) > BUSY_SHARE * cycles
    clock = (machine.busy_clock if busy else machine.clock).value
    sms = work.sms or machine.sms.value
    of_chip = chip_seconds(
        machine, traffic.read_bytes * work.units, traffic.reduce_bytes * work.units, work.footprint
    )
    chip_cycles = of_chip * clock * sms / work.units
    if chip_cycles > cycles:
        cycles, bound = chip_cycles, CHIP
    of_ends, seconds = 0.0, cycles * work.units / sms / clock
    if work.item_units:
        of_ends = ends(work.steps, traffic.other_port_cycles(machine))
        items = math.ceil(work.units / work.item_units / sms)
        seconds = items * (work.item_units * cycles + of_ends) / clock
    return Prediction(
        name=work.name,
        machine=machine.name,
        demands=demands,
        chip_cycles=chip_cycles,
        cycles=cycles,
        seconds=seconds,
        tflops=traffic.useful_flop * work.units / seconds / 1e12,
        bound=bound,
        ends=of_ends,
    )
