"""`flashdsa check`: errors of a backend against the float64 reference, on fresh random inputs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict
from difflib import get_close_matches
from textwrap import fill, indent
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import (
    json_option,
    new_console,
    new_table,
    print_json,
    print_table,
    progress_bar,
)
from flashdsa.cli.output_options import backend_option
from flashdsa.problem import DEVICES

if TYPE_CHECKING:
    from rich.table import Table

    from flashdsa.verify.check import CheckRow


def _listed(heading: str, names: Iterable[str]) -> str:
    return f"\b\n{heading}\n" + indent(fill(" ".join(names), 76), "  ")


class _Check(click.Command):
    """The command. Its help ends with the names of operations, which come with torch."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from flashdsa.verify.check_list import COMPOSED, OPERATIONS

        own = _listed("Operations", (name for name in OPERATIONS if name not in COMPOSED))
        products = _listed("Of torch's products, where the backend's tensors are", COMPOSED)
        self.epilog = f"{own}\n\n{products}"
        super().format_epilog(ctx, formatter)


def _known(ctx: click.Context, option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names`, which are those of operations."""
    from flashdsa.verify.check_list import OPERATIONS

    for name in names:
        if name not in OPERATIONS:
            near = " or ".join(get_close_matches(name, OPERATIONS)) or "one of check --help's list"
            raise click.BadParameter(f"{name!r} is no operation; did you mean {near}?", ctx, option)
    return names


@click.command(cls=_Check)
@backend_option("cpu", "Which implementation to check.")
@click.option(
    "--operation",
    "operations",
    multiple=True,
    callback=_known,
    metavar="NAME",
    help="Check only this operation; may be repeated.  [default: all]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run.  [default: a fresh one]")
@click.option("--quick", is_flag=True, help="Only a small plain case of each operation.")
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Where tensors are; --backend torch has a choice.  [default: a GPU, if torch has one]",
)
@click.option(
    "--list",
    "only_list",
    is_flag=True,
    help="Check nothing: say which case reaches which kernel. Needs no GPU.",
)
@json_option
def check(
    backend: str,
    operations: tuple[str, ...],
    seed: int | None,
    quick: bool,
    device: str | None,
    only_list: bool,
    as_json: bool,
) -> None:
    """Check every operation against a plain float64 reference on random inputs.

    The seed is fresh each time and printed, so that a failure can be repeated. Exit code 1 if
    any row is over its limit. Small cases run first. All of it takes about a minute on a CPU,
    40 s on an H200 whose kernels are compiled. Before, Triton compiles on all cores: some 250
    kernels, one to two seconds of a core each. The time is printed. An emulated backend takes
    seconds for a small case and minutes for the model's sizes: begin with --quick.

    \b
    Columns
      case     which inputs: sizes, dtype, and the special values planted
      output   which result of the operation
      error    how far it is from float64: of the whole output, or of the worst
               row or element where other rules apply; 0 where the answer must be
               exact (index sets, bytes)
      limit    what the contract allows
      of it    error / limit
      s        seconds of the whole case, reference included

    \b
    With --list
      kernel   as `python -m workbench plan` calls it, on an H200 (Hopper) or a
               B200; the backend's function where there is none; "not taken": see
               --json
      compiled function   its variant; of the Hopper backward's two ways the
               GPU takes one, by how much the lists have in common

    \b
    Examples
      flashdsa check --backend cpu
      flashdsa check --backend torch --device cuda
      flashdsa check --backend triton --quick     on an NVIDIA GPU since A100
      flashdsa check --operation mla_bwd --operation sparse_mla_fwd
      flashdsa check --backend emulate-sm90 --quick
      flashdsa check --seed 12345
      flashdsa check --backend sm90 --list
    """
    if only_list:
        _print_list(backend, operations or None, as_json)
        return
    from flashdsa.cli.availability import require_runnable
    from flashdsa.verify.check import device_of, run_checks

    require_runnable(backend)
    here = [*dict.fromkeys(["cpu"] * (backend == "torch") + [device_of(backend)])]
    if device not in (None, *here):
        other = "" if backend == "torch" else "; only --backend torch leaves a choice"
        raise click.UsageError(
            f"--device: backend {backend!r} takes {' or '.join(here)} here; got {device}{other}"
        )
    seed = secrets.randbelow(2**31) if seed is None else seed
    start = time.perf_counter()
    with progress_bar() as on_progress:
        rows = run_checks(
            backend=backend,
            operations=operations or None,
            seed=seed,
            on_progress=on_progress,
            quick=quick,
            device=device,
        )
    seconds = round(time.perf_counter() - start, 1)
    failed = sum(not row.passed for row in rows)
    if as_json:
        document = {"backend": backend, "seed": seed, "failed": failed, "seconds": seconds}
        print_json(document | {"rows": [asdict(row) for row in rows]})
    else:
        _print_rows(rows, backend, seed, failed, seconds)
    if failed:
        raise SystemExit(1)


def _print_list(backend: str, operations: tuple[str, ...] | None, as_json: bool) -> None:
    from flashdsa.verify.launch_list import list_launches

    cases = list_launches(backend, operations)
    if as_json:
        document = [
            {
                "operation": case.operation,
                "case": case.case,
                "kernels": [[one.spec.name, one.name] for one in case.kernels],
                "functions": list(case.functions),
                "refused": case.refused,
            }
            for case in cases
        ]
        print_json({"backend": backend, "cases": document})
        return
    console = new_console()
    for operation in dict.fromkeys(case.operation for case in cases):
        table = new_table([("case", "wrap"), ("kernel", "wrap"), ("compiled function", "wrap")])
        for case in cases:
            if case.operation == operation:
                kernels = dict.fromkeys(one.spec.name for one in case.kernels)
                names = [one.name for one in case.kernels]
                instead = "not taken" if case.refused else ", ".join(case.functions) or "torch"
                table.add_row(case.case, ", ".join(kernels) or instead, ", ".join(names))
        print_table(console, operation, table)


def _print_rows(rows: list[CheckRow], backend: str, seed: int, failed: int, seconds: float) -> None:
    console = new_console()
    console.print(f"Backend {backend} against float64, seed {seed}\n")
    for operation in dict.fromkeys(row.operation for row in rows):
        table = _operation_table([row for row in rows if row.operation == operation])
        print_table(console, operation, table)
    for row in rows:
        if not row.passed:
            click.echo(f"{row.operation}, {row.case}: {row.message}")
    if failed:
        again = f"flashdsa check --backend {backend} --seed {seed}"
        click.echo(f"{failed} of {len(rows)} failed, in {seconds} s; repeat with: {again}")
    else:
        click.echo(f"all {len(rows)} within their limits, in {seconds} s")


def _operation_table(rows: list[CheckRow]) -> Table:
    headings = [("case", "wrap"), ("output", "left")]
    headings += [(h, "right") for h in ("error", "limit", "of it", "s", "")]
    table = new_table(headings)
    before = ""
    for row in rows:
        same_case, before = row.case == before, row.case
        table.add_row(
            "" if same_case else row.case,
            row.output,
            f"{row.error:.1e}",
            f"{row.limit:.1e}",
            f"{row.error / row.limit:.2f}" if row.limit else "exact",
            "" if same_case else f"{row.seconds:.2f}",
            "[green]ok[/]" if row.passed else "[bold red]FAILED[/]",
        )
    return table
