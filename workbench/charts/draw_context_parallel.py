"""The chart of context parallelism: the model's line and what was measured, efficiency over ranks.

    python -m workbench.charts.draw_context_parallel RESULT.json ... --out CHART.png

A step is indexer, forward and backward; its efficiency is one GPU's time over the ranks times
theirs. The model gets the kernels' rates from the results, so that only communication is judged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from workbench.model.context_parallel import Layer, Rates, rank_work, step, sweep
from workbench.model.context_parallel_chart import draw

FORWARD, BACKWARD = "forward, correlated", "backward, correlated, grad_wire fp32"


def measured_step(found: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a step on the ranks of a result, and of one GPU with all of the work."""
    forward, backward = found["attention"][FORWARD], found["attention"][BACKWARD]
    indexer = found["indexer"]
    spread = max(indexer["zigzag"]["ms of each rank"]) + forward["ms"] + backward["ms"]
    alone = indexer["one GPU, all queries, ms"] + forward["one GPU, ms"]
    return spread, alone + sum(backward["kernel alone, ms"])


def rates_of(found: dict[str, Any], layer: Layer) -> Rates:
    """With the kernels' TFLOPS as measured on one GPU; links as the model has them."""
    work = rank_work(layer, 1, 0)
    seconds = {
        "indexer": found["indexer"]["one GPU, all queries, ms"] / 1e3,
        "forward": found["attention"][FORWARD]["one GPU, ms"] / 1e3,
        "backward": sum(found["attention"][BACKWARD]["kernel alone, ms"]) / 1e3,
    }
    flop = {
        "indexer": work.scored * 64 * 128 * 2,
        "forward": work.attended * layer.heads * 2 * (576 + 512),
        "backward": work.attended * layer.heads * 2 * (3 * 576 + 2 * 512),
    }
    tflops = {f"{name}_tflops": flop[name] / seconds[name] / 1e12 for name in flop}
    return Rates(**tflops)


def main() -> None:
    """Read, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    results = sorted((json.loads(path.read_text()) for path in chosen.results), key=_ranks)
    sizes = results[-1]["sizes"]
    layer = Layer(**sizes, overlap=False)
    rates = rates_of(results[-1], layer)
    print(rates)
    measured = {}
    for found in results:
        spread, alone = measured_step(found)
        predicted = step(layer, found["ranks"], rates)
        measured[found["ranks"]] = alone / found["ranks"] / spread
        print(
            f"{found['ranks']} ranks: {spread:.1f} ms, efficiency "
            f"{measured[found['ranks']]:.3f}; model {1e3 * predicted.seconds:.1f} ms, "
            f"{predicted.efficiency:.3f}"
        )
    draw(layer, sweep(layer, rates), chosen.out, measured)


def _ranks(found: dict[str, Any]) -> int:
    return int(found["ranks"])


if __name__ == "__main__":
    main()
