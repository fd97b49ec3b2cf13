"""`python -m workbench lab forms`: the operand forms of the Blackwell backward, each as a small kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import (
    json_option,
    new_console,
    new_table,
    print_json,
    print_table,
    progress_bar,
)
from flashdsa.cli.output_options import OutputFolder
from flashdsa.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.lab.forms import FormRow, FormsReport

OK, FAILED = "[green]ok[/]", "[bold red]FAILED[/]"


@click.command("forms")
@click.option(
    "--arch",
    type=click.Choice(["sm_100a"]),
    default="sm_100a",
    show_default=True,
    help="The architecture; only tcgen05 has these forms.",
)
@click.option(
    "--form",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this form, with its descriptors decoded; may be repeated.",
)
@click.option(
    "--picture",
    type=OutputFolder(),
    metavar="DIR",
    help="Write a picture of every form's layouts: A and B in shared memory, A and D in TMEM.",
)
@click.option("--no-assemble", is_flag=True, help="Do not ask ptxas.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def forms(
    arch: str,
    names: tuple[str, ...],
    picture: Path | None,
    no_assemble: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Prove the operand forms of tcgen05.mma that the Blackwell backward wants, one by one.

    Each form is a minimal kernel: operands in, one product, D's raw TMEM cells out. It is
    assembled by ptxas, run on the emulator with the hazard check in two schedules (asynchronous
    work at once, and as late as can be), and compared with float64.
    Exit code 1 if a form fails, or if one that the ISA does not have gets through.

    \b
    Forms
      SS, TS    A in shared memory, in TMEM; B is always in shared memory
      2-CTA     .cta_group::2: a pair of CTAs, each with half of A's rows and
                of B's columns
      .ws       tcgen05.mma.ws, weight stationary; .cta_group::1 only
      K-major, MN-major, SW64, SW128: how a matrix lies in shared memory

    \b
    Columns
      form          with its user and the layout of D: PTX ISA, "Data Path Layout
                    Organization"
      integers      largest difference from float64 of small integers; must be 0
      random        the same of random numbers; --json has the limit: one rounding
                    an instruction
      found         hazards and faults that the check found; must be 0
      confirmed by  a stranger's kernel that uses the same form, with right
                    results on the emulator, or "emulator only"

    \b
    Examples
      python -m workbench lab forms
      python -m workbench lab forms --form ts-m128-n256-mn128
      python -m workbench lab forms --picture out/forms --no-assemble
      python -m workbench lab forms --json
    """
    from flashdsa.toolchain.ptxas import MISSING, find_assembler
    from workbench.lab.forms import examine
    from workbench.lab.forms_catalog import catalog, form_named

    judge = None if no_assemble else find_assembler()
    if judge is None and not no_assemble:
        raise UnsupportedError(f"{MISSING}; or pass --no-assemble")
    chosen = [form_named(name) for name in names] or catalog()
    with progress_bar() as on_progress:
        report = examine(chosen, judge, seed=seed, others=not names, on_progress=on_progress)
        if picture is not None:
            from workbench.lab.forms_picture import draw_form

            for number, row in enumerate(report.rows):
                on_progress(number, len(report.rows), f"picture of {row.form.name}")
                draw_form(row.form, picture / f"{row.form.name}.png")
    if as_json:
        from workbench.lab.forms_document import document

        print_json(document(report))
    else:
        _print_report(report, detailed=bool(names))
        if picture is not None:
            click.echo(f"pictures: {picture}/*.png")
    if report.failed:
        raise SystemExit(1)


def _print_report(report: FormsReport, *, detailed: bool) -> None:
    console = new_console()
    judge = f"ptxas {report.ptxas}" if report.ptxas else "ptxas not asked"
    console.print(f"Operand forms of tcgen05.mma, {report.arch}; {judge}; seed {report.seed}\n")
    of_plan = [row for row in report.rows if row.form.is_of_plan]
    _print_rows(console, "Recommended plan: dims split, cta_group::1", of_plan)
    _print_rows(console, "The reference design", [r for r in report.rows if not r.form.is_of_plan])
    if detailed:
        for row in report.rows:
            _print_details(console, row)
    _print_refused(console, report)
    _print_together(console, report)
    for row in report.rows:
        for line in row.emulated.findings if row.emulated else (row.refusal,):
            click.echo(f"{row.form.name}: {line}")
        if row.assembled is not None and not row.assembled.accepted:
            click.echo(f"{row.form.name}: ptxas: {row.assembled.message}")
    total = len(report.rows) + len(report.refused)
    if report.failed:
        click.echo(f"{report.failed} of {total} failed ({report.seconds:.0f} s)")
        return
    refused = f", {len(report.refused)} that it does not have refused" if report.refused else ""
    click.echo(
        f"{len(report.rows)} forms that the ISA has passed{refused} ({report.seconds:.0f} s)"
    )


