"""The files workbench/results/mutation/mutation-NAME.json: a report, its mutants as rows.

`columns` says what stands in a row; what is empty at its end is left out. Anyone who reads or
writes such a file does it here, and has each mutant as a dictionary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = (
    "category",
    "number",
    "mutation",
    "ptx_line",
    "source_file",
    "source_line",
    "instruction",
    "verdict",
    "how",
    "launch",
    "policy",
    "message",
)


def read_table(path: Path) -> dict[str, Any]:
    """The report; of a mutant only what there is to say."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    columns = document.pop("columns")
    document["mutants"] = [
        {column: cell for column, cell in zip(columns, row, strict=False) if cell is not None}
        for row in document["mutants"]
    ]
    return document


def write_table(path: Path, document: Mapping[str, Any]) -> None:
    """A report as `read_table` has it, a line for each mutant.

    Raises:
        ValueError: a mutant has a fact that is no column.
    """
    rows = [json.dumps(_row(mutant)) for mutant in document["mutants"]]
    head = {key: value for key, value in document.items() if key != "mutants"}
    text = json.dumps({**head, "columns": COLUMNS}, indent=2).removesuffix("\n}")
    listed = ",\n    ".join(rows)
    path.write_text(f'{text},\n  "mutants": [\n    {listed}\n  ]\n}}\n', encoding="utf-8")


def _row(mutant: Mapping[str, Any]) -> list[Any]:
    if unknown := set(mutant) - set(COLUMNS):
        raise ValueError(f"expected {', '.join(COLUMNS)}; got {', '.join(sorted(unknown))}")
    row = [mutant.get(column) for column in COLUMNS]
    while row[-1] is None:
        row.pop()
    return row
