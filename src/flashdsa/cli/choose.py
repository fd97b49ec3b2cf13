"""`flashdsa choose`: kernels that serve a call on Hopper, and their estimated times; no GPU."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from flashdsa.backends.sm90.sparse_mla_ways import Call

FORMATS = ("bf16", "v32", "v32_no_rope", "v4", "v41", "v41_fp4")
_SIZE = click.IntRange(min=1)


@click.group()
def choose() -> None:
    """Show which kernels serve a call, and the times by which they are chosen.

    The same function chooses in every call. Times are estimates for an H200.
    """


@choose.command("sparse_mla")
@click.option("--queries", type=_SIZE, default=4096, show_default=True, help="Rows of q.")
@click.option("--heads", type=_SIZE, default=128, show_default=True)
@click.option("--topk", type=_SIZE, default=2048, show_default=True, help="Slots of a query.")
@click.option("--keys", type=_SIZE, default=65536, show_default=True, help="Rows of kv.")
@click.option("--d-qk", type=click.Choice(("512", "576")), help="Columns of bf16 rows.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="bf16", show_default=True,
    help="Of kv's rows.",
)  # fmt: skip
@click.option("--lengths/--no-lengths", default=True, show_default=True, help="Of the lists.")
@click.option("--max-logits", is_flag=True, help="The largest logits are asked for.")
@json_option
def sparse_mla(
    queries: int,
    heads: int,
    topk: int,
    keys: int,
    d_qk: str | None,
    form: str,
    lengths: bool,
    max_logits: bool,
    as_json: bool,
) -> None:
    """The forward of sparse MLA: prefill and decode.

    A time is the kernel's estimate over the ratio that it must gain on simpler
    ones. "-" is a way that serves the call and is not considered; 0 one that a
    rule takes.

    \b
    Examples
      flashdsa choose sparse_mla --queries 64 --format v32
      flashdsa choose sparse_mla --queries 4096 --heads 16 --no-lengths
    """
    from flashdsa.backends.sm90.sparse_mla_ways import Call
    from flashdsa.row_formats import ROW_FORMATS

    packed = ROW_FORMATS.get(form)
    if packed is not None and max_logits:
        raise click.UsageError("--max-logits: packed rows have none")
    columns = int(d_qk or (576 if form in ("bf16", "v32") else 512))
    lists = (topk, 0)
    call = Call(
        queries, heads, columns, lists, lists, keys, packed, lengths=lengths,
        lacks_lengths=not lengths, max_logits=max_logits,
    )  # fmt: skip
    _show(call, as_json)


def _show(call: Call, as_json: bool) -> None:
    """The ways of a call on an H200, the one that is taken first."""
    from flashdsa.backends.emulated.devices import H200
    from flashdsa.backends.sm90.sparse_mla_ways import choose, ways
    from flashdsa.verify.launch_list import Recorder

    runner = Recorder(H200)
    found, taken = ways(runner, call), choose(runner, call)
    times = {way: round(time, 1) if isfinite(time) else None for way, time in found.items()}
    if as_json:
        print_json([
            {"kernels": str(way), "kind": way.kind, "us": us, "taken": way == taken}
            for way, us in times.items()
        ])  # fmt: skip
        return
    table = new_table([("us", "right"), ("way", "left"), ("kernels", "wrap")])
    for way in sorted(found, key=lambda way: (way != taken, found[way])):
        us = "-" if times[way] is None else f"{times[way]:g}"
        table.add_row(us, way.kind, str(way))
    title = f"{call.queries} queries x {call.heads} heads on an H200; the first one is taken"
    print_table(new_console(), title, table)
