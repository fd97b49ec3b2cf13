"""`flashdsa plan`: what a kernel takes of a streaming multiprocessor, without a GPU."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option

if TYPE_CHECKING:
    from flashdsa.plan.kernel_spec import KernelSpec, Variant

SUFFIXES = (".png", ".svg")
HELP = """Show the plan of {name}, for {arch}.

{what}

The options are the choices in which its compiled variants differ.

\b
Examples
  flashdsa plan {name} --arch {arch}
  flashdsa plan {name} --json | jq '.smem.total'
  flashdsa plan {name} --markdown > plan.md

Needs no GPU and no compiler. Exit code 2 for choices that no kernel is compiled for.
"""


class PlanGroup(click.Group):
    """A command for each kernel whose plan has roles."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The kernels' names."""
        return [spec.name for spec in planned_kernels()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a kernel."""
        found = (spec for spec in planned_kernels() if spec.name == cmd_name)
        return next(map(command_of, found), None)


@click.group(cls=PlanGroup)
def plan() -> None:
    """Show a kernel's resource plan: shared memory, tensor memory, barriers, roles.

    The kernel allocates from the same object, so that what is shown is what runs.
    """


def planned_kernels() -> list[KernelSpec]:
    """The rows whose plans have something to show."""
    from flashdsa.kernels.catalog import KERNELS

    return [spec for spec in KERNELS if spec.plans[0].roles]


def command_of(spec: KernelSpec) -> click.Command:
    """`flashdsa plan NAME`, its options by what the kernel's plans differ in."""
    options = [
        click.Option(
            ["--arch"], type=click.Choice([spec.arch]), default=spec.arch, show_default=True,
            help="Architecture of the kernel.",
        ),
        *(_choice(name, values) for name, values in choices_of(spec).items()),
        click.Option(["--markdown"], is_flag=True, help="Markdown tables, for documents."),
    ]  # fmt: skip
    if spec.timeline:
        options.append(
            click.Option(
                ["--picture"], type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                help="Draw what lives where over the steps of the timeline, PNG or SVG.",
            )
        )  # fmt: skip

    def run(
        arch: str, markdown: bool, as_json: bool, picture: Path | None = None, **given: Any
    ) -> None:
        show_plan(spec, given, markdown, as_json, picture)

    what = "It serves " + ", ".join(spec.operations) + "."
    return json_option(
        click.Command(
            spec.name,
            callback=run,
            params=list(options),
            help=HELP.format(name=spec.name, arch=spec.arch, what=what),
            short_help=f"{', '.join(spec.operations)} on {spec.arch}.",
        )
    )


def choices_of(spec: KernelSpec) -> dict[str, tuple[Any, ...]]:
    """Fields in which the kernel's plans differ -> their values, the default first."""
    names = [field.name for field in fields(spec.plans[0])]
    values = {name: tuple(dict.fromkeys(getattr(p, name) for p in spec.plans)) for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def _choice(name: str, values: tuple[Any, ...]) -> click.Option:
    declaration = [f"--{name.replace('_', '-')}", name]
    if isinstance(values[0], bool):
        return click.Option(declaration, is_flag=True, help=f"The {name} variant.")
    text = f"{', '.join(map(str, sorted(values)[:-1]))} or {max(values)}."
    return click.Option(
        declaration, type=type(values[0]), default=values[0], show_default=True, help=text
    )


def find_variant(spec: KernelSpec, given: dict[str, Any]) -> Variant:
    """The first compiled variant with these choices; flags that are not given may be either.

    Raises:
        ValueError: there is none; what the plan says against the choices.
    """
    from flashdsa.errors import ArgumentValueError

    for variant in spec.variants:
        if all(value is False or getattr(variant.plan, n) == value for n, value in given.items()):
            return variant
    type(spec.plans[0])(**given)  # says what is wrong with them
    raise ArgumentValueError(f"{spec.name}: no variant is compiled with {given}")


def show_plan(
    spec: KernelSpec, given: dict[str, Any], markdown: bool, as_json: bool, picture: Path | None
) -> None:
    """The plan in the form asked for, and its picture."""
    from flashdsa.cli.plan_document import describe
    from flashdsa.cli.plan_tables import show
    from flashdsa.errors import ArgumentValueError

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    variant = find_variant(spec, given)
    document = describe(variant)
    if picture is not None:
        if picture.suffix.lower() not in SUFFIXES:
            raise ArgumentValueError(f"--picture: expected a .png or .svg file; got {picture}")
        from flashdsa.cli.plan_picture import draw_plan

        draw_plan(variant, picture)
        click.echo(f"drew {picture}", err=True)
    show(document, as_json, markdown)
