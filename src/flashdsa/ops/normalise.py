"""Operands as a caller may give them, brought into the form that the tables have.

MLA in MQA form has one kv head, and ids count the rows of all pages through; slots may be int64.
"""

from __future__ import annotations

from typing import Any

from flashdsa.ops.argument_rules import refuse_packed
from flashdsa.ops.checks import int32_slots, kv_rows, wants_gradient


def rows_and_slots(operands: Any) -> Any:
    """Return operands with kv (S_kv, d), indices (S, topk) and int32 slots; the same tuple if it
    has them.

    Raises:
        UnsupportedError: kv has packed rows, and a gradient is asked for.
    """
    if wants_gradient(operands):
        refuse_packed(operands.kv, "sparse_mla_fwd")
    slots = int32_slots(operands)
    if slots.kv.dim() == 2:
        return slots
    return slots._replace(kv=kv_rows("kv", operands.kv))


def rows_with_gradient(operands: Any) -> Any:
    """The same, of a backward.

    Raises:
        UnsupportedError: kv has packed rows.
    """
    normalised = rows_and_slots(operands)
    refuse_packed(normalised.kv)
    return normalised
