"""Blocks of positions in the tables of both indexers: chosen, or chosen from."""

from __future__ import annotations

from typing import Any

from flashdsa.dispatch.rows import Parameter
from flashdsa.errors import ArgumentValueError
from flashdsa.problem import PAGE_SIZE


def require_part_of_a_page(name: str, value: int, operands: Any) -> None:
    """Whole ones make a page of the cache, so that the tokens of one are neighbours."""
    if PAGE_SIZE % value:
        raise ArgumentValueError(f"{name}: expected a divisor of {PAGE_SIZE}; got {value}")


BLOCK = Parameter("block", "int", default=lambda _: 1, rule=require_part_of_a_page)
"""Positions of a block, whose ids are chosen, or of a candidate."""
