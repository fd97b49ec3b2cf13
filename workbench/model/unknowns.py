"""The constants of a B200 that nobody here measured, and the range of times that follows.

`workbench/probes/first_hour_b200.py` measures those that it has a probe for. A query of our
attention kernels takes its blocks' time and, besides, the time that nothing overlaps: in the
forward its CTAs' start, Q on its way in, the results on their way out; in the backward, whose pairs
stay for several queries, the timeline's clocks between two of them. Pairs run in whole waves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from workbench.model import backward_sm100, forward_sm100
from workbench.model.machine import B200, GpuModel
from workbench.model.roofline import Work, predict
from workbench.model.timeline import ends

PAIRS_AT_ONCE = int(B200["sms"]) // CLUSTER
ISSUING_WARPS, ROWS_A_GATHER = 4, 4
GATHERS = (FwdPlan().tile.boxes + 1) / ROWS_A_GATHER / ISSUING_WARPS
"""Gathers of a key that a warp issues: the CTA's value dims by boxes, and its RoPE dims."""
ADDS = 2.5 / ISSUING_WARPS
"""Bulk adds of a key that a warp of the backward issues: parts 0 and 1 of dKV in every block, part
2 in every other one."""


class Unknown(NamedTuple):
    """A constant of a B200.

    Attributes:
        good, bad: the ends, of which `good` gives the shorter times; source: their reason.
        probe: the measurement of the first hour.
        machine: the constant of `GpuModel` that it is; "" where the model has none.
    """

    good: float
    bad: float
    unit: str
    source: str
    probe: str
    machine: str = ""

    @property
    def middle(self) -> float:
        """Mean of the ends, as factors."""
        return math.sqrt(self.good * self.bad)


UNKNOWNS: Mapping[str, Unknown] = {
    "clock under load": Unknown(
        1.85e9, 1.70e9, "1/s", "2.25 PFLOPS; 1.79 to 1.83 reported, power caps below",
        "attention, clock", "clock",
    ),
    "L2 reads": Unknown(
        11.3e12, 9.32e12, "B/s", "what FlashMLA's 1,450 TFLOPS gathers; the H200's a clock and SM",
        "attention, forward", "l2_read",
    ),
    "L2 adds": Unknown(
        4.5e12, 3.1e12, "B/s", "cuDNN's backward runs at 4.3; FlashAttention-4's at 2.7",
        "attention, backward", "l2_reduce",
    ),
    "bulk reads of shared memory": Unknown(
        128, 32, "B/clk/SM", "as fast as loads; as on the H200", "bulk add", "bulk_read_rate"
    ),
    "st.async to the peer": Unknown(
        19.7, 9.85, "B/clk/SM", "one CTA sending, as on the H200; both at once: half",
        "st.async", "dsmem_rate",
    ),
    "a bulk add, of the issuing warp": Unknown(
        20, 79, "clk", "the H200's probe has 79 with one warp, half of it a warp with four",
        "bulk add",
    ),
    "a gather4, of the issuing warp": Unknown(
        12, 50, "clk", "FlashMLA's 1,450 TFLOPS allow an SM 12.4, which four warps share", "gather4"
    ),
    "a release of shared memory to the peer": Unknown(
        30, 500, "clk", "MEMBAR.ALL.CTA alone; a third of one of the whole GPU", "release"
    ),
    "clocks of a block over its count": Unknown(
        1.05, 1.25, "", "1.22 FlashMLA's forward, 1.32 FlashAttention-4's, ends included",
        "attention, topk 64 and 2048",
    ),
    "ends of a query, forward": Unknown(
        3_500, 8_000, "clk", "Q 1,800 and O 1,300 by themselves; start, first gather, last tile",
        "attention, topk 64 and 2048",
    ),
    "ends of a launch, backward": Unknown(
        7_000, 12_000, "clk", "Q and dO 4,300 by themselves; start, first blocks, dQ",
        "attention, topk 64 and 2048",
    ),
}  # fmt: skip


