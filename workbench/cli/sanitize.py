"""`python -m workbench sanitize`: compute-sanitizer over the small calls of every Hopper kernel."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import OutputFile, OutputFolder
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.output_paths import written
from workbench.sanitizers import run

if TYPE_CHECKING:
    from workbench.sanitizers.controls import Control

SCHEMA = "flashdsa-sanitizers/2"
CONTROLS_PROGRAM = str(run.ROOT / "workbench/sanitizers/controls.py")


@click.command()
@click.option("--tool", "tools", multiple=True, type=click.Choice(run.TOOLS), help="[default: all]")
@click.option(
    "--only", default="", metavar="TEXT", help="Calls and mutants with this in what is listed."
)
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for a call.")
@click.option("--jobs", default=4, show_default=True, help="Calls at a time.")
@click.option(
    "--sanitizer", metavar="PATH", help=f"[default: the newer of {run.PACKAGE}'s and PATH's]"
)
@click.option("--controls", type=click.Path(path_type=Path), help="Run the mutants of this folder.")
@click.option("--build-controls", type=OutputFolder(), help="Compile mutants there, run nothing.")
@click.option("--out", type=OutputFile(".json"), help="Write all results there too.")
@click.option("--list", "only_list", is_flag=True, help="Name calls and mutants, run nothing.")
@json_option
def sanitize(
    tools: tuple[str, ...], only: str, timeout: float, jobs: int, sanitizer: str | None,
    controls: Path | None, build_controls: Path | None, out: Path | None, only_list: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """NVIDIA's compute-sanitizer over small calls, each in a process of its own.

    Needs a Hopper GPU, the kernels' object (`make kernels`) and a sanitizer:
    pip install --constraint constraints.txt '.[sanitize]'. The calls are those
    of workbench/small_calls/table.py with kernels that are compiled ahead.

    "No hazards" means something only of a tool that finds some. So that it can
    be asked, kernels with one synchronisation left out are compiled where CuTe
    DSL is (no GPU there), and racecheck must report every one of them, but for
    what it is known not to see.

    A sanitizer slows kernels down a hundredfold. A call that does not end in
    --timeout seconds is said to be so and is no success.

    Exit code 0: every call ended without a report and with the right result,
    and every mutant was reported.

    \b
    Examples
      python -m workbench sanitize --list
      python -m workbench sanitize --build-controls controls
      python -m workbench sanitize --controls controls --out sanitizers.json
      python -m workbench sanitize --only mla-fwd --tool racecheck --json
    """
    from workbench.sanitizers.controls import CONTROLS

    calls, mutants = calls_with(only), mutants_with(only) if controls or build_controls else []
    if not calls and not mutants:
        raise ArgumentValueError(f"--only: no call has {only!r} in its name")
    if only_list:
        listed = {"calls": calls, "controls": {n: CONTROLS[n].what for n in mutants_with(only)}}
        print_json(listed) if as_json else click.echo("\n".join((*calls, *listed["controls"])))
        return
    if build_controls:
        sys.exit(build(build_controls.resolve(), mutants))
    program = run.newest([sanitizer] if sanitizer else run.installed_sanitizers())
    if program is None:
        raise UnsupportedError(
            "no compute-sanitizer: pip install 'nvidia-cuda-sanitizer-api>=13.4'"
        )
    tools = tools or run.TOOLS
    click.echo(f"compute-sanitizer {program.name}: {program.path}", err=True)
    if "racecheck" in tools and program.version < run.TRUSTED_RACECHECK:
        click.echo(run.OLD_RACECHECK.format(version=program.name), err=True)
    folder = controls.resolve() if controls else Path()
    verdicts = {name: verdict(folder, name) for name in mutants}

    def sanitized(tool: str, name: str) -> run.Result:
        kernel, _, call = name.partition(": ")
        script = ["-m", "workbench", "launch", kernel, "--gpu", "--call", call]
        if name in CONTROLS:
            script = [CONTROLS_PROGRAM, "run", name, str(folder)]
        result = run.run_case(program, tool, name, script, timeout)
        click.echo(f"  {tool:9} {name}: {result.trouble or result.cell}", err=True)
        return result

    tasks = [("racecheck", n) for n in mutants] + [(tool, n) for tool in tools for n in calls]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda task: sanitized(*task), tasks))
    of_mutants, of_calls = results[: len(mutants)], results[len(mutants) :]
    rows = [
        {**asdict(one), "what": CONTROLS[one.case].what, "ptxemu": verdicts[one.case],
         "as_demanded": is_as_demanded(CONTROLS[one.case], one)}
        for one in of_mutants
    ]  # fmt: skip
    document = {**machine(program), "cases": [asdict(r) for r in of_calls], "controls": rows}
    if out:
        with written(out) as draft:
            draft.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print_json(document)
    else:
        show(of_calls, tools, rows, of_mutants)
    good = all(r.clean for r in of_calls) and all(row["as_demanded"] for row in rows)
    click.echo("nothing to report" if good else "NOT clean", err=True)
    sys.exit(not good)


def calls_with(text: str) -> list[str]:
    """ "KERNEL: CALL" of the calls that a GPU can take, with the text in it."""
    from workbench.small_calls.table import TABLE

    names = [
        f"{name}: {call.name}"
        for name, row in TABLE.items()
        for call in row.calls
        if not call.emulated_only and call.backend == "sm90"
    ]
    return [name for name in names if text in name]


def mutants_with(text: str) -> list[str]:
    """Names of the mutants that have it in their name, or in what is said of them."""
    from workbench.sanitizers.controls import CONTROLS

    return [name for name, one in CONTROLS.items() if text in name or text in one.what]


def build(folder: Path, names: Sequence[str]) -> int:
    """Compile the mutants and ask ptxemu; 1 if it found nothing in one."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in names:
        script = [sys.executable, CONTROLS_PROGRAM, "build", name, str(folder)]
        done = subprocess.run(
            script, cwd=run.ROOT, env=run.environment(), stdout=subprocess.DEVNULL, check=False
        )
        found = None if done.returncode else verdict(folder, name)
        wrong = not found
        failures += wrong
        said = "not built" if found is None else describe(found)
        click.echo(f"{name:12} ptxemu: {said}{'   WRONG' if wrong else ''}")
    return int(failures > 0)


