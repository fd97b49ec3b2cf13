"""Result files as JSON documents of dataclasses: writing, reading, and what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flashdsa.errors import ArgumentValueError


def to_json(result: Any) -> str:
    """A dataclass as indented JSON text."""
    return json.dumps(asdict(result), indent=2) + "\n"


def write_text(text: str, path: Path) -> None:
    """Write a document, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ArgumentValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ArgumentValueError(f"{path}: expected JSON; got {error}") from None


def require_schema(document: Any, schema: str, where: str) -> None:
    """Raise ArgumentValueError if the document is of another schema."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ArgumentValueError(f"{where}: expected schema {schema!r}; got {found!r}")


def parse_fields(values: dict[str, Any], kind: type[Any], where: str) -> Any:
    """The dataclass `kind` with just these fields.

    Raises:
        ArgumentValueError: a missing or unknown field.
    """
    wrong = {f.name for f in fields(kind)} ^ set(values)
    if wrong:
        raise ArgumentValueError(f"{where}: missing or unknown fields: {', '.join(sorted(wrong))}")
    return kind(**values)
