"""The operands of a tcgen05.mma, decoded once for each value."""

from __future__ import annotations

from functools import lru_cache

from ptxemu.engines import tcgen05_code
from ptxemu.engines.forms import Decoded, MmaOperands
from ptxemu.engines.mma_plan import MmaForm, mma_plan


@lru_cache(maxsize=4096)
def decoded(form: MmaForm, operands: MmaOperands) -> Decoded:
    """Read what a form and its operands say.

    Raises:
        ValueError: a descriptor or an address that the ISA does not allow.
    """
    found = Decoded(form, operands, mma_plan(form, operands.instruction_descriptor))
    found.code = tcgen05_code.product(found)
    return found
