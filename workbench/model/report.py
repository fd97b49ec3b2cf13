"""The tables and the document of `python -m workbench model`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from workbench.model import backward_sm100, forward_sm100
from workbench.model.hopper import ROOFLINES
from workbench.model.indexer_sm100 import predict_all
from workbench.model.machine import B200, H200
from workbench.model.predict import predict
from workbench.model.unknowns import UNKNOWNS, Range

Table = tuple[str, list[tuple[str, str]], list[tuple[str, ...]]]
"""Title, columns as `flashdsa.cli.console.new_table` takes them, rows."""
Ranges = tuple[Range, ...]
SHOWN = ("1/8K", "32/16K", "128/64K")
"""Shapes of the indexer in the summary."""


def summary(ranges: Ranges) -> list[Table]:
    """Every kernel in one table: ranges on B200, rooflines beside measured times on H200."""
    rows: list[tuple[str, ...]] = []
    for one in ranges:
        times = f"{one.best.seconds * 1e3:.2f} to {one.worst.seconds * 1e3:.2f} ms"
        shape = f"H=128, topk {one.topk}"
        rows.append((f"B200, {one.kernel}", shape, times, "", one.middle.binds))
    for name, found in predict_all(B200).items():
        if name in SHOWN:
            times = f"{found.low * 1e6:.0f} to {found.high * 1e6:.0f} us"
            rows.append(("B200, indexer", f"rows/tokens {name}", times, "", found.bound))
    for roof in ROOFLINES:
        at_best, measured = roof.prediction.seconds, roof.measured
        unit, factor = ("ms", 1e3) if measured > 1e-3 else ("us", 1e6)
        shown = f"{at_best * factor:.3g} {unit}", f"{measured * factor:.3g} {unit}"
        row = f"{shown[1]}, {measured / at_best:.2f} x"
        rows.append((f"H200, {roof.kernel}", roof.shape, shown[0], row, roof.prediction.bound))
    columns = [("kernel", "left"), ("shape", "left"), ("predicted", "right")]
    columns += [("measured", "right"), ("bound", "wrap")]
    return [("B200: ranges. H200: rooflines, beside one H200's times", columns, rows)]


def attention(ranges: Ranges) -> list[Table]:
    """The ranges and bounds of both Blackwell kernels, and the constants that decide."""
    times: list[tuple[str, ...]] = [
        (
            f"{one.kernel}, topk {one.topk}",
            *(f"{at.tflops:,.0f}" for at in (one.best, one.middle, one.worst)),
            one.published,
        )
        for one in ranges
    ]
    forward, backward = _bounds()
    bounds: list[tuple[str, ...]] = [
        (name, f"{forward.demands[name]:,.0f}", f"{cycles:,.0f}")
        for name, cycles in sorted(backward.demands.items(), key=lambda demand: -demand[1])
    ]
    bounds.append(("with waiting", f"{forward.cycles:,.0f}", f"{backward.cycles:,.0f}"))
    bounds.append(("between two queries", "", f"{backward.ends:,.0f}"))
    worth: list[tuple[str, ...]] = [
        (
            name,
            f"{UNKNOWNS[name].good:g} to {UNKNOWNS[name].bad:g} {UNKNOWNS[name].unit}",
            f"{one.kernel}, topk {one.topk}",
            f"{good:,.0f} to {bad:,.0f}",
            UNKNOWNS[name].probe,
        )
        for one in ranges
        for name, good, bad in one.worth
    ]
    numbers = [(name, "right") for name in ("best", "middle", "worst", "forward", "backward")]
    kernel, constant = ("kernel", "left"), [("constant", "wrap"), ("range", "wrap")]
    of_worth = [*constant, kernel, ("TFLOPS", "left"), ("in the first hour", "wrap")]
    return [
        ("On B200, TFLOPS", [kernel, *numbers[:3], ("published of others", "wrap")], times),
        ("Clocks: 64 keys and CTA, 32 keys and CTA", [("resource", "left"), *numbers[3:]], bounds),
        ("Constants that nobody here has measured, others in the middle", of_worth, worth),
    ]


def _bounds() -> Any:
    return [predict(of.work(B200), B200) for of in (forward_sm100, backward_sm100)]


def indexer(_: Ranges) -> list[Table]:
    """The Blackwell indexer on B200."""
    rows: list[tuple[str, ...]] = [
        (name, f"{one.shape.ctas}", f"{one.low * 1e6:.1f} to {one.high * 1e6:.1f}", one.bound)
        for name, one in predict_all(B200).items()
    ]
    columns = [("rows/tokens", "left"), ("CTAs of a row", "right"), ("us", "right")]
    columns.append(("binds", "wrap"))
    return [("indexer, sm_100a, on B200: H=64, topk=2048, predicted", columns, rows)]


def machines(_: Ranges) -> list[Table]:
    """Every constant with its source."""
    columns = [("constant", "left"), ("meaning", "wrap"), ("value", "right"), ("unit", "left")]
    columns += [("basis", "left"), ("source", "wrap")]
    return [
        (
            machine.name,
            columns,
            [
                (name, one.what, f"{one.value:g}", one.unit, one.basis.value, one.source)
                for name, one in machine.constants.items()
            ],
        )
        for machine in (H200, B200)
    ]


TABLES = {"summary": summary, "attention": attention, "indexer": indexer, "machines": machines}


def document(ranges: Ranges) -> dict[str, Any]:
    """Everything, for --json."""
    hopper = [
        {"kernel": one.kernel, "shape": one.shape, "measured": one.measured, "source": one.source}
        | {"roofline": asdict(one.prediction)}
        for one in ROOFLINES
    ]
    return {
        "attention": [asdict(one) for one in ranges],
        "bounds": [asdict(one) for one in _bounds()],
        "indexer": [asdict(one) for one in predict_all(B200).values()],
        "hopper": hopper,
        "unknowns": {name: asdict(one) for name, one in UNKNOWNS.items()},
        "machines": {machine.name: asdict(machine)["constants"] for machine in (H200, B200)},
    }
