"""`python -m workbench inspect`: registers, spills, instructions of a compiled kernel; no GPU."""

from __future__ import annotations

import click

from flashdsa.cli.console import json_option, print_json


class InspectCommand(click.Command):
    """A command whose help ends with the kernels."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from flashdsa.kernels.catalog import KERNELS

        with formatter.section("Kernels"):
            formatter.write_dl(
                [(spec.name, f"{spec.arch}, {spec.variants[0].name}") for spec in KERNELS]
            )


@click.command(cls=InspectCommand)
@click.argument("target")
@click.option(
    "--arch", metavar="NAME", help="sm_90a, sm_100a, ...  [default: what TARGET is made for]"
)
@click.option("--kernel", default="", metavar="TEXT", help="Only kernels with TEXT in their names.")
@click.option(
    "--reassemble", is_flag=True,
    help="Kernels by name: with the ptxas of nvidia-cuda-nvcc instead of CuTe DSL's own.",
)  # fmt: skip
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def inspect(
    target: str, arch: str | None, kernel: str, reassemble: bool, markdown: bool, as_json: bool
) -> None:
    """Show what the compiler made of a kernel: registers, spills, instructions, role by role.

    TARGET is a kernel of ours (listed below; or one of its compiled functions by its exported name,
    as mla_bwd_deterministic), or the path of a .cubin or .ptx file of anyone.

    A thread has the registers of its launch until setmaxnreg changes them; the threads of a CTA
    share 65,536, and a thread takes 255 at most. The compiler spills the rest to local memory,
    which is device memory. So each role of a warp-specialised kernel is held against its budget:

    \b
    Columns of the roles
      budget    registers that a thread of the role may use: its setmaxnreg, or
                the launch's
      live      the most that hold a value still needed, at one instruction; never
                less than the truth (a guarded write does not end a value)
      named     the highest register that the code names, and one; compilers fill
                the budget, so that this says little about need
      STL LDL   stores to and loads from local memory: spills, or arrays indexed
                at run time
      grade     ok, tight (over 90% of the budget live) or spills

    \b
    Examples
      python -m workbench inspect indexer --arch sm_90a
      python -m workbench inspect mla_bwd --json | jq '.kernels[0].roles'
      python -m workbench inspect kernel.ptx --arch sm_100a  with -lineinfo
      python -m workbench inspect kernel.cubin --markdown > registers.md

    Where a .cubin has no line information, lines are missing: compile with -lineinfo (CuTe DSL:
    CUTE_DSL_LINEINFO=1 CUTE_DSL_KEEP=ptx,cubin). Lines of a .ptx without .loc are the PTX's own.

    Needs nvdisasm, for .ptx ptxas too: pip install 'nvidia-cuda-nvdisasm>=13.0'
    'nvidia-cuda-nvcc>=13.0'. Exit code 1 when a role spills, 2 for wrong input or a missing tool.
    """
    from flashdsa.errors import ArgumentValueError
    from workbench.analysis.inspect import inspect_target
    from workbench.analysis.report import Grade
    from workbench.cli.inspect_report import as_document, as_markdown, print_report

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    reports = inspect_target(target, arch, kernel=kernel, reassemble=reassemble)
    if as_json:
        print_json(as_document(target, reports))
    elif markdown:
        click.echo("\n\n".join(as_markdown(report) for report in reports))
    else:
        for report in reports:
            print_report(report)
    if any(report.grade is Grade.SPILLS for report in reports):
        raise SystemExit(1)
