"""Break kernels' synchronisation, one instruction at a time; is it noticed?

    python -m workbench.mutation.kernels [NAME ...] [--jobs N] [--again]
    python -m workbench.mutation.kernels --save DIR [NAME ...]            # where CuTe DSL is
    python -m workbench.mutation.kernels --launches DIR [--out DIR] ...   # where there are many cores
    python -m workbench.mutation.kernels --stale [NAME ...]               # results of other PTX

Writes workbench/results/mutation/mutation-NAME.json of each kernel in
mutation_launches.KERNELS, or of those named (PEERS, too), and prints the tables. Survivors that
you have understood to be
harmless go into equivalent/NAME.txt there. A mutant that is done is written down at once, to
mutation-NAME.tried, and is not tried again when a run that was stopped is repeated. With --again
only what the results say survived or was not reached is tried; if launches have been added, all but
what was caught.

Launches saved by --save need ptxemu and NumPy alone, and no CuTe DSL.

Results name the PTX that they are of (`ptx`). --stale compiles the kernels (a first launch of each
is saved, or --launches has it), and lists those whose PTX is another one today.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptxemu.mutate import (
    Equivalents,
    Mutation,
    Replay,
    Report,
    Result,
    fingerprint,
    mutate,
    mutations_of,
)
from ptxemu.mutate.report import facts_of
from ptxemu.mutate.runner import (
    CAUGHT,
    EQUIVALENT,
    NOT_REACHED,
    NOTED,
    POLICIES,
    REDUNDANT,
    SURVIVED,
)
from ptxemu.saved_launch import load_launch
from ptxemu.sched.policy import Policy
from workbench.mutation.launches import ALL, KERNELS, path_of_launch, save
from workbench.mutation.scripts import ROOT
from workbench.mutation.tables import read_table, write_table

RESULTS = ROOT / "workbench/results/mutation"
SCHEDULES = (
    *POLICIES,
    Policy(asynchronous="slow", warps="random", seed=0, timeouts=0.5),
    Policy(asynchronous="late", warps="random", seed=1, timeouts=1.0),
)
"""In the last two warps have to wait and give up again and again, and reach what comes then."""
APART = (*POLICIES[:1], *(Policy(seed=seed, lanes_apart=0.05) for seed in range(6)))
"""For a kernel whose order is that of a warp's lanes."""
_BEFORE_THE_TREE = re.compile(
    r"/\S*/(?:(?=src/flashdsa/|examples/python/)|(?:site-packages|peers)/)"
)
"""In paths of the machine that saved the launches: ours, and other packages'."""
_SHOWN_MESSAGE = 80

Known = Mapping[tuple[str, str], Result]
"""By names of site and mutation."""


def argued(name: str) -> Equivalents:
    """Mutants that are harmless, with the reason of each."""
    path = RESULTS / "equivalent" / f"{name}.txt"
    return Equivalents.parse(path.read_text() if path.exists() else "")


