"""Break kernels' synchronisation, one instruction at a time; is it noticed?

    python tools/mutate_kernels.py [NAME ...] [--jobs N]

Writes benchmarks/results/ptxemu/mutation-NAME.json of each kernel in KERNELS, or of those named,
and prints the tables. All of them take three quarters of an hour of one core. Survivors that you
have understood to be harmless go into equivalent/NAME.txt there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxemu.mutate import Equivalents, Replay, Report, Result, mutate, mutations_of
from ptxemu.saved_launch import load_launch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/ptxemu"


@dataclass(frozen=True)
class Launches:
    """Which launches of a kernel are repeated with each mutant.

    Attributes:
        arch: of the kernel. script: launches it, on what calls itself a GPU.
        entry: the kernel's name begins so.
        arguments: of the script, for each launch: what one does not need, another one may.
    """

    arch: str
    script: str
    entry: str
    arguments: tuple[tuple[str, ...], ...]

    def replay(self, number: int, folder: Path) -> Replay:
        """The launch of that number, to be repeated; `folder` is to keep it."""
        command = ["-m", "ptxemu", "exec", "--arch", self.arch, "--quiet", "--no-check"]
        command += ["--save", str(folder), self.script, *self.arguments[number]]
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (path,) = folder.glob(f"{self.entry}*.launch")
        return Replay(load_launch(path))


_BACKWARD = ("--index-stages", "4", "--topk")
_INDEXER = ("--fused", "--topk", "512", "--stages", "8", "--lengths")
KERNELS = {
    "mla-bwd-sm_100a": Launches(
        "sm_100a",
        "tools/launch_sm100_backward.py",
        "backward_kernel",
        ((*_BACKWARD, "96"), (*_BACKWARD, "192")),  # the second goes round the ring of indices
    ),
    "mla-fwd-sm_90a": Launches(
        "sm_90a",
        "tools/launch_sm90_forward.py",
        "forward_kernel",
        (("--queries", "3", "--topk", "128"),),
    ),
    "mla-fwd-sm_100a": Launches(
        "sm_100a",
        "tools/launch_sm100_forward.py",
        "forward_kernel",
        (("--topk", "448"),),  # seven tiles: every ring goes round
    ),
    "mla-bwd-scores-sm_90a": Launches(
        "sm_90a",
        "tools/launch_sm90_backward.py",
        "scores_kernel",
        (("--topk", "100", "--groups", "2"),),  # two tiles, and a second item in the same stages
        limit=40,
    ),
    "indexer-sm_100a": Launches(
        "sm_100a",
        "tools/launch_sm100_indexer.py",
        "indexer_kernel",
        ((*_INDEXER, "1300", "900"), (*_INDEXER, "1500", "--cluster-size", "2")),
    ),
}
"""By the name that their results have."""


def path_of_score(name: str) -> Path:
    """The results of a kernel."""
    return RESULTS / f"mutation-{name}.json"


def argued(name: str) -> Equivalents:
    """Mutants that are harmless, with the reason of each."""
    path = RESULTS / "equivalent" / f"{name}.txt"
    return Equivalents.parse(path.read_text() if path.exists() else "")


def say(done: int, total: int, result: Result) -> None:
    """One more mutant."""
    mutation = result.mutation
    print(f"{done}/{total} {mutation.site.name} {mutation.name}: {result.verdict}", flush=True)


def write(name: str, report: Report) -> None:
    """The report as the other files of mutation results have it, with paths in the repository."""
    launches = KERNELS[name]
    document: dict[str, Any] = {
        "launch": f"{launches.script} " + "; ".join(map(" ".join, launches.arguments)),
        "equivalent": f"equivalent/{name}.txt",
        **report.to_json_dict(),
    }
    for mutant in document["mutants"]:
        if mutant["source_file"] is not None:
            mutant["source_file"] = os.path.relpath(mutant["source_file"], ROOT)
        mutant["message"] = mutant["message"].replace(f"{ROOT}/", "")
    path_of_score(name).write_text(json.dumps(document, indent=2) + "\n")


def try_all(name: str, jobs: int) -> bool:
    """Every mutant of a kernel; whether all were caught or explained."""
    started = time.monotonic()
    launches = KERNELS[name]
    replays = []
    for number in range(len(launches.arguments)):
        with tempfile.TemporaryDirectory() as folder:
            replays.append(launches.replay(number, Path(folder)))
    first, *others = replays
    strangers = argued(name).strangers(mutations_of(first.module.syntax.functions[first.kernel]))
    for stranger in strangers:
        print(f"equivalent/{name}.txt: there is no mutant {stranger!r}")
    baseline, results = mutate(
        first,
        also=others,
        jobs=jobs,
        notes=True,
        equivalents=argued(name),
        on_result=say,
    )
    report = Report(first.kernel, baseline, results)
    write(name, report)
    print("\n".join(report.lines()))
    print(f"{time.monotonic() - started:.0f} s; wrote {path_of_score(name).relative_to(ROOT)}")
    return not (report.survivors or strangers)


def main() -> int:
    """1 if a mutant survived, or if an argument is about none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in KERNELS]
    if unknown:
        parser.error(f"no {', '.join(unknown)}; expected some of {', '.join(KERNELS)}")
    good = [try_all(name, options.jobs) for name in options.names or KERNELS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