def verdict(folder: Path, name: str) -> dict[str, int]:
    """Return what ptxemu found when the mutant was built: code -> number.

    Raises:
        ArgumentValueError: it was not built.
    """
    from workbench.sanitizers.controls import object_of, verdict_of

    if not object_of(folder, name).exists():
        raise ArgumentValueError(f"{folder}: lacks {name}; make it with --build-controls")
    found: dict[str, int] = json.loads(verdict_of(folder, name).read_text())["emulator"]
    return found


def describe(found: dict[str, int]) -> str:
    """ptxemu's findings in a few words."""
    return ", ".join(f"{number} {code}" for code, number in found.items()) or "nothing"


def is_as_demanded(control: Control, result: run.Result) -> bool:
    """A mutant must be reported, or end without a report where racecheck cannot see it."""
    return result.clean if control.unseen else bool(result.reports or result.warnings)


def machine(sanitizer: run.Sanitizer) -> dict[str, Any]:
    """Return a description of the machine and of the software that ran."""
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
    }


def show(
    of_calls: Sequence[run.Result], tools: Sequence[str], rows: Sequence[dict[str, Any]],
    of_mutants: Sequence[run.Result],
) -> None:  # fmt: skip
    """A row a call, a column a tool; a row a mutant, and who reported it."""
    from workbench.sanitizers.controls import CONTROLS

    console = new_console()
    cells = {(result.case, result.tool): result.cell for result in of_calls}
    table = new_table([("call", "wrap"), *((tool, "left") for tool in tools)])
    for case in dict.fromkeys(result.case for result in of_calls):
        table.add_row(case, *(cells[case, tool] for tool in tools))
    print_table(console, "reports", table)
    if rows:
        table = new_table([(name, "wrap") for name in ("left out", "ptxemu", "racecheck")])
        for row, result in zip(rows, of_mutants, strict=True):
            remarks = (
                result.cell,
                CONTROLS[result.case].unseen,
                "" if row["as_demanded"] else "WRONG",
            )
            table.add_row(row["what"], describe(row["ptxemu"]), ", ".join(filter(None, remarks)))
        print_table(console, "mutants", table)
