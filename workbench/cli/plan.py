"""`python -m workbench plan`: what a kernel takes of a streaming multiprocessor, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option
from flashdsa.cli.output_options import OutputFile

if TYPE_CHECKING:
    from flashdsa.plan.kernel_spec import KernelSpec, Variant

SUFFIXES = (".png", ".svg")
HELP = """Show the plan of {name}, for {archs}.

{what}

The options are the choices in which its compiled variants differ.

\b
Examples
  python -m workbench plan {name} --arch {arch}
  python -m workbench plan {name} --json | jq '.smem.total'
  python -m workbench plan {name} --markdown > plan.md

Needs no GPU and no compiler. Exit code 2 for choices that no kernel is compiled for.
"""


class PlanGroup(click.Group):
    """A command for each kernel whose plan has roles."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys(spec.name for spec in planned_kernels()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from flashdsa.kernels.catalog import KERNELS

        found = [spec for spec in planned_kernels() if spec.name == cmd_name]
        if found:
            return command_of(found)
        named = [x for spec in KERNELS for x in spec.variants if cmd_name in (x.name, spec.name)]
        return command_of_variant(named[0]) if named else None


@click.group(cls=PlanGroup)
def plan() -> None:
    """Show a kernel's resource plan: shared memory, tensor memory, barriers, roles.

    The kernel allocates from the same object, so that what is shown is what runs.
    """


def planned_kernels() -> list[KernelSpec]:
    """The rows whose plans have something to show."""
    from flashdsa.kernels.catalog import KERNELS

    return [spec for spec in KERNELS if spec.plans[0].roles]


def command_of(specs: Sequence[KernelSpec]) -> click.Command:
    """`plan NAME`, its options by what the plans differ in; a row per architecture."""
    by_arch = {spec.arch: spec for spec in specs}
    first = specs[0]
    options = [
        click.Option(
            ["--arch"], type=click.Choice(list(by_arch)), default=first.arch, show_default=True,
            help="Architecture of the kernel.",
        ),
        *(_choice(name, values) for name, values in choices_of(specs).items()),
        click.Option(["--markdown"], is_flag=True, help="Markdown tables, for documents."),
    ]  # fmt: skip
    if any(spec.timeline for spec in specs):
        options.append(
            click.Option(
                ["--picture"], type=OutputFile(*SUFFIXES), metavar="FILE",
                help="Draw what lives where over the steps of the timeline, PNG or SVG.",
            )
        )  # fmt: skip

    def run(
        arch: str, markdown: bool, as_json: bool, picture: Path | None = None, **given: Any
    ) -> None:
        show_plan(by_arch[arch], given, markdown, as_json, picture)

    what = "It serves " + ", ".join(first.operations) + "."
    archs = " and ".join(by_arch)
    return json_option(
        click.Command(
            first.name,
            callback=run,
            params=list(options),
            help=HELP.format(name=first.name, archs=archs, arch=specs[-1].arch, what=what),
            short_help=f"{', '.join(first.operations)} on {archs}.",
        )
    )


def command_of_variant(variant: Variant) -> click.Command:
    """`plan NAME` of a compiled function's exported name, as `choose` prints."""

    def run(markdown: bool, as_json: bool) -> None:
        show_variant(variant, markdown, as_json)

    markdown = click.Option(["--markdown"], is_flag=True, help="Markdown tables, for documents.")
    text = f"Show the plan of {variant.name}, a variant of {variant.spec.name}."
    return json_option(
        click.Command(variant.name, callback=run, params=[markdown], help=text, short_help=text)
    )


def choices_of(specs: Sequence[KernelSpec]) -> dict[str, tuple[Any, ...]]:
    """Fields in which the plans of a kernel differ -> their values, the default first."""
    found: dict[str, tuple[Any, ...]] = {}
    for spec in specs:
        choices = [variant.choices for variant in spec.variants]
        for name in choices[0]:
            values = tuple(dict.fromkeys(one[name] for one in choices))
            if len(values) > 1:
                found.setdefault(name, values)
    return found


def _choice(name: str, values: tuple[Any, ...]) -> click.Option:
    declaration = [_flag(name), name]
    if isinstance(values[0], bool):
        return click.Option(declaration, is_flag=True, help=f"The {name} variant.")
    text = f"{_either(values)}."
    # Without a default: not every architecture's plan has the choice. The first variant has it.
    kind = int if isinstance(values[0], int) else str
    return click.Option(declaration, type=kind, show_default=str(values[0]), help=text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _either(values: Iterable[Any]) -> str:
    *others, last = (str(value) or "''" for value in sorted(values))
    return f"{', '.join(others)} or {last}" if others else last


def find_variant(spec: KernelSpec, given: dict[str, Any]) -> Variant:
    """The first compiled variant with these choices; None: as in the first variant that fits.
    Flags that are not given may be either.

    Raises:
        ValueError: there is none; what the plan says against the choices, or those that there are.
    """
    from flashdsa.errors import ArgumentValueError

    given = {n: value for n, value in given.items() if value is not None and value is not False}
    own = {field.name for field in fields(spec.plans[0])}
    for name, value in given.items():
        known = {variant.choices.get(name) for variant in spec.variants}
        if not any(known):
            raise ArgumentValueError(f"{_flag(name)}: no choice of the {spec.arch} plan")
        if value not in known:
            raise ArgumentValueError(f"{_flag(name)}: expected {_either(known)}; got {value}")
    for variant in spec.variants:
        if all(variant.choices[name] == value for name, value in given.items()):
            return variant
    type(spec.plans[0])(**{n: given[n] for n in given.keys() & own})  # says what is wrong
    named = (_flag(n) if value is True else f"{_flag(n)} {value}" for n, value in given.items())
    raise ArgumentValueError(f"{spec.name}: no variant is compiled with {' and '.join(named)}")


def show_plan(
    spec: KernelSpec, given: dict[str, Any], markdown: bool, as_json: bool, picture: Path | None
) -> None:
    """The plan in the form asked for, and its picture."""
    variant = find_variant(spec, given)
    if picture is not None:
        from workbench.cli.plan_picture import draw_plan

        draw_plan(variant, picture)
        click.echo(f"drew {picture}", err=True)
    show_variant(variant, markdown, as_json)


def show_variant(variant: Variant, markdown: bool, as_json: bool) -> None:
    """The plan in the form asked for."""
    from flashdsa.errors import ArgumentValueError
    from workbench.cli.plan_tables import describe, show

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    if not variant.plan.roles:
        raise ArgumentValueError(
            f"{variant.name}: has no plan to show, as all of its warps do the same; "
            f"python -m workbench inspect {variant.name} shows what the compiler made of it"
        )
    show(describe(variant), as_json, markdown)
