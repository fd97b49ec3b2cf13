"""The demands of one unit of a kernel's main loop on an SM and on the chip, and the time they take.

The largest demand is the roofline; a kernel whose roles wait for each other has a timeline besides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flashdsa.dsl.umma import UmmaProduct
from flashdsa.problem import D_QK
from workbench.model.machine import GpuModel
from workbench.model.timeline import BULK, DSMEM, TENSOR, After, Part, Step, ends, period

QUERIES, TOPK, S_KV = 4096, 2048, 8192
ROW_BYTES, GRADIENT_ROW_BYTES = 2 * D_QK, 4 * D_QK
SATURATED = 0.9
"""Share of shared memory's time above which MMAs starve its other readers."""
CHIP = "L2 and HBM"


class Matmul(NamedTuple):
    """MMA instructions of one shape.

    Attributes:
        number: of instructions. m, n, k: of one, this CTA's share of them.
        a_in_shared: A comes from shared memory, as B always does.
        shared_n: columns of B that this CTA reads; None: all n (cta_group::2 reads half).
        half_rate: the shape leaves half of the tensor core idle.
    """

    number: float
    m: int
    n: int
    k: int = 16
    a_in_shared: bool = True
    element_bytes: int = 2
    shared_n: int | None = None
    half_rate: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.number

    @property
    def operand_bytes(self) -> float:
        """Bytes that shared memory gives."""
        columns = self.n if self.shared_n is None else self.shared_n
        rows = self.m * self.a_in_shared + columns
        return float(rows * self.k * self.element_bytes * self.number)

    def tensor_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of the tensor core alone."""
        rate = machine["bf16_rate" if self.element_bytes == 2 else "fp8_rate"]
        return self.flop / rate * (2 if self.half_rate else 1)

    def cycles(self, machine: GpuModel) -> float:
        """Count clocks with nothing else at work: of the tensor core, or of shared memory."""
        return max(self.tensor_cycles(machine), self.operand_bytes / machine["operand_rate"])


def matmul_of(product: UmmaProduct, share: float = 1) -> Matmul:
    """Count a CTA's share of a tcgen05 product of a plan."""
    return Matmul(
        number=product.k // product.element.step_k * share,
        m=product.rows,
        n=product.n,
        k=product.element.step_k,
        a_in_shared=not product.a_in_tmem,
        element_bytes=product.element.bytes,
        shared_n=product.b.extent,
        half_rate=product.data_path == "F",
    )


class Traffic(NamedTuple):
    """One unit of work of one CTA, e.g. a block of keys of a query.

    Attributes:
        useful_flop: of the operation, whatever the kernel computes. matmuls: the kernel's.
        shared_bytes: that reach or leave shared memory otherwise: loads and stores of threads,
            arriving gathers, the peer's writes.
        dsmem_bytes: written into the peer. tmem_bytes: loads and stores of threads.
        read_bytes: of device memory through L2. reduce_bytes: added there, by bulk copies.
        exps: ex2 of all threads. instructions: of all warps, other than waiting.
    """

    useful_flop: float
    matmuls: tuple[Matmul, ...] = ()
    shared_bytes: float = 0
    dsmem_bytes: float = 0
    tmem_bytes: float = 0
    read_bytes: float = 0
    reduce_bytes: float = 0
    exps: float = 0
    instructions: float = 0

    def other_port_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of shared memory for all but MMA operands."""
        bulk = self.reduce_bytes / machine["bulk_read_rate"]
        return self.shared_bytes / machine["operand_rate"] + bulk

    def demands(self, machine: GpuModel) -> dict[str, float]:
        """Count the clocks of one SM that each of its resources is busy for."""
        operands = sum(matmul.operand_bytes for matmul in self.matmuls) / machine["operand_rate"]
        return {
            "tensor core": sum(matmul.cycles(machine) for matmul in self.matmuls),
            "shared memory port": operands + self.other_port_cycles(machine),
            "DSMEM": self.dsmem_bytes / machine["dsmem_rate"],
            "exponentials": self.exps / machine["exp_rate"],
            "issue slots": self.instructions / machine["issue_rate"],
            "tensor memory": self.tmem_bytes / machine["tmem_rate"],
        }


class Footprint(NamedTuple):
    """Bytes of device memory that a kernel comes back to, which compete for L2."""

    reduced: float = 0
    read: float = 0


def chip_seconds(
    machine: GpuModel, read_bytes: float, reduce_bytes: float, footprint: Footprint
) -> float:
    """Add up L2 and HBM byte by byte: reductions and reads share L2's time. Accesses are uniformly
    random, so that L2 misses the share of the footprint that it has no room for."""
    total = sum(footprint)
    miss = max(0.0, 1 - machine["l2_bytes"] / total) if total else 0.0
    read = (1 - miss) / machine["l2_read"] + miss / machine["hbm"]
    reduce = (1 - miss) / machine["l2_reduce"] + miss / machine["reduce_miss"]
    return read_bytes * read + reduce_bytes * reduce


def l2_cycles(machine: GpuModel, size: float) -> float:
    """Count the clocks in which an SM gets its share of L2's reads."""
    return size / (machine["l2_read"] / machine["sms"] / machine["clock"])


def mma_step(
    machine: GpuModel,
    name: str,
    matmuls: tuple[Matmul, ...],
    *after: After,
    part: Part = Part.EVERY,
) -> Step:
    """Make a timeline's step of MMAs, one after the other; their role does not wait for them."""
    cycles = sum(matmul.cycles(machine) for matmul in matmuls)
    port = sum(matmul.operand_bytes for matmul in matmuls) / machine["operand_rate"]
    lost: tuple[tuple[str, float], ...] = ()
    if port > SATURATED * cycles:
        lost = ((DSMEM, 1 - machine["dsmem_starved"]), (BULK, 1 - machine["bulk_starved"]))
    return Step("mma", name, cycles, TENSOR, port, after, machine["mma_latency"], False, lost, part)


class Work(NamedTuple):
    """A kernel on a shape.

    Attributes:
        units: of all CTAs together. steps: of the roles; () when only the bounds are known.
        footprint: the device memory that the units come back to.
        item_units: of an item, of which an SM takes one after the other; 0: units are all alike.
    """

    traffic: Traffic
    units: float
    footprint: Footprint
    steps: tuple[Step, ...] = ()
    item_units: int = 0


class Prediction(NamedTuple):
    """The time of a kernel, and its bound.

    Attributes:
        demands: clocks a unit of each resource of an SM, and of the chip.
        cycles: clocks a unit of an SM, with waiting. bound: the resource that sets it.
        ends: clocks an item of an SM beyond its units'. seconds: with them, in whole items of an
            SM where the kernel has items.
    """

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
            cycles, bound = (
                chain,
                worst if chain < 1.1 * cycles else f"{worst}, waiting between roles",
            )
    clock = machine["clock"]
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
    return Prediction(demands, cycles, seconds, tflops, bound, of_ends)
