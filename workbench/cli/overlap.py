"""`python -m workbench overlap`: the rows that neighbouring queries of an index tensor share."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.errors import ArgumentValueError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.overlap import Overlap


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--key", help="Which tensor, where the file holds a dictionary.")
@click.option(
    "--groups",
    "sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Queries of a group; may be repeated.  [default: 1, 2, 4, 8]",
)
@json_option
def overlap(path: Path, key: str | None, sizes: tuple[int, ...], as_json: bool) -> None:
    """Measure how much neighbouring queries have in common, in an index tensor of your own.

    The Hopper backward, and its forward with few heads, put neighbouring queries into groups. A
    group reads the union of the rows that its queries select once, and adds to dKV once for all of
    them. mla_bwd looks at that ratio on the device and takes the faster kind; nothing is to be set.

    \b
    FILE is a tensor of integers, saved by torch.save (.pt) or numpy.save (.npy),
    of shape [S, topk], [batch, S, topk] or [S, 1, topk]. Negative slots name no
    row. The order of a query's slots does not matter.

    \b
    Columns
      union    mean rows of a group's union
      ratio    union over a query's rows: 1 is all the same, the number of
               queries of the group is nothing in common
      5-95 %   ratios of single groups
      left     rows read and added to, of those without groups: lower is better

    Reusing an older query's list keeps a share of a query's own rows, which is
    printed by the distance.

    \b
    Examples
      python -m examples.demo --indices out/indices.pt
      python -m workbench overlap out/indices.pt
      python -m workbench overlap layer30.pt --groups 2 --groups 16 --json
    """
    from workbench.overlap import GROUPS, measure_overlap

    indices = _read(path, key)

    queries = indices.shape[0] if indices.dim() == 2 else max(indices.shape[-3:-1], default=1)
    found = measure_overlap(indices, sizes or tuple(size for size in GROUPS if size <= queries))
    if as_json:
        print_json({"file": str(path), **asdict(found)})
    else:
        _print(found, path)


def _read(path: Path, key: str | None) -> Tensor:
    """Read the file's tensor, or raise an ArgumentValueError that says what the file holds."""
    import numpy as np
    import torch

    if path.suffix not in (".pt", ".npy"):
        raise ArgumentValueError(
            f"{path}: expected a name ending in .pt or .npy: a tensor saved by torch.save or "
            "numpy.save"
        )
    held: Any
    try:
        if path.suffix == ".npy":
            held = torch.from_numpy(np.load(path))
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, EOFError) as error:
        raise ArgumentValueError(
            f"{path}: not a tensor saved by {'torch' if path.suffix == '.pt' else 'numpy'}.save: "
            f"{str(error).splitlines()[0] if str(error) else 'the file is empty'}"
        ) from error
    if isinstance(held, dict):
        names = ", ".join(str(name) for name in held)
        if key not in held:
            raise ArgumentValueError(f"{path}: holds {names}; choose one by --key")
        held = held[key]
    elif key is not None:
        raise ArgumentValueError(f"--key: {path} holds no dictionary but one value")
    if not isinstance(held, torch.Tensor):
        raise ArgumentValueError(f"{path}: expected a tensor, got {type(held).__name__}")
    return held


def _print(found: Overlap, path: Path) -> None:
    many = f"{found.sequences} sequences of " if found.sequences > 1 else ""
    click.echo(f"{path}: {many}{found.queries:,} queries, {found.topk:,} slots each")
    click.echo(
        f"slots that name a row: {found.valid:.1%}; of those distinct: {found.distinct:.1%}; "
        f"a query\nshares {found.shared:.1%} of its rows with the query before\n"
    )
    console = new_console()
    table = new_table(
        [(name, "right") for name in ("group of", "groups", "union", "ratio", "5-95 %", "left")]
    )
    for group in found.groups:
        table.add_row(
            str(group.queries),
            f"{group.groups:,}",
            f"{group.union_rows:,.1f}",
            f"{group.ratio:.3f}",
            f"{group.smallest:.2f}-{group.largest:.2f}",
            f"{group.left:.1%}",
        )
    print_table(console, "unions of neighbouring queries", table)
    shares = ", ".join(f"{by}: {share:.1%}" for by, share in found.kept.items())
    if shares:
        click.echo(f"\nkept by the list of the query so many before: {shares}")
