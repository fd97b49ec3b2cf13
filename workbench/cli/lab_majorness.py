"""`python -m workbench lab majorness`: a table for each of its questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import PICTURES, OutputFile

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.lab.majorness import MajornessReport, MajorResult

ARCHS = ("sm_90a", "sm_100a")
"""The options' choices are here, and not taken from workbench.lab, so that --help is quick."""
DTYPES = ("bf16", "f16", "e4m3", "e5m2")
SWIZZLES = ("0", "32", "64", "128")


def _choice(*names: str) -> click.Choice[str]:
    return click.Choice(names)


@click.command()
@click.option("--arch", type=_choice(*ARCHS), default="sm_100a", show_default=True)
@click.option("--m", default=64, show_default=True, help="Keys: rows of dV.")
@click.option("--n", default=256, show_default=True, help="Dims: columns of dV.")
@click.option("--k", default=128, show_default=True, help="Heads, half of them in each part.")
@click.option("--dtype", type=_choice(*DTYPES), default="bf16", show_default=True)
@click.option("--swizzle", type=_choice(*SWIZZLES), default="128", show_default=True)
@click.option(
    "--b-major",
    type=_choice("both", "k", "mn"),
    default="both",
    show_default=True,
    help="Layout of dO^T in shared memory; wgmma takes 8-bit types K-major only.",
)
@click.option(
    "--a-major", type=_choice("k", "mn"), default="k", show_default=True, help="Layout of S^T."
)
@click.option(
    "--cut",
    type=_choice("tile", "shape"),
    default="tile",
    show_default=True,
    help="The cut whose descriptors the MMAs use; both are compared.",
)
@click.option(
    "--boundary/--no-boundary",
    default=True,
    show_default=True,
    help="Wait for part 0 and read D before part 1 is issued.",
)
@click.option("--data", type=_choice("random", "integer"), default="random", show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the data."
)
@click.option(
    "--on", "place", type=_choice("emulator", "gpu"), help="[default: a GPU of --arch, if any]"
)
@click.option(
    "--schedule",
    type=_choice("random", "late", "eager"),
    default="random",
    show_default=True,
    help="When ptxemu does asynchronous work.",
)
@click.option("--schedule-seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--compile-to",
    type=OutputFile(".so"),
    help="Only compile these kernels, into this file; needs no GPU.",
)
@click.option(
    "--compiled",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="On a GPU without CuTe DSL: the file of --compile-to, made with the same options.",
)
@click.option(
    "--picture",
    type=OutputFile(*PICTURES),
    help="Draw B's tile in shared memory, coloured by logical row, into this PNG.",
)
@json_option
def majorness(as_json: bool, picture: Path | None, compile_to: Path | None, **options: Any) -> None:
    """Compute dV = S^T dO in two parts with B K-major and MN-major, and show every step.

    Part 0 of the heads clears the accumulator, part 1 adds to it. The kernel itself writes out the
    descriptors it used, the bytes of shared memory, and D after each part; the lab decodes the
    descriptors, gathers the operands back through them as the tensor core does, and compares.

    \b
    Passes when
      D is within 7.629395e-06 (2^-17) of torch's fp32 product for both majors (K
        up to 128 and |dV| up to 16; more in proportion), integers exactly
      D with B K-major and with B MN-major is the same, bit for bit
      both ways of cutting the tile give the same descriptors
      every operand is, through its descriptor, the logical tile; and ptxemu finds
        no hazard

    \b
    Columns of the descriptors
      start  LBO  SBO   bytes: start address in shared memory, leading and stride
                        byte offset
      base              base offset: the row of the swizzle pattern that the
                        matrix starts with
      operand seen      the gathered operand against the logical tile

    \b
    Examples
      python -m workbench lab majorness
      python -m workbench lab majorness --arch sm_90a --a-major mn
      python -m workbench lab majorness --swizzle 64 --no-boundary
      python -m workbench lab majorness --dtype e4m3 --b-major mn --arch sm_90a
      python -m workbench lab majorness --picture tile.png
      python -m workbench lab majorness --arch sm_90a --compile-to k.so
    """
    from ptxemu import Policy
    from workbench.lab import runs
    from workbench.lab.majorness import PLANS, Study, run_study

    names = ("m", "n", "k", "dtype", "a_major", "cut", "boundary")
    sizes = {name: options[name] for name in names} | {"swizzle": int(options["swizzle"])}
    majors = ("k", "mn") if options["b_major"] == "both" else (options["b_major"],)
    arch = options["arch"]
    plan = PLANS[arch](b_major=majors[0], **sizes)
    study = Study(arch, plan, majors, options["data"], options["seed"])
    if compile_to is not None:
        runs.compile_to(compile_to, arch, list(study.plans().values()))
        click.echo(f"{len(majors)} kernels: {compile_to}")
        return
    policy = Policy(asynchronous=options["schedule"], seed=options["schedule_seed"])
    runner = runs.runner_for(options["place"], arch, policy, options["compiled"])
    report, recordings = run_study(study, runner)
    if picture is not None:
        from workbench.lab.tile_picture import draw_tiles

        draw_tiles(study, recordings, picture)
    if as_json:
        print_json(report.to_json_dict())
    else:
        _print_report(report)
        if picture is not None:
            click.echo(f"picture: {picture}")
    if report.failures:
        raise SystemExit(1)


