"""Control flow that compilers seldom emit: jump tables and indirect calls."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import below

TABLE = """mov.u32 %r0, %t; and.b32 %r1, %r0, 3; mov.u32 %r2, 100;
LABELS: .branchtargets ZERO, ONE, TWO, THREE; brx.idx %r1, LABELS;
ZERO: add.u32 %r2, %r2, 1; bra END;
ONE: mul.lo.u32 %r2, %r2, %r0; bra END;
TWO: sub.u32 %r2, %r2, %r0;
THREE: xor.b32 %r2, %r2, 0x55; setp.lt.u32 %p0, %r0, 16; and.b32 %r1, %r1, 1;
@%p0 brx.idx %r1, LABELS;
END: mad.wide.u32 %x0, %t, 4, %out; st.global.u32 [%x0], %r2;
"""

CALLS = """.version 8.3
.target sm_90a
.address_size 64
.func (.param .b32 r) twice(.param .b32 a)
{ .reg .b32 %v; ld.param.b32 %v, [a]; add.u32 %v, %v, %v; st.param.b32 [r], %v; ret; }
.func (.param .b32 r) plus7(.param .b32 a)
{ .reg .b32 %v; ld.param.b32 %v, [a]; add.u32 %v, %v, 7; st.param.b32 [r], %v; ret; }
.global .align 8 .u64 table[2] = {twice, plus7};
.visible .entry k(.param .u64 pout, .param .u64 pin)
{
  .reg .b32 %r<8>; .reg .b64 %x<8>; .reg .pred %p<2>;
  ld.param.u64 %x0, [pout]; ld.param.u64 %x1, [pin]; mov.u32 %r0, %tid.x;
  mad.wide.u32 %x0, %r0, 4, %x0; mad.wide.u32 %x1, %r0, 4, %x1; ld.global.u32 %r1, [%x1];
  and.b32 %r2, %r1, 1; mov.u64 %x2, table; mad.wide.u32 %x2, %r2, 8, %x2;
  {target}
  .param .b32 arg; .param .b32 ret0; st.param.b32 [arg], %r1;
  {declaration}
  call (ret0), %x3, (arg), {name}; ld.param.b32 %r3, [ret0]; st.global.u32 [%x0], %r3; ret;
}
"""
FROM_TABLE = "ld.global.u64 %x3, [%x2];"
SELECTED = (
    "mov.u64 %x3, twice; mov.u64 %x4, plus7; setp.eq.u32 %p0, %r2, 0; selp.b64 %x3, %x3, %x4, %p0;"
)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield kernel("forms/brx.idx", TABLE, [("out", result(128))])
    values = Array(below("forms/calls", 32, 1000).astype(np.uint32).view(np.uint8))
    declared = {
        "callprototype": "P: .callprototype (.param .b32 _) _ (.param .b32 _);",
        "calltargets": "P: .calltargets twice, plus7;",
    }
    for kind, declaration in declared.items():
        for origin, target in (("table", FROM_TABLE), ("selected", SELECTED)):
            ptx = CALLS.replace("{target}", target).replace("{declaration}", declaration)
            yield Program(
                f"forms/call.{kind}.{origin}", ptx.replace("{name}", "P"), (result(128), values)
            )
