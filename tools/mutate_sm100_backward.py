"""Break the Blackwell backward's synchronisation, one instruction at a time; is it noticed?

Writes benchmarks/results/ptxemu/mutation-mla-bwd-sm_100a.json and prints the table. Takes about
40 minutes of one core, and uses all. Survivors that you have understood to be harmless go into the
file ARGUED.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ptxemu.mutate import Equivalents, Replay, Report, Result, mutate, mutations_of
from ptxemu.saved_launch import load_launch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/ptxemu"
SCORE = RESULTS / "mutation-mla-bwd-sm_100a.json"
ARGUED = RESULTS / "equivalent/mla-bwd-sm_100a.txt"
SCRIPT = Path("tools/launch_sm100_backward.py")
PLAN = ["--index-stages", "4"]
LAUNCHES = (["--topk", "96", *PLAN], ["--topk", "192", *PLAN])
"""Arguments of the script: the second launch goes round the ring of row numbers too, and is for
what the first does not need."""


def replay(arguments: list[str]) -> Replay:
    """The backward's launch by the script, to be repeated."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ptxemu", "exec", "--arch", "sm_100a", "--quiet"]
        command += ["--save", folder, str(SCRIPT), *arguments]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("backward_kernel*.launch")
        return Replay(load_launch(path))


def say(done: int, total: int, result: Result) -> None:
    """One more mutant."""
    mutation = result.mutation
    print(f"{done}/{total} {mutation.site.name} {mutation.name}: {result.verdict}", flush=True)


def write(report: Report) -> None:
    """The report as the other files of mutation results have it, with paths in the repository."""
    document = {
        "launch": f"{SCRIPT} " + "; ".join(" ".join(launch) for launch in LAUNCHES),
        "equivalent": str(ARGUED.relative_to(RESULTS)),
        **report.to_json_dict(),
    }
    for mutant in document["mutants"]:
        if mutant["source_file"] is not None:
            mutant["source_file"] = os.path.relpath(mutant["source_file"], ROOT)
        mutant["message"] = mutant["message"].replace(f"{ROOT}/", "")
    SCORE.write_text(json.dumps(document, indent=2) + "\n")


def main() -> int:
    """Try all mutants; 1 if one survived, or if an argument is about none of them."""
    started = time.monotonic()
    first, *others = (replay(launch) for launch in LAUNCHES)
    argued = Equivalents.parse(ARGUED.read_text())
    strangers = argued.strangers(mutations_of(first.module.syntax.functions[first.kernel]))
    for stranger in strangers:
        print(f"{ARGUED.relative_to(ROOT)}: there is no mutant {stranger!r}")
    baseline, results = mutate(
        first,
        also=others,
        jobs=os.cpu_count() or 1,
        notes=True,
        equivalents=argued,
        on_result=say,
    )
    report = Report(first.kernel, baseline, results)
    write(report)
    print("\n".join(report.lines()))
    print(f"{time.monotonic() - started:.0f} s; wrote {SCORE.relative_to(ROOT)}")
    return 1 if report.survivors or strangers else 0


if __name__ == "__main__":
    sys.exit(main())