def _print_rows(console: Console, title: str, rows: list[FormRow]) -> None:
    if not rows:
        return
    headings = [("form", "wrap"), ("ptxas", "left"), ("integers", "right"), ("random", "right")]
    headings += [("found", "right"), ("", "left"), ("confirmed by", "wrap")]
    table = new_table(headings)
    for row in rows:
        measured = row.emulated
        numbers = ["-"] * 3
        if measured is not None:
            numbers = [f"{measured.integers:g}", f"{measured.random:.1e}"]
            numbers.append(str(len(measured.findings)))
        assembled = "-"
        if row.assembled is not None:
            assembled = "ok" if row.assembled.accepted else "refused"
        form = row.form
        user = form.users.partition(": ")[2]
        table.add_row(
            f"{form.title}\n[dim]{form.name}\nlayout {form.plan.product.data_path}; {user}[/]",
            assembled,
            *numbers,
            OK if row.passed else FAILED,
            row.confirmed.text,
        )
    print_table(console, title, table)


def _print_refused(console: Console, report: FormsReport) -> None:
    if not report.refused:
        return
    headings = [("form", "wrap"), ("clause", "wrap"), ("ptxas", "left"), ("emulator", "left")]
    table = new_table([*headings, ("", "left")])
    for row in report.refused:
        ptxas = "refused" if row.ptxas else "cannot see" if row.ptxas_ran else "-"
        table.add_row(
            f"{row.form.title}\n[dim]{row.form.users}[/]",
            row.form.clause,
            ptxas,
            "refused" if row.emulator else "accepted",
            OK if row.passed else FAILED,
        )
    print_table(console, "Forms that the ISA does not have", table)


def _print_together(console: Console, report: FormsReport) -> None:
    from workbench.lab.forms_together import classes_of

    together = report.together
    if together is None:
        return
    classes = together.classes
    numbers = [str(number) for number in range(1, len(classes) + 1)]
    table = new_table([("", "right"), ("instructions", "left"), *((n, "left") for n in numbers)])
    for number, one in zip(numbers, classes, strict=True):
        cells = []
        for other in classes:
            pair = (min(one, other), max(one, other))
            cells.append("." if one == other else "no" if pair in together.refused else "yes")
        table.add_row(number, one.name, *cells)
    print_table(console, f"Which may live in one kernel (ptxas {together.version})", table)
    for group in together.groups:
        members = [row.form.name for row in report.rows if classes_of(row.form.plan) <= set(group)]
        console.print(f"one kernel: {', '.join(members)}", markup=False)
    message = next(iter(together.refused.values()), "")
    if message:
        console.print(f"otherwise ptxas: {message}", markup=False)
    plan = "one kernel" if together.plan else "REFUSED as one kernel"
    console.print(f"all forms of the recommended plan: {plan}\n", markup=False)


def _print_details(console: Console, row: FormRow) -> None:
    from workbench.lab.forms_document import instruction_fields, shared_fields

    for product in row.form.plan.products:
        which = "" if product is row.form.plan.product else " (the product whose D becomes A)"
        fields = instruction_fields(product)
        text = ", ".join(f"{name} {value}" for name, value in fields.items())
        console.print(f"{row.form.name}{which}", style="bold", markup=False)
        console.print(f"instruction descriptor {product.instruction:#010x}: {text}", markup=False)
        table = new_table(
            [("step", "right"), ("operand", "left"), ("descriptor", "left")]
            + [(h, "right") for h in ("start", "LBO", "SBO", "base offset")]
            + [("swizzle", "left"), ("major", "left")]
        )
        for step, (left, right) in enumerate(product.steps()):
            if product.a_in_tmem:
                table.add_row(str(step), "A", f"TMEM column {left}", "", "", "", "", "", "K")
            else:
                table.add_row(str(step), "A", *_cells(shared_fields(product, left, "A")))
            table.add_row("", "B", *_cells(shared_fields(product, right, "B")))
        console.print(table)
        console.print()


def _cells(fields: dict[str, Any]) -> list[str]:
    return [str(value) for value in fields.values()]