def _print_report(report: MajornessReport) -> None:
    console = new_console()
    plan = report.plan
    where = " and ".join(dict.fromkeys(result.where for result in report.results.values()))
    console.print(
        f"dV[{plan['m']} keys, {plan['n']} dims] = S^T dO over {plan['k']} heads in two parts, "
        f"{plan['dtype']}, {report.arch}, on {where}"
    )
    console.print(
        f"A = S^T {plan['a_major'].upper()}-major; swizzle {plan['swizzle']}; "
        f"cut by {plan['cut']}; "
        f"{'with' if plan['boundary'] else 'without'} the stage boundary"
    )
    console.print(f"data: {report.distribution}; seed {report.seed}\n")
    for result in report.results.values():
        _print_descriptors(console, result)
        _print_instruction(console, result)
        _print_corners(console, result)
    _print_comparison(console, report)
    for failure in report.failures:
        click.echo(failure)
    click.echo("FAILED" if report.failures else "Result: PASS")


def _print_descriptors(console: Console, result: MajorResult) -> None:
    headings = [("part", "right"), ("step", "right"), ("of", "left"), ("descriptor", "left")]
    headings += [(name, "right") for name in ("start", "LBO", "SBO", "base")]
    headings += [("swizzle", "left"), ("major", "left"), ("operand seen", "wrap")]
    table = new_table(headings)
    for view in result.steps:
        seen = "[green]= logical[/]" if view.difference is None else f"[red]{view.difference}[/]"
        fields = view.fields
        cells = [str(view.part), str(view.step), view.operand, view.bits]
        cells.append(hex(fields["start_address"]))
        cells += [str(fields[f"{name}_byte_offset"]) for name in ("leading", "stride")]
        cells += [str(fields["base_offset"]), fields["swizzle"], view.major.upper()]
        table.add_row(*cells, seen)
    title = f"B {result.b_major.upper()}-major: shared memory descriptors of each MMA"
    print_table(console, title, table)


def _print_instruction(console: Console, result: MajorResult) -> None:
    fields = result.instruction_fields
    names = {True: "yes", False: "no"}
    shown = ", ".join(
        f"{name} {names.get(value, value) if isinstance(value, bool) else value}"
        for name, value in fields.items()
        if value or name.startswith("transpose")
    )
    console.print(f"instruction: {result.instruction}" + (f" ({shown})" if shown else ""))
    console.print()


def _print_corners(console: Console, result: MajorResult) -> None:
    headings = [("first rows and columns", "left")]
    corners = dict(result.corners)
    for view in result.steps[:2]:
        axis = "m" if view.operand == "A" else "n"
        corners[f"{view.operand} ({axis}, k), part 0 step 0, seen"] = view.seen
        corners[f"{view.operand} ({axis}, k), part 0 step 0, logical"] = view.logical
    width = len(next(iter(corners.values()))[0])
    headings += [(str(column), "right") for column in range(width)]
    table = new_table(headings)
    for name, rows in corners.items():
        for number, row in enumerate(rows[:2]):
            table.add_row("" if number else name, *(f"{value:.7g}" for value in row))
    title = f"B {result.b_major.upper()}-major: the accumulator (m, n), and operands as seen"
    print_table(console, title, table)


def _print_comparison(console: Console, report: MajornessReport) -> None:
    table = new_table([("comparison", "left"), ("max_abs", "right"), ("limit", "right")])
    for name, result in report.results.items():
        label = name.upper()
        if result.part0_max_abs is not None:
            table.add_row(
                f"{label}, after part 0, vs torch fp32 of its heads",
                f"{result.part0_max_abs:.6e}",
                "",
            )
        table.add_row(f"{label} vs torch fp32", f"{result.max_abs:.6e}", f"{report.limit:.6e}")
    if report.k_vs_mn is not None:
        table.add_row("K vs MN", f"{report.k_vs_mn:.6e}", "exactly 0")
    print_table(console, f"Comparison (largest |dV| {report.max_reference:.4g})", table)
    for name, result in report.results.items():
        same = "identical" if result.cuts_identical else "[red]DIFFERENT[/]"
        count = len(result.steps)
        console.print(f"{name.upper()}: Tile and Shape cuts give {same} descriptors ({count} each)")
    console.print()
