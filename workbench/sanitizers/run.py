"""NVIDIA's compute-sanitizer over small calls of every Hopper kernel, each in a process of its own.

On a machine with the GPU, with the kernels' object built (`make kernels`):

    pip install --constraint constraints.txt '.[sanitize]'      # a sanitizer new enough
    python -m workbench.sanitizers.run --out sanitizers.json
    python -m workbench.sanitizers.run --only compaction --tool racecheck --timeout 300

"No hazards" means something only of a tool that finds some. So that it can be asked, mutants of the
fused kernel, the forward and the backward, each with one synchronisation left out, are compiled
where CuTe DSL is (no GPU there), and racecheck must report every one:

    python -m workbench.sanitizers.run --build-controls controls
    python -m workbench.sanitizers.run --controls controls                # and all the rest, on the GPU

A sanitizer slows kernels down a hundredfold. A case that does not end in
--timeout seconds is said to be so and is no success. The exit code is 0 if every case ended without
a report and with the CPU backend's result, and every mutant was reported.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.sanitizers.cases import CASES
from workbench.sanitizers.controls import CONTROLS, object_of, verdict_of
from workbench.sanitizers.results import Result, aligned, judge, table

ROOT = Path(__file__).parents[2]
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
"""The slowest first, so that the last to end is a short one."""
SCHEMA = "flashdsa-sanitizers/1"
PACKAGE = "nvidia-cuda-sanitizer-api"
TRUSTED_RACECHECK = (2026, 1)
OLD_RACECHECK = """\
WARNING: racecheck {version} reports hazards that are none in these kernels, and may miss some.
Its release notes: 2025.4 "Fixed multiple false-positives in racecheck involving mbarrier usage";
2026.1 "Fixed false positives and false negatives in racecheck involving indirect barrier
synchronization dependencies across clusters"; 2026.3 "Fixed potential false positives in racecheck
when using mbarrier complete-tx operations". A newer one: pip install --constraint constraints.txt
'.[sanitize]'"""
_ports = itertools.count(49152, 16)
"""By which a sanitizer talks to its process; it tries up to ten."""


@dataclass(frozen=True, order=True)
class Sanitizer:
    """A compute-sanitizer and its version, as (2026, 4, 0, 0); newer ones are greater."""

    version: tuple[int, ...]
    path: str

    @property
    def name(self) -> str:
        """Its version as NVIDIA writes it."""
        return ".".join(map(str, self.version))


def version_in(text: str) -> tuple[int, ...]:
    """From `compute-sanitizer --version`; () if it is not in there."""
    found = re.search(r"^Version (\d+(?:\.\d+)*)", text, re.MULTILINE)
    return tuple(map(int, found.group(1).split("."))) if found else ()


def installed_sanitizers() -> list[str]:
    """Paths of the pip package's program and of the one on PATH, of those that there are."""
    paths = [shutil.which("compute-sanitizer")]
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    paths += [str(file.locate()) for file in files if file.name == "compute-sanitizer"]
    return [path for path in paths if path]


def ask_version(path: str) -> tuple[int, ...]:
    """Of the program at `path`; () if it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:  # not executable, for one
        print(f"{path}: {error}", file=sys.stderr)
        return ()
    return version_in(done.stdout)


def newest(
    paths: Iterable[str], ask: Callable[[str], tuple[int, ...]] = ask_version
) -> Sanitizer | None:
    """The newest of those that tell their version."""
    known = [Sanitizer(ask(path), path) for path in paths]
    return max((one for one in known if one.version), default=None)


def run_case(
    sanitizer: Sanitizer, tool: str, case: str, script: Sequence[str], limit: float
) -> Result:
    """One process, stopped with all of its own after `limit` seconds."""
    command = [sanitizer.path, "--tool", tool, "--print-limit", "5"]
    command += ["--port", str(next(_ports)), sys.executable, *script]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        exit_code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, exit_code = what_is_left(process), None
    return judge(case, tool, output, exit_code, time.perf_counter() - start, limit)


def what_is_left(process: subprocess.Popen[str]) -> str:
    """What a stopped process had written; "" where one of its own lives on and keeps the pipe."""
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        return ""


def environment() -> dict[str, str]:
    """Of a child: it imports this checkout, and each of its tensors is an allocation of its own,
    so that an access behind one is not one to another."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }


def controls_with(text: str) -> list[str]:
    """Names of the mutants that have it in their name, or in what is said of them."""
    return [name for name, one in CONTROLS.items() if text in name or text in one.what]


def build_controls(folder: Path, names: Sequence[str]) -> int:
    """Compile the mutants and ask ptxemu; 1 if it found nothing in one, or something in none."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in names:
        script = [sys.executable, str(ROOT / "workbench/sanitizers/controls.py"), "build", name]
        done = subprocess.run(
            [*script, str(folder)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            check=False,
        )
        found = read_verdict(folder, name) if done.returncode == 0 else None
        control = CONTROLS[name]
        wrong = found is None or bool(found) != (control.is_mutant and not control.unheard)
        failures += wrong
        said = "not built" if found is None else describe(found)
        print(f"{name:12} ptxemu: {said}{'   WRONG' if wrong else ''}", flush=True)
    return 1 if failures else 0


def read_verdict(folder: Path, name: str) -> dict[str, int]:
    """What ptxemu found when the mutant was built: code -> number."""
    found: dict[str, int] = json.loads(verdict_of(folder, name).read_text())["emulator"]
    return found


def describe(found: dict[str, int]) -> str:
    """ptxemu's findings in a few words."""
    return ", ".join(f"{number} {code}" for code, number in found.items()) or "nothing"


