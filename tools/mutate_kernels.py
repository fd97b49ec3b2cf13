"""Break kernels' synchronisation, one instruction at a time; is it noticed?

    python tools/mutate_kernels.py [NAME ...] [--jobs N] [--again]

Writes benchmarks/results/ptxemu/mutation-NAME.json of each kernel in KERNELS, or of those named,
and prints the tables. All of them take half an hour of one core. Survivors that you have understood
to be harmless go into equivalent/NAME.txt there. With --again the mutants that those results say
were caught are not tried again: for another argument, or another launch behind those that were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxemu.mutate import Equivalents, Mutation, Replay, Report, Result, mutate, mutations_of
from ptxemu.mutate.runner import CAUGHT
from ptxemu.saved_launch import load_launch
from ptxemu.sched.policy import Policy

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

    @property
    def command(self) -> str:
        """All launches, as the results name them."""
        return f"{self.script} " + "; ".join(map(" ".join, self.arguments))

    def replay(self, number: int, folder: Path) -> Replay:
        """The launch of that number, to be repeated; `folder` is to keep it."""
        command = ["-m", "ptxemu", "exec", "--arch", self.arch, "--quiet", "--no-check"]
        command += ["--save", str(folder), self.script, *self.arguments[number]]
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (path,) = folder.glob(f"{self.entry}*.launch")
        return Replay(load_launch(path))


_BACKWARD = ("--index-stages", "4", "--topk")
_INDEXER = ("--fused", "--topk", "512", "--stages", "8", "--list-capacity", "2048", "--lengths")
_PAIR = ("--cluster-size", "2")
_SHORT_ROWS = ("600", "70", "560", "513", "10", "520", "640")
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
    ),
    "indexer-sm_100a": Launches(
        "sm_100a",
        "tools/launch_sm100_indexer.py",
        "indexer_kernel",
        (
            (*_INDEXER, "1300", "900"),
            (*_INDEXER, "1500", *_PAIR),
            (*_INDEXER, *_SHORT_ROWS, "--ctas", "2"),  # CTAs with several tiles, unevenly much work
            (*_INDEXER, "2700", "600"),  # compacts its list
            (*_INDEXER, "1500", *_PAIR, "--distinct", "4"),  # candidates of one key
            (*_INDEXER, "1300", *_PAIR, "--distinct", "1"),  # all scores are equal
            (*_INDEXER, "2200", "--distinct", "1"),  # nothing passes the floor any more
            (*_INDEXER, "560", "530", "--rows-of-one", "511"),  # too many to be put in order
            (*_INDEXER, "4000"),  # fills the list again without compacting it
        ),
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
        "launch": launches.command,
        "equivalent": f"equivalent/{name}.txt",
        **report.to_json_dict(),
    }
    for mutant in document["mutants"]:
        if mutant["source_file"] is not None:
            mutant["source_file"] = os.path.relpath(mutant["source_file"], ROOT)
        mutant["message"] = mutant["message"].replace(f"{ROOT}/", "")
    path_of_score(name).write_text(json.dumps(document, indent=2) + "\n")


def caught_before(name: str, mutations: Sequence[Mutation]) -> dict[tuple[str, str], Result]:
    """What the written results say was caught, by names of site and mutation.

    Raises:
        SystemExit: they are of another kernel, or of launches that are no more.
    """
    document = json.loads(path_of_score(name).read_text())
    if not KERNELS[name].command.startswith(document["launch"]):
        sys.exit(f"{name}: other launches than those of the results: {document['launch']}")
    mutants = document["mutants"]
    facts = [(m["category"], m["number"], m["mutation"], m["instruction"]) for m in mutants]
    sites = [(m, m.site) for m in mutations]
    if facts != [(s.category, s.number, m.name, s.instruction.text) for m, s in sites]:
        sys.exit(f"{name}: the results are of another kernel")
    found = {}
    for mutation, fact in zip(mutations, mutants, strict=True):
        if fact["verdict"] == CAUGHT:
            asynchronous, warps, seed = fact["policy"].split("/")
            policy = Policy(asynchronous=asynchronous, warps=warps, seed=int(seed))
            found[mutation.site.name, mutation.name] = Result(
                mutation,
                CAUGHT,
                fact["how"],
                fact["message"],
                policy,
                fact["seconds"],
                fact["launch"],
            )
    return found


def try_all(name: str, jobs: int, again: bool) -> bool:
    """Every mutant of a kernel; whether all were caught or explained.

    Args:
        again: those that were caught before are not tried.
    """
    started = time.monotonic()
    launches = KERNELS[name]
    replays = []
    for number in range(len(launches.arguments)):
        with tempfile.TemporaryDirectory() as folder:
            replays.append(launches.replay(number, Path(folder)))
    first, *others = replays
    mutations = mutations_of(first.module.syntax.functions[first.kernel])
    strangers = argued(name).strangers(mutations)
    for stranger in strangers:
        print(f"equivalent/{name}.txt: there is no mutant {stranger!r}")
    baseline, results = mutate(
        first,
        also=others,
        jobs=jobs,
        notes=True,
        equivalents=argued(name),
        known=caught_before(name, mutations) if again else None,
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
    parser.add_argument("--again", action="store_true", help="only what was not caught")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in KERNELS]
    if unknown:
        parser.error(f"no {', '.join(unknown)}; expected some of {', '.join(KERNELS)}")
    good = [try_all(name, options.jobs, options.again) for name in options.names or KERNELS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
