"""Host microseconds of a call of every public operation, on a GPU.

    python -m workbench.host --out X.json                  # this tree
    python -m workbench.host --before DIR --out X.json     # beside another tree's src, by turns
    python -m workbench.host --pretended --only bwd        # no GPU; calls by a part of a name

A call counts without the GPU's part: back to back while the queue is short, and after a pause of
50 ms, when caches are cold. --before runs both trees in processes of their own, by turns, and
the least of all turns counts. The row "x.add_(1)" is torch's own smallest call.

--pretended measures on tensors of the CPU, with functions that launch nothing: what is ours, and
torch's operations without launches. In place of a pause 256 MB are written before a call.
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
from statistics import geometric_mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.public_calls import Sizes

BURST, BURSTS, PAUSES = 20, 15, 12
PAUSE_SECONDS = 0.05
JUNK_BYTES = 1 << 28
"""Bytes that are written so that a call's code and data are in no cache."""
Times = dict[str, tuple[float, float]]
"""Call -> microseconds back to back, and after a pause."""
Calls = dict[str, Callable[[], object]]


def measure(only: str) -> Times:
    """Time the calls whose names have `only` in them, on a GPU, in this process."""
    import torch

    from workbench.public_calls import PREFILL

    def pause() -> None:
        torch.cuda.synchronize()
        time.sleep(PAUSE_SECONDS)

    return _measure(calls_on("cuda", PREFILL), only, torch.cuda.synchronize, pause)


def measure_pretended(only: str) -> Times:
    """The same on the CPU, where a GPU is pretended."""
    import torch

    from workbench.pretended_gpu import pretended_gpu
    from workbench.public_calls import PRETENDED

    torch.set_num_threads(1)
    junk = torch.zeros(JUNK_BYTES, dtype=torch.uint8)
    with pretended_gpu():
        return _measure(calls_on("cpu", PRETENDED), only, lambda: None, lambda: junk.add_(1))


def calls_on(device: str, sizes: Sizes) -> Calls:
    """Every public operation as a function without arguments, and attention with gradients."""
    import torch

    import flashdsa
    from workbench.public_calls import public_calls

    one = torch.zeros(1, device=device)
    calls: Calls = {"x.add_(1)": lambda: one.add_(1)}
    known = public_calls(device, sizes)
    for name, call in known.items():
        public, _, operation = name.partition(", ")
        if public == "bind":
            operands = tuple(call.arguments.values())
            calls[name] = partial(flashdsa.bind(operation, operands), operands)
        else:
            calls[name] = partial(call.function, **call.arguments)
    backward = known["mla_bwd"].arguments
    rows = {k: x for k, x in backward.items() if k not in ("topk_length", "attn_sink")}
    calls["mla_bwd, rows"] = partial(flashdsa.mla_bwd, **rows)
    calls["mla_bwd, rows, deterministic"] = partial(flashdsa.mla_bwd, **rows, deterministic=True)
    trained = known["sparse_mla"].arguments
    leaves = {name: trained[name].clone().requires_grad_() for name in ("q", "kv", "attn_sink")}
    gradient = torch.ones_like(backward["O"])

    def train(**changed: bool) -> object:
        out = flashdsa.sparse_mla(**{**trained, **leaves, **changed})
        return torch.autograd.grad(out, list(leaves.values()), gradient)

    calls["sparse_mla, gradients"] = train
    calls["sparse_mla, gradients, deterministic"] = partial(train, deterministic=True)
    return calls


def _measure(
    calls: Calls, only: str, wait: Callable[[], object], pause: Callable[[], object]
) -> Times:
    return {
        name: (_burst(call, BURST, BURSTS, wait), _after_pauses(call, pause))
        for name, call in calls.items()
        if only in name or name == "x.add_(1)"
    }


def _burst(
    call: Callable[[], object], calls: int, bursts: int, wait: Callable[[], object]
) -> float:
    least = float("inf")
    for _ in range(bursts):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, (time.perf_counter() - began) / calls)
    wait()
    return 1e6 * least


def _after_pauses(call: Callable[[], object], pause: Callable[[], object]) -> float:
    taken = []
    for _ in range(PAUSES):
        pause()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1e6 * sorted(taken)[len(taken) // 2]


def measure_in_process(source: Path, options: list[str]) -> Times:
    """Time the flashdsa of the folder `source` in a process of its own, with these options."""
    paths = [str(source), str(Path(__file__).parents[1])]
    command = [sys.executable, "-m", "workbench.host", "--print", *options]
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
    parser.add_argument("--only", default="", help="calls whose names have this in them")
    parser.add_argument("--pretended", action="store_true", help="without a GPU")
    options = parser.parse_args()
    if options.print:
        times = measure_pretended if options.pretended else measure
        print(json.dumps(times(options.only)))
        return
    passed = ["--only", options.only, *["--pretended"] * options.pretended]
    trees = {"now": Path(__file__).parents[1] / "src"}
    if options.before:
        trees = {"before": options.before, **trees}
    found: dict[str, Times] = {}
    for _ in range(options.turns):
        for name, source in trees.items():
            times = measure_in_process(source, passed)
            found[name] = least(found[name], times) if name in found else times
    print(f"{'us, back to back / after a pause':38s}" + "".join(f"{n:>18s}" for n in trees))
    for call in found["now"]:
        cells = [f"{found[n][call][0]:8.1f} /{found[n][call][1]:8.1f}" for n in trees]
        print(f"{call:38s}" + "".join(cells))
    if options.before:
        names = list(found["now"])[1:]
        means = [
            geometric_mean(found["now"][n][way] / found["before"][n][way] for n in names)
            for way in (0, 1)
        ]
        print(f"geometric mean, now over before: {means[0]:.3f} / {means[1]:.3f}")
    if options.out:
        options.out.write_text(json.dumps({"schema": "flashdsa-host/1", "us": found}, indent=1))


if __name__ == "__main__":
    main()
