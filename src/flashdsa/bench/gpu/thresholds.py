"""The lines that the Hopper indexer has to hold, judged on the rows of a run."""

from __future__ import annotations

import math

from flashdsa.bench.gpu.cases import (
    CONTEST,
    NUM_RAGGED,
    PLATEAUS,
    RAGGED,
    SHAPES,
    shape_name,
)
from flashdsa.bench.gpu.result import GpuRow, Threshold

GEOMETRIC_MEAN, LEAST_RATIO, LEAST_RAGGED = 1.55, 1.08, 2.0
MIXES_GEOMETRIC_MEAN, LEAST_MIX = 1.25, 1.0
RAGGED_OVER_FLOOR, PLATEAU_OVER_RANDOM, LARGEST_OVER_FLOOR = 1.6, 1.7, 1.18
LAUNCH, OPERATION = "raw launch", "torch op"
HOST_US = {LAUNCH: 6.0, OPERATION: 16.0}


APART = "timed apart"


def geometric_mean(rows: list[GpuRow], apart: bool = False) -> float | None:
    """Of the nine shapes' ratios; None unless all of them have one."""
    ratios = _shape_ratios(rows, apart)
    if ratios is None:
        return None
    return _mean(ratios)


def _mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def judge_thresholds(rows: list[GpuRow], host_us: dict[str, float]) -> list[Threshold]:
    """Every line with what was found."""
    by_name = {row.name: row for row in rows}
    ragged = by_name.get(RAGGED)
    largest_name = shape_name(*SHAPES[-1])
    largest = by_name.get(largest_name)
    plateaus = [row.over_random for row in rows if row.data in PLATEAUS]
    known = [times for times in plateaus if times is not None]
    wrong = len([row for row in rows if row.findings]) if rows else None
    return [
        *_ratio_lines(rows, apart=False),
        *_ratio_lines(rows, apart=True),
        _at_most(f"{RAGGED}: over floor", RAGGED_OVER_FLOOR, ragged.over_floor if ragged else None),
        _at_most("plateaus over random, the worst", PLATEAU_OVER_RANDOM, max(known, default=None)),
        _at_most(
            f"{largest_name}: over floor",
            LARGEST_OVER_FLOOR,
            largest.over_floor if largest else None,
        ),
        *(_at_most(f"host, {name}", us, host_us.get(name), " us") for name, us in HOST_US.items()),
        _at_most("rows with wrong ids", 0, wrong, ""),
    ]


def _ratio_lines(rows: list[GpuRow], apart: bool) -> list[Threshold]:
    how = f", {APART}" if apart else ""
    ratios = _shape_ratios(rows, apart)
    lines = [
        _at_least(f"nine shapes, geometric mean{how}", GEOMETRIC_MEAN, geometric_mean(rows, apart)),
        _at_least(f"nine shapes, the lowest{how}", LEAST_RATIO, min(ratios) if ratios else None),
    ]
    mixes = [ratio for row in rows if row.kind == "ragged" and (ratio := _ratio(row, apart))]
    complete = len(mixes) == NUM_RAGGED
    mean = _mean(mixes) if complete else None
    lines.append(_at_least(f"ragged, geometric mean{how}", MIXES_GEOMETRIC_MEAN, mean))
    lines.append(_at_least(f"ragged, the lowest{how}", LEAST_MIX, min(mixes) if complete else None))
    for name in (CONTEST, RAGGED):
        found = [_ratio(row, apart) for row in rows if row.name == name]
        lines.append(_at_least(f"{name}: ratio{how}", LEAST_RAGGED, found[0] if found else None))
    return lines


def _ratio(row: GpuRow, apart: bool) -> float | None:
    return row.apart_ratio if apart else row.ratio


def _shape_ratios(rows: list[GpuRow], apart: bool) -> list[float] | None:
    ratios = [_ratio(row, apart) for row in rows if row.kind == "shape"]
    found = [ratio for ratio in ratios if ratio is not None]
    return found if len(found) == len(SHAPES) else None


def _at_least(name: str, least: float, found: float | None) -> Threshold:
    return Threshold(name, f">= {least:g}x", found, None if found is None else found >= least)


def _at_most(name: str, most: float, found: float | None, unit: str = "x") -> Threshold:
    return Threshold(name, f"<= {most:g}{unit}", found, None if found is None else found <= most)
