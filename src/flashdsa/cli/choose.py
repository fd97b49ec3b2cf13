"""`flashdsa choose`: kernels that serve a call on Hopper, and their estimated times; no GPU."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from flashdsa.backends.sm90.sparse_mla_ways import Call

FORMATS = ("bf16", "v32", "v32_no_rope", "v4", "v41", "v41_fp4")


def _size(name: str, default: int, text: str, most: int | None = None) -> Callable[..., Any]:
    kind = click.IntRange(min=1, max=most)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


def _attention(command: Callable[..., None]) -> Callable[..., None]:
    """Options of forward and backward."""
    for option in (
        click.option("--lengths/--no-lengths", default=True, show_default=True,
                     help="Of the lists."),
        click.option("--d-qk", type=click.Choice(("512", "576")), help="Columns of bf16 rows."),
        _size("--keys", 65536, "Rows of kv."),
        _size("--topk", 2048, "Slots of a query."),
        _size("--heads", 128, "Of q."),
        _size("--queries", 4096, "Rows of q."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def choose() -> None:
    """Show which kernels serve a call on an H200, and by what they are chosen.

    The same function chooses in every call.
    """


@choose.command("sparse_mla")
@_attention
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="bf16", show_default=True,
    help="Of kv's rows.",
)  # fmt: skip
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


@choose.command("mla_bwd")
@_attention
@click.option("--deterministic", is_flag=True, help="The same bits in every run.")
@json_option
def mla_bwd(
    queries: int,
    heads: int,
    topk: int,
    keys: int,
    d_qk: str | None,
    lengths: bool,
    deterministic: bool,
    as_json: bool,
) -> None:
    """The backward of sparse MLA: its parts, one after another.

    The device chooses in the call where a part names two ways: groups of 256
    rows if their lists are as short as the number says, slots if they save time.

    \b
    Examples
      flashdsa choose mla_bwd --heads 64 --topk 512
      flashdsa choose mla_bwd --queries 8192 --keys 400000 --deterministic
    """
    from flashdsa.backends.emulated.devices import H200
    from flashdsa.backends.sm90.mla_bwd_choice import Call, choose
    from flashdsa.kernels.attention.sm90.core.tile import Tile
    from flashdsa.problem import D_QK

    call = Call(
        queries, heads, keys, topk, H200.num_sms, Tile(int(d_qk or D_QK)), deterministic,
        has_lengths=lengths,
    )  # fmt: skip
    parts = choose(call)
    if as_json:
        print_json([
            {"part": str(part), "plans": [plan.name for plan in part.plans]} for part in parts
        ])  # fmt: skip
        return
    table = new_table([("part", "right"), ("launches", "wrap")])
    for number, part in enumerate(parts):
        table.add_row(str(number), str(part))
    print_table(new_console(), f"{queries} queries x {heads} heads on an H200", table)


@choose.command("dsa_topk_indexer")
@_size("--requests", 32, "Rows of the block table.")
@_size("--next-n", 1, "Queries of a request.", most=4)
@_size("--tokens", 65536, "That a row of the block table has room for.")
@_size("--topk", 2048, "Ids of a query.")
@click.option("--sorted", is_flag=True, help="The best come first.")
@json_option
def dsa_topk_indexer(
    requests: int, next_n: int, tokens: int, topk: int, sorted: bool, as_json: bool
) -> None:
    """The fused indexer over a paged cache.

    \b
    Examples
      flashdsa choose dsa_topk_indexer --requests 1 --tokens 1000000
      flashdsa choose dsa_topk_indexer --next-n 2
    """
    from flashdsa.backends.emulated.devices import H200
    from flashdsa.backends.indexer.choice import SERVES, Call, gpu_of, ways
    from flashdsa.kernels.catalog import INDEXER
    from flashdsa.kernels.indexer.plan import most_pages
    from flashdsa.problem import PAGE_SIZE
    from flashdsa.verify.launch_list import Recorder

    unscored = -1 if sorted else most_pages(topk)
    call, pages = Call(requests * next_n, requests, unscored, ranks=True), -(-tokens // PAGE_SIZE)
    found = list(ways(call, pages, gpu_of(Recorder(H200), INDEXER.plans[0])))
    if as_json:
        print_json([
            {"way": str(way), "kind": way.kind, "taken": way is found[0]} for way in found
        ])  # fmt: skip
        return
    table = new_table([("way", "left"), ("serves", "wrap")])
    for way in found:
        table.add_row(str(way), SERVES[way.kind])
    title = f"{requests} requests x {next_n}, {pages} pages, on an H200; the first one is taken"
    print_table(new_console(), title, table)


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
