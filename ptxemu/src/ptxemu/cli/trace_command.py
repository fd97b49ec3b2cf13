"""`ptxemu trace`: a timeline for Perfetto, memory maps, and counts, of a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from ptxemu.cli.help_text import HelpFormatter
from ptxemu.cli.kernel_names import demangled, file_name
from ptxemu.cli.output_paths import output_folder, write_file
from ptxemu.cli.target import add_target_options, resolved, run_target
from ptxemu.cli.terminal import write_err, write_out
from ptxemu.errors import PtxEmuError
from ptxemu.events import FanOut, Observer
from ptxemu.launch_setup import LaunchSetup
from ptxemu.trace import Counters, MemoryMap, Recorder, text, to_chrome
from ptxemu.trace.classes import parse_roles
from ptxemu.trace.clock import CLOCKS
from ptxemu.trace.memory_picture import draw

_HELP = """\
Run a kernel and write down what happened. For each launch, in --out:

  N-KERNEL.trace.json   timeline for https://ui.perfetto.dev ("Open trace file"): a process for \
each CTA; a row for each warp (when it runs, what it waits for: which barrier, which phase) and \
for each asynchronous unit (TMA loads, bulk stores, tensor core) with every operation up to its \
completion; arrows from the signal to the wait that it ended
  N-KERNEL.memory.svg   shared memory and TMEM over time: who wrote which bytes, when they were \
read, when they are free again
  N-KERNEL.counts.json  for each warp role instructions by class, bytes by path, bank conflicts of \
shared accesses: what is printed too, with the longest waits

Time is logical, not a prediction of speed: an instruction takes a tick, a copy or product a tick
for 256 bytes of shared memory. --time parallel shows warps and units side by side as far as their
dependencies allow, operations from when nothing holds them up. --time schedule shows the order in
which this run happened to execute (--seed and --async choose it), operations from their issue.

examples:
  ptxemu trace copy.ptx --block 256 \\
      --arg f32[1024]=random --arg f32[1024]=zeros
  ptxemu trace --role load=5 --role mma=4 --role epilogue=0-3 \\
      --exec dense_gemm_persistent.py --mnkl 256,256,256,1"""


def add_parser(commands: Any, name: str) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        name,
        help="write a timeline, memory maps and counts of a run",
        description=_HELP,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # a program may have options that begin like these
    )
    add_target_options(parser)
    parser.add_argument(
        "--cta",
        type=int,
        action="append",
        metavar="N",
        help="CTA numbers in the memory picture (default: the first two)",
    )
    parser.add_argument(
        "--out", type=output_folder, default="ptxemu-trace", help="folder (default ptxemu-trace)"
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=WARPS",
        help="name warps: mma=4, softmax=0-3,8-11 (default: guessed from what they start)",
    )
    parser.add_argument(
        "--time", choices=CLOCKS, default="parallel", help="logical clock (default parallel)"
    )
    parser.add_argument("--json", action="store_true", help="counts as JSON on stdout")
    parser.set_defaults(carry_out=carry_out)


@dataclass(frozen=True, slots=True)
class _Launch:
    """The listeners of one launch."""

    kernel: str
    recorder: Recorder
    counters: Counters
    memory_map: MemoryMap


def carry_out(options: argparse.Namespace) -> int:
    """Run, write the files, print the counts; 1 if a kernel failed."""
    given = parse_roles(options.role)
    launches: list[_Launch] = []

    def on_launch(setup: LaunchSetup) -> Observer:
        recorder = Recorder(time=options.time)
        launch = _Launch(setup.kernel, recorder, Counters(), MemoryMap(recorder))
        launches.append(launch)
        return FanOut(launch.recorder, launch.counters, launch.memory_map)

    with resolved(options):
        failures = run_target(options, on_launch, check=False)
    if not launches and not failures:
        raise PtxEmuError("no launch was chosen: see --kernel and --launch")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = []
    for number, launch in enumerate(launches):
        facts.append(_write(options, number, launch, given))
    if options.json:
        report = {"launches": facts, "failures": failures}
        write_out(json.dumps(report, indent=2) + "\n")
    for failure in failures:
        write_err(f"failed: {failure}\n")
    return 1 if failures else 0


def _write(
    options: argparse.Namespace, number: int, launch: _Launch, given: dict[int, str]
) -> dict[str, Any]:
    """The files of one launch; returns what --json shows."""
    launch.recorder.finish()
    named = given or launch.counters.guessed_roles()
    counts = launch.counters.by_role(named)
    stem = f"{number}-{file_name(launch.kernel)}"
    trace = options.out / f"{stem}.trace.json"
    write_file(trace, json.dumps(to_chrome(launch.recorder, named)))
    facts = {"kernel": launch.kernel, "roles": [one.to_json_dict() for one in counts]}
    files = [trace, options.out / f"{stem}.counts.json"]
    write_file(files[1], json.dumps(facts, indent=2) + "\n")
    if launch.memory_map.touches:
        files.append(options.out / f"{stem}.memory.svg")
        write_file(files[2], _picture(options, launch, named))
    if not options.json:
        parts = [
            f"kernel {demangled(launch.kernel)}",
            "",
            text.counters_text(counts),
            "",
            text.waits_text(launch.recorder, named),
            "",
            *(f"wrote {file}" for file in files),
        ]
        if launch.recorder.truncated or launch.memory_map.truncated:
            parts.append("note: the run is longer than what is recorded; the rest is left out")
        write_out("\n".join(parts) + "\n\n")
    return {**facts, "files": [str(file) for file in files]}


def _picture(options: argparse.Namespace, launch: _Launch, named: dict[int, str]) -> str:
    touched = sorted(launch.memory_map.touches, key=lambda memory: (memory[1], memory[0].value))
    chosen = [memory for memory in touched if memory[1] in options.cta] if options.cta else None
    title = f"{file_name(launch.kernel)}: memory over logical time"
    return draw(launch.memory_map, roles=named, memories=chosen, title=title)
