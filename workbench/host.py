"""Host microseconds of a call of every public operation, on a GPU.

    python -m workbench.host --out X.json                  # this tree
    python -m workbench.host --before DIR --out X.json     # beside another tree's src, by turns

A call counts without the GPU's part: back to back while the queue is short, and after a pause of
50 ms, when caches are cold. --before runs both trees in processes of their own, by turns, and
the least of all turns counts. The row "x.add_(1)" is torch's own smallest call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

BURST, BURSTS, PAUSES = 20, 15, 12
PAUSE_SECONDS = 0.05
Times = dict[str, tuple[float, float]]
"""Call -> microseconds back to back, and after a pause."""


def measure() -> Times:
    """Time every call in this process."""
    import torch

    import flashdsa
    from workbench.public_calls import PREFILL, public_calls

    one = torch.zeros(1, device="cuda")
    calls: dict[str, Callable[[], object]] = {"x.add_(1)": lambda: one.add_(1)}
    for name, call in public_calls("cuda", PREFILL).items():
        public, _, operation = name.partition(", ")
        if public == "bind":
            operands = tuple(call.arguments.values())
            calls[name] = partial(flashdsa.bind(operation, operands), operands)
        else:
            calls[name] = partial(call.function, **call.arguments)
    return {
        name: (_burst(call, BURST, BURSTS), _after_pauses(call)) for name, call in calls.items()
    }


def _burst(call: Callable[[], object], calls: int, bursts: int) -> float:
    import torch

    least = float("inf")
    for _ in range(bursts):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, (time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return 1e6 * least


def _after_pauses(call: Callable[[], object]) -> float:
    import torch

    taken = []
    for _ in range(PAUSES):
        torch.cuda.synchronize()
        time.sleep(PAUSE_SECONDS)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return 1e6 * sorted(taken)[len(taken) // 2]


def measure_in_process(source: Path) -> Times:
    """Time the flashdsa of the folder `source` in a process of its own."""
    paths = [str(source), str(Path(__file__).parents[1])]
    command = [sys.executable, "-m", "workbench.host", "--print"]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return {name: tuple(pair) for name, pair in json.loads(done.stdout).items()}


def least(one: Times, other: Times) -> Times:
    """The smaller of both, call by call."""
    return {
        name: (min(pair[0], other[name][0]), min(pair[1], other[name][1]))
        for name, pair in one.items()
    }


def main() -> None:
    """Read the command line, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another tree's src")
    parser.add_argument("--turns", type=int, default=3, help="of each tree (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.print:
        print(json.dumps(measure()))
        return
    trees = {"now": Path(__file__).parents[1] / "src"}
    if options.before:
        trees = {"before": options.before, **trees}
    found: dict[str, Times] = {}
    for _ in range(options.turns):
        for name, source in trees.items():
            times = measure_in_process(source)
            found[name] = least(found[name], times) if name in found else times
    print(f"{'us, back to back / after a pause':34s}" + "".join(f"{n:>18s}" for n in trees))
    for call in found["now"]:
        cells = [f"{found[n][call][0]:8.1f} /{found[n][call][1]:8.1f}" for n in trees]
        print(f"{call:34s}" + "".join(cells))
    if options.out:
        options.out.write_text(json.dumps({"schema": "flashdsa-host/1", "us": found}, indent=1))


if __name__ == "__main__":
    main()
