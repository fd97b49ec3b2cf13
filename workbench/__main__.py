"""`python -m workbench`: the instruments, run from a checkout."""

from __future__ import annotations

import click

from flashdsa.cli.main import FlashDsaGroup
from workbench.cli.draws import draws
from workbench.cli.engines import engines
from workbench.cli.export import export
from workbench.cli.inspect import inspect
from workbench.cli.lab import lab
from workbench.cli.launch import launch
from workbench.cli.model import model
from workbench.cli.mutate import mutate
from workbench.cli.overlap import overlap
from workbench.cli.plan import plan
from workbench.cli.ranking import ranking
from workbench.cli.reference import reference
from workbench.cli.sanitize import sanitize
from workbench.cli.tiles import tiles
from workbench.cli.v4_layer import v4_layer
from workbench.cli.ways import ways


@click.group(
    cls=FlashDsaGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli() -> None:
    """Instruments for those who write kernels, run from a checkout of flashdsa.

    \b
      draws     an operation beside other libraries, in shapes drawn or fixed
      ways      what each way of an operation earns, by drawn shapes
      tiles     which tiles of Triton's kernels are fastest on this GPU
      plan      what a kernel takes: shared memory, barriers, registers
      inspect   what the compiler made of it: registers, spills
      lab       tensor-core instructions laid open, and their hazards
      model     predicted times on a GPU that is not here
      overlap   what neighbouring queries of your indices share
      launch    small calls of a kernel, emulated, judged, saved
      sanitize  compute-sanitizer over those calls, on a GPU
      mutate    kernels with one synchronisation broken: is it noticed?
      reference the reference design's budget beside the plan that ships
      ranking   the indexer's sets by fp16 scores, beside those by fp32
      v4-layer  an attention layer of DeepSeek-V4-Flash, timed by part
      engines   vLLM with flashdsa inside, beside transformers
      export    solutions for FlashInfer-Bench

    Every command takes --help. Exit codes: 0 done, 1 a check failed, 2 wrong input or something
    this machine cannot do.
    """


for command in (
    draws, lab, launch, sanitize, mutate, model, overlap, reference, ranking, engines,
    export, v4_layer, ways, tiles, plan, inspect,
):  # fmt: skip
    cli.add_command(command)


if __name__ == "__main__":
    cli(prog_name="python -m workbench")
