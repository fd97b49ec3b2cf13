"""Bits, shifts, logic, permutes: forms that PTX has not; values are in `tests.silicon`."""

import pytest
from tests.isa.pure_run import decode

from ptxemu.errors import UnsupportedInstructionError


@pytest.mark.parametrize(
    "text",
    [
        "lop3.b32 %d, %a, %b, %b, %a;",
        "lop3.b32 %d, %a, %b, %b, 256;",
        "lop3.or.b32 %d, %a, %b, %b, 1, %p;",
        "shl.u32 %d, %a, 1;",
        "prmt.b32.f5e %d, %a, %b, %b;",
        "shf.l.b32 %d, %a, %b, 1;",
        "and.u32 %d, %a, %b;",
        "not.b32 %p, %a;",
        "and.pred %p, %p, %a;",
        "popc.u32 %d, %a;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    registers = ".reg .b32 %d, %a, %b; .reg .pred %p;"
    with pytest.raises(UnsupportedInstructionError):
        decode(text, registers)
