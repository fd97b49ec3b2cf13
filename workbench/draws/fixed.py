"""Values that replace drawn ones, in the words of a draw's line."""

from __future__ import annotations

import ast
from typing import Any

from flashdsa.errors import ArgumentValueError
from workbench.draws.distribution import FIELDS

KINDS = {"ids", "lengths", "contexts", "kind", "candidates"}
"""Fields whose values are kinds with their numbers, but for two levels' ids."""


def fixed_value(operation: str, words: str) -> tuple[str, Any]:
    """Name and value of a field, as a draw's line has them: "heads=128", "ids=window-500".

    Raises:
        ArgumentValueError: the operation has no such field, or contexts are drawn ones.
    """
    name, _, text = words.partition("=")
    if name not in FIELDS[operation] or not text:
        fields = ", ".join(FIELDS[operation])
        raise ArgumentValueError(f"{operation}: expected one of {fields}, = a value; got {words!r}")
    first, *numbers = map(_literal, text.split("-"))
    if name == "contexts" and first not in ("equal", "one"):
        raise ArgumentValueError(f"contexts: expected equal-N or one-N tokens; got {text!r}")
    is_kind = name in KINDS and isinstance(first, str) and first not in ("slot", "position")
    return name, (first, *numbers) if is_kind else first


def _literal(word: str) -> Any:
    """A number, None, True or False; else the word."""
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word