class Campaign:
    """The mutants of one kernel, and what is known of them already.

    Attributes:
        name: of ALL. mutations: all, in program order. results: the file of the results.
        ptx: the kernel's fingerprint.
    """

    def __init__(self, name: str, launches: Path, out: Path) -> None:
        """Read its launches from a folder; results go to the folder `out`."""
        self.name, self.results = name, out / f"mutation-{name}.json"
        self._tried = self.results.with_suffix(".tried")
        numbers, scratch = range(len(ALL[name].origins)), ALL[name].scratch
        paths = [path_of_launch(launches, name, number) for number in numbers]
        replays = [Replay(load_launch(path), scratch, ALL[name].ignored) for path in paths]
        self._first, *self._others = replays
        function = self._first.module.syntax.functions[self._first.kernel]
        self._lanes_apart = ALL[name].lanes_apart
        self.mutations = mutations_of(function, warp_syncs=self._lanes_apart)
        self.ptx = fingerprint(function)
        self._equivalents = argued(name)

    def try_all(self, jobs: int, again: bool) -> bool:
        """Every mutant; whether all were caught or explained.

        Args:
            again: of those in the results only what was not caught is tried.
        """
        started = time.monotonic()
        strangers = self._equivalents.strangers(self.mutations)
        for stranger in strangers:
            print(f"equivalent/{self.name}.txt: there is no mutant {stranger!r}")
        known = {**(self._of_the_results() if again else {}), **self._of_a_stopped_run()}
        with self._tried.open("a") as tried:

            def on_result(done: int, total: int, result: Result) -> None:
                mutation = result.mutation
                what = f"{mutation.site.name} {mutation.name}: {result.verdict}"
                print(f"{self.name} {done}/{total} {what}, {result.seconds:.0f} s", flush=True)
                tried.write(json.dumps(facts_of(result)) + "\n")
                tried.flush()

            baseline, results = mutate(
                self._first,
                also=self._others,
                jobs=jobs,
                policies=APART if self._lanes_apart else SCHEDULES,
                notes=True,
                equivalents=self._equivalents,
                known=known,
                on_result=on_result,
            )
        report = Report(self._first.kernel, baseline, results)
        self._write(report)
        self._tried.unlink()
        print("\n".join(report.lines()))
        print(f"{time.monotonic() - started:.0f} s; wrote {self.results}", flush=True)
        return not (report.survivors or strangers)

    def _write(self, report: Report) -> None:
        """The report as the other files of mutation results have it."""
        document: dict[str, Any] = {
            "launch": ALL[self.name].command,
            "equivalent": f"equivalent/{self.name}.txt",
            "ptx": self.ptx,
            **report.to_json_dict(),
        }
        document["mutants"] = [short(fact) for fact in document["mutants"]]
        write_table(self.results, document)

    def _of_the_results(self) -> Known:
        """What they say of mutants that are not to be tried again.

        Raises:
            SystemExit: they are of another kernel, or of launches that are no more.
        """
        document = read_table(self.results)
        command = ALL[self.name].command
        if not command.startswith(document["launch"]):
            sys.exit(f"{self.name}: other launches than those of the results: {document['launch']}")
        if document.get("ptx") != self.ptx:
            sys.exit(f"{self.name}: the results are of another kernel")
        stand = {CAUGHT}
        if command == document["launch"]:
            stand |= {REDUNDANT, EQUIVALENT}
        known = self._known(document["mutants"])
        return {
            names: self._argued_anew(result)
            for names, result in known.items()
            if result.verdict in stand or self._is_survivor_with_argument(result)
        }

    def _of_a_stopped_run(self) -> Known:
        if not self._tried.exists():
            return {}
        tried = self._known([json.loads(line) for line in self._tried.read_text().splitlines()])
        return {names: self._argued_anew(result) for names, result in tried.items()}

    def _known(self, facts: Sequence[dict[str, Any]]) -> Known:
        by_names = {(m.site.name, m.name): m for m in self.mutations}
        found = {}
        for fact in facts:
            names = f"{fact['category']}#{fact['number']}", fact["mutation"]
            mutation = by_names.get(names)
            if mutation is None or mutation.site.instruction.opcode != opcode_of(fact):
                sys.exit(f"{self.name}: the results are of another kernel: {' '.join(names)}")
            found[names] = result_of(mutation, fact)
        return found

    def _is_survivor_with_argument(self, result: Result) -> bool:
        is_survivor = result.verdict in (SURVIVED, NOTED)
        return is_survivor and self._equivalents.reason(result.mutation) is not None

    def _argued_anew(self, result: Result) -> Result:
        """With the argument that the file has now."""
        if result.verdict in (CAUGHT, REDUNDANT, NOT_REACHED):
            return result
        reason = self._equivalents.reason(result.mutation)
        if reason is None and result.verdict != EQUIVALENT:
            return result
        verdict = SURVIVED if reason is None else EQUIVALENT
        return replace(result, verdict=verdict, how=reason or "")


def is_stale(name: str, launches: Path) -> bool:
    """Whether the results are of other PTX than a kernel's first launch in a folder; says so."""
    setup = load_launch(path_of_launch(launches, name, 0))
    now = fingerprint(setup.module.syntax.functions[setup.kernel])
    results = RESULTS / f"mutation-{name}.json"
    tried = read_table(results).get("ptx") if results.exists() else None
    verdict = "as it is" if tried == now else f"stale: of {tried}, and it is {now}"
    print(f"{name}: {verdict}", flush=True)
    return tried != now


def short(fact: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a mutant: paths in the tree, opcodes, of a message what it is about."""
    kept = {key: value for key, value in fact.items() if value not in (None, "")}
    kept.pop("seconds", None)
    kept["instruction"] = opcode_of(fact)
    if "source_file" in kept:
        kept["source_file"] = _BEFORE_THE_TREE.sub("", kept["source_file"])
    if "message" in kept:
        kept["message"] = kept["message"].split(": kernel ")[0][:_SHOWN_MESSAGE]
    return kept


def opcode_of(fact: Mapping[str, Any]) -> str:
    """Of the mutant's instruction."""
    return str(fact["instruction"]).split()[0].rstrip(";")


def result_of(mutation: Mutation, fact: Mapping[str, Any]) -> Result:
    """A result as it was written down."""
    policy = None
    if fact.get("policy") is not None:
        asynchronous, warps, seed = fact["policy"].split("/")
        policy = Policy(asynchronous=asynchronous, warps=warps, seed=int(seed))
    how, message = fact.get("how", ""), fact.get("message", "")
    seconds, launch = fact.get("seconds", 0.0), fact.get("launch")
    return Result(mutation, fact["verdict"], how, message, policy, seconds, launch)


def main() -> int:
    """1 if a mutant survived, if an argument is about none, or if results are stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--again", action="store_true", help="only what was not caught")
    parser.add_argument(
        "--stale", action="store_true", help="list results of other PTX, try nothing"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the launches, try nothing")
    parser.add_argument("--launches", type=Path, metavar="DIR", help="they have been saved there")
    parser.add_argument("--out", type=Path, metavar="DIR", default=RESULTS, help="for the results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"no {', '.join(unknown)}; expected some of {', '.join(ALL)}")
    names = options.names or list(KERNELS)
    if options.save is not None:
        save(names, options.save)
        return 0
    good = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if options.launches is None:
                save([name], Path(folder), first=options.stale)
            launches = options.launches or Path(folder)
            if options.stale:
                good &= not is_stale(name, launches)
                continue
            campaign = Campaign(name, launches, options.out)
        good &= campaign.try_all(options.jobs, options.again)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
