"""The tables and the document of `python -m workbench model`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flashdsa.cli.console import Rows, TextTable
from workbench.model import backward_sm100, forward_sm100
from workbench.model.indexer_sm100 import predict_all
from workbench.model.machine import B200, H200
from workbench.model.roofline import QUERIES, S_KV, TOPK, Prediction, predict
from workbench.model.unknowns import UNKNOWNS, Range

Ranges = tuple[Range, ...]


def summary(ranges: Ranges) -> list[TextTable]:
    """Every kernel in one table."""
    rows: Rows = []
    for one in ranges:
        times = f"{one.best.seconds * 1e3:.2f} to {one.worst.seconds * 1e3:.2f} ms"
        rows.append((one.kernel, f"H=128, topk {one.topk}", times, one.middle.binds))
    for name, found in predict_all(B200).items():
        times = f"{found.low * 1e6:.1f} to {found.high * 1e6:.1f} us"
        rows.append(("indexer", f"rows/tokens {name}", times, found.bound))
    columns = [("kernel", "left"), ("shape", "left"), ("predicted", "right"), ("bound", "wrap")]
    return [TextTable("Times on B200", columns, rows)]


def attention(ranges: Ranges) -> list[TextTable]:
    """The ranges and bounds of the attention kernels, and the constants that decide."""
    times: Rows = []
    worth: Rows = []
    for one in ranges:
        kernel = f"{one.kernel}, topk {one.topk}"
        at = (f"{at.tflops:,.0f}" for at in (one.best, one.middle, one.worst))
        times.append((kernel, *at, one.published))
        for name, good, bad in one.worth:
            of = UNKNOWNS[name]
            ends = f"{of.good:g} to {of.bad:g} {of.unit}"
            worth.append((name, ends, kernel, f"{good:,.0f} to {bad:,.0f}", of.probe))
    found = bounds()
    demands = sorted(found[1].demands, key=lambda name: -found[1].demands[name])
    clocks: Rows = [(name, *(f"{one.demands[name]:,.0f}" for one in found)) for name in demands]
    clocks.append(("with waiting", *(f"{one.cycles:,.0f}" for one in found)))
    clocks.append(
        ("between two queries", *(f"{one.ends:,.0f}" if one.ends else "" for one in found))
    )
    names = ("best", "middle", "worst", "forward", "backward")
    numbers = [(name, "right") for name in names]
    kernels, constant = ("kernel", "left"), [("constant", "wrap"), ("range", "wrap")]
    of_worth = [*constant, kernels, ("TFLOPS", "left"), ("in the first hour", "wrap")]
    of_times = [kernels, *numbers[:3], ("published of others", "wrap")]
    of_clocks = [("resource", "left"), *numbers[3:]]
    adds: Rows = [
        (one.way, *(f"{number:,.0f}" for number in one[1:])) for one in backward_sm100.ways_to_add()
    ]
    counted = ("instructions", "requests to L2", "sectors of L2")
    of_adds = [("backward's dKV, 32 keys and CTA", "left"), *((name, "right") for name in counted)]
    return [
        TextTable("On B200, TFLOPS", of_times, times),
        TextTable("Clocks: forward 64 keys and CTA, backward 32", of_clocks, clocks),
        TextTable("Counts of what adds to dKV; rates of the second are not known", of_adds, adds),
        TextTable("Constants that nobody here has measured, others in the middle", of_worth, worth),
    ]


def bounds() -> list[Prediction]:
    """Predict the forward and the backward from one value of each constant."""
    works = (kernel.work(B200, QUERIES, TOPK, S_KV) for kernel in (forward_sm100, backward_sm100))
    return [predict(work, B200) for work in works]


def machines(_: Ranges) -> list[TextTable]:
    """Every constant with its source."""
    columns = [("constant", "left"), ("value", "right"), ("meaning", "wrap"), ("unit", "left")]
    columns += [("basis", "left"), ("source", "wrap")]
    found = []
    for machine in (H200, B200):
        rows: Rows = [(name, f"{one.value:g}", *one[1:]) for name, one in machine.constants.items()]
        found.append(TextTable(machine.name, columns, rows))
    return found


TABLES = {"summary": summary, "attention": attention, "machines": machines}


def document(ranges: Ranges) -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "attention": [asdict(one) for one in ranges],
        "bounds": [one._asdict() for one in bounds()],
        "adds": [one._asdict() for one in backward_sm100.ways_to_add()],
        "indexer": [
            one._asdict() | {"shape": one.shape._asdict()} for one in predict_all(B200).values()
        ],
        "unknowns": {name: one._asdict() for name, one in UNKNOWNS.items()},
        "machines": {
            machine.name: {name: one._asdict() for name, one in machine.constants.items()}
            for machine in (H200, B200)
        },
    }