def control_is_right(result: Result) -> bool:
    """A mutant must be reported, unless racecheck cannot see what it does; the right kernel must
    not, and must end."""
    if not CONTROLS[result.case].is_mutant or CONTROLS[result.case].unseen:
        return result.clean
    return bool(result.reports or result.warnings)


def in_parallel(jobs: int, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """The tasks' results in their order, each printed when it is there."""

    def say(result: Result) -> Result:
        print(f"  {result.tool:9} {result.case:16} {result.trouble or result.cell}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda task: say(task()), tasks))


def control_table(results: Sequence[Result], folder: Path) -> str:
    """A row a mutant: what is wrong with it, and who reported it."""
    rows = [["left out", "ptxemu", "racecheck"]]
    for result in results:
        verdict = "" if control_is_right(result) else "   WRONG"
        if CONTROLS[result.case].unseen:
            verdict = f", {CONTROLS[result.case].unseen}{verdict}"
        found = describe(read_verdict(folder, result.case))
        rows.append([CONTROLS[result.case].what, found, result.cell + verdict])
    return aligned(rows)


def document(
    sanitizer: Sanitizer, results: Sequence[Result], controls: Sequence[Result], folder: Path | None
) -> dict[str, Any]:
    """What was run where, and all results, for JSON."""
    import torch

    from flashdsa.bench.checkout import find_checkout

    checkout = find_checkout()
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0),
        "cuda_of_torch": torch.version.cuda,
        "sanitizer": {"version": sanitizer.name, "path": sanitizer.path},
        "git": checkout.as_dict() if checkout else None,
        "cases": [asdict(result) for result in results],
        "controls": [
            {
                **asdict(result),
                "what": CONTROLS[result.case].what,
                "ptxemu": read_verdict(folder, result.case),
                "as_demanded": control_is_right(result),
            }
            for result in controls
            if folder
        ],
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="default: all")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="mutants, of whose name or description it is a part, and cases, of whose name: "
        + ", ".join(CASES),
    )
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for a case (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time (%(default)s)")
    parser.add_argument(
        "--sanitizer", metavar="PATH", help=f"default: the newer of {PACKAGE}'s and PATH's"
    )
    parser.add_argument("--out", type=Path, metavar="JSON", help="write all results there too")
    parser.add_argument("--controls", type=Path, metavar="DIR", help="run these mutants too")
    parser.add_argument(
        "--build-controls", type=Path, metavar="DIR", help="make them there, and run nothing"
    )
    options = parser.parse_args(arguments)
    with_controls = options.controls or options.build_controls
    if not any(options.only in name for name in CASES) and not (
        with_controls and controls_with(options.only)
    ):
        parser.error(f"--only: no case has {options.only!r} in its name")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is as it should be."""
    options = parsed(arguments)
    if options.build_controls:
        return build_controls(options.build_controls.resolve(), controls_with(options.only))
    sanitizer = newest([options.sanitizer] if options.sanitizer else installed_sanitizers())
    if sanitizer is None:
        print("no compute-sanitizer: pip install --constraint constraints.txt '.[sanitize]'")
        return 2
    print(f"compute-sanitizer {sanitizer.name}: {sanitizer.path}", flush=True)
    if "racecheck" in options.tool and sanitizer.version < TRUSTED_RACECHECK:
        print(OLD_RACECHECK.format(version=sanitizer.name), flush=True)
    folder = options.controls.resolve() if options.controls else None
    chosen = controls_with(options.only) if folder else []
    missing = [n for n in chosen if folder and not object_of(folder, n).exists()]
    if missing:
        print(f"{folder}: lacks {', '.join(missing)}; make them with --build-controls")
        return 2

    def of_case(tool: str, name: str) -> Callable[[], Result]:
        script = [str(ROOT / "workbench/sanitizers/cases.py"), name]
        return lambda: run_case(sanitizer, tool, name, script, options.timeout)

    def of_control(name: str) -> Callable[[], Result]:
        script = [str(ROOT / "workbench/sanitizers/controls.py"), "run", name, str(folder)]
        return lambda: run_case(sanitizer, "racecheck", name, script, options.timeout)

    controls = in_parallel(options.jobs, [of_control(name) for name in chosen])
    names = [name for name in CASES if options.only in name]
    results = in_parallel(options.jobs, [of_case(t, name) for t in options.tool for name in names])
    if options.out:
        text = json.dumps(document(sanitizer, results, controls, folder), indent=1)
        options.out.write_text(text + "\n")
    print(table(results, options.tool))
    if folder:
        print(control_table(controls, folder))
    good = all(result.clean for result in results) and all(map(control_is_right, controls))
    print("nothing to report" if good else "NOT clean")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
