"""The lines that the Hopper indexer has to hold, judged on the rows of a run."""

from __future__ import annotations

import math

from flashdsa.bench.gpu.cases import CONTEST, PLATEAUS, RAGGED, SHAPES, shape_name
from flashdsa.bench.gpu.result import GpuRow, Threshold

GEOMETRIC_MEAN, LEAST_RATIO, LEAST_RAGGED = 1.55, 1.08, 2.0
RAGGED_OVER_FLOOR, PLATEAU_OVER_RANDOM, LARGEST_OVER_FLOOR = 1.6, 1.7, 1.18
LAUNCH, OPERATION = "raw launch", "torch op"
HOST_US = {LAUNCH: 6.0, OPERATION: 16.0}


def geometric_mean(rows: list[GpuRow]) -> float | None:
    """Of the nine shapes' ratios; None unless all of them have one."""
    ratios = _shape_ratios(rows)
    if ratios is None:
        return None
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def judge_thresholds(rows: list[GpuRow], host_us: dict[str, float]) -> list[Threshold]:
    """Every line with what was found."""
    by_name = {row.name: row for row in rows}
    ratios = _shape_ratios(rows)
    ragged, contest = by_name.get(RAGGED), by_name.get(CONTEST)
    largest = by_name.get(shape_name(*SHAPES[-1]))
    plateaus = [row.over_random for row in rows if row.data in PLATEAUS]
    known = [times for times in plateaus if times is not None]
    return [
        _at_least("nine shapes, geometric mean", GEOMETRIC_MEAN, geometric_mean(rows)),
        _at_least("nine shapes, the lowest", LEAST_RATIO, min(ratios) if ratios else None),
        _at_least(f"{CONTEST}: ratio", LEAST_RAGGED, contest.ratio if contest else None),
        _at_least(f"{RAGGED}: ratio", LEAST_RAGGED, ragged.ratio if ragged else None),
        _at_most(f"{RAGGED}: over floor", RAGGED_OVER_FLOOR, ragged.over_floor if ragged else None),
        _at_most("plateaus over random, the worst", PLATEAU_OVER_RANDOM, max(known, default=None)),
        _at_most(
            f"{shape_name(*SHAPES[-1])}: over floor",
            LARGEST_OVER_FLOOR,
            largest.over_floor if largest else None,
        ),
        *(
            _at_most(f"host, {name}", most, host_us.get(name), "us")
            for name, most in HOST_US.items()
        ),
        _at_most(
            "rows with wrong ids", 0, len([r for r in rows if r.findings]) if rows else None, ""
        ),
    ]


def _shape_ratios(rows: list[GpuRow]) -> list[float] | None:
    found = [row.ratio for row in rows if row.kind == "shape" and row.ratio is not None]
    return found if len(found) == len(SHAPES) else None


def _at_least(name: str, least: float, found: float | None) -> Threshold:
    return Threshold(name, f">= {least:g}x", found, None if found is None else found >= least)


def _at_most(name: str, most: float, found: float | None, unit: str = "x") -> Threshold:
    wanted = f"<= {most:g}{unit if unit in ('', 'x') else f' {unit}'}"
    return Threshold(name, wanted, found, None if found is None else found <= most)