class Attention(NamedTuple):
    """A kernel whose pairs of CTAs take a query each.

    Attributes:
        block_keys: of a unit. ends: the unknown of its ends, once a query; once a launch where the
            work has what lies between two queries.
        released: steps that contain a release of shared memory to the peer.
        adds: bulk adds of a key that a warp issues. published: TFLOPS of others on B200.
    """

    name: str
    block_keys: int
    work: Callable[[GpuModel, int, int, int], Work]
    ends: str
    released: tuple[str, ...]
    adds: float
    published: str


KERNELS = (
    Attention(
        "forward", FwdPlan().tile.keys, forward_sm100.work,
        "ends of a query, forward", ("P ready",), 0,
        "FlashMLA 1,450; FlashAttention-4 1,180",
    ),
    Attention(
        "backward", BwdPlan().tile.keys, backward_sm100.work,
        "ends of a launch, backward", ("add P", "add dP"),
        ADDS, "FlashAttention-4 820 and cuDNN 642 to 684, both with 512 dims",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A kernel's time with given constants, its useful TFLOPS and the bound of a block."""

    seconds: float
    tflops: float
    binds: str


def estimate(
    kernel: Attention, values: Mapping[str, float], *, queries: int, topk: int, s_kv: int
) -> Estimate:
    """Predict the time with a value for every unknown."""
    known = {one.machine: values[name] for name, one in UNKNOWNS.items() if one.machine}
    machine = B200.with_values(known)
    work = kernel.work(machine, queries, topk, s_kv)
    release = values["a release of shared memory to the peer"]
    released = (
        replace(step, cycles=step.cycles + release) if step.name in kernel.released else step
        for step in work.steps
    )
    work = work._replace(steps=tuple(released))
    steady = predict(work._replace(item_units=0), machine)
    over = values["clocks of a block over its count"]
    cycles, binds = over * steady.cycles, steady.bound
    issued = kernel.block_keys * max(
        GATHERS * values["a gather4, of the issuing warp"],
        kernel.adds * values["a bulk add, of the issuing warp"],
    )
    if issued > cycles:
        cycles, binds = issued, "issue of bulk operations"
    blocks, waves = -(-topk // kernel.block_keys), -(-queries // PAIRS_AT_ONCE)
    between = over * ends(work.steps, work.traffic.other_port_cycles(machine))
    of_query, of_launch = blocks * cycles, values[kernel.ends]
    if not work.item_units:
        between, of_launch = of_launch, 0.0
    seconds = (waves * (of_query + between) + of_launch) / values["clock under load"]
    if between > of_query:
        binds = "ends of a query"
    return Estimate(seconds, work.traffic.useful_flop * work.units / seconds / 1e12, binds)


@dataclass(frozen=True)
class Range:
    """A kernel on a shape.

    Attributes:
        best, middle, worst: with every unknown at its good end, in its middle, at its bad end.
        worth: of each unknown that matters, TFLOPS at its good and at its bad end while the others
            are in the middle; most first.
        published: TFLOPS of others' kernels on B200.
    """

    kernel: str
    topk: int
    best: Estimate
    middle: Estimate
    worst: Estimate
    worth: tuple[tuple[str, float, float], ...]
    published: str


def attention_ranges(queries: int, topk: int, s_kv: int) -> tuple[Range, ...]:
    """Predict every kernel for 128 heads on B200."""
    good = {name: one.good for name, one in UNKNOWNS.items()}
    bad = {name: one.bad for name, one in UNKNOWNS.items()}
    middle = {name: one.middle for name, one in UNKNOWNS.items()}
    found = []
    for kernel in KERNELS:
        at = partial(estimate, kernel, queries=queries, topk=topk, s_kv=s_kv)
        worth = [
            (name, at(middle | {name: one.good}).tflops, at(middle | {name: one.bad}).tflops)
            for name, one in UNKNOWNS.items()
        ]
        matter = [row for row in worth if abs(row[1] - row[2]) > 0.5]
        most_first = tuple(sorted(matter, key=lambda row: row[2] - row[1]))
        times = at(good), at(middle), at(bad)
        found.append(Range(kernel.name, topk, *times, most_first, kernel.published))
    return tuple(found)
