"""`python -m workbench lab`: experiments with tensor-core instructions."""

from __future__ import annotations

import click

from workbench.cli.lab_hazards import hazards
from workbench.cli.lab_majorness import majorness
from workbench.cli.lab_precision import precision
from workbench.cli.lab_split_heads import split_heads


@click.group()
def lab() -> None:
    """Find out why an MMA's result is wrong, and what a kernel that nobody calls would do.

    \b
      python -m workbench lab majorness   dV = S^T dO with B K-major and MN-major, by steps
      python -m workbench lab hazards     missing waits, and a schedule that shows each
      python -m workbench lab precision   errors of bf16, fp16 and e4m3 products, by order
      python -m workbench lab split-heads the Blackwell backward in its reference design

    Kernels run on ptxemu, or on a GPU of the architecture. Exit code 1 if something is not as it
    must be. The guide "My MMA result is wrong" walks through them.
    """


for command in (majorness, hazards, precision, split_heads):
    lab.add_command(command)
