"""Calls of functions of the module run their bodies."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import UnsupportedInstructionError

LANE = np.arange(32)
TWICE = """.func (.param .b32 value) twice(.param .b32 given)
{ .reg .b32 %a; ld.param.b32 %a, [given]; shl.b32 %a, %a, 1; st.param.b32 [value], %a; ret; }
"""


def call(function, register, guard=""):
    """%r20 = function(register)."""
    return f"""{{ .param .b32 out; .param .b32 arg; st.param.b32 [arg], {register};
{guard} call.uni (out), {function}, (arg); ld.param.b32 %r20, [out]; }}
"""


def test_calls_nest_and_repeat():
    before = f"""{TWICE}.func (.param .b32 value) four(.param .b32 given)
{{ .reg .b32 %r<30>; ld.param.b32 %r1, [given]; {call("twice", "%r1")}
{call("twice", "%r20")} st.param.b32 [value], %r20; ret; }}
"""
    body = TID + call("four", "%r0") + call("four", "%r20") + store("y", "%r20")
    np.testing.assert_array_equal(run(body, before=before, y=32).y, 16 * LANE)


def test_lanes_return_early_and_branch_on_their_own():
    before = """.func (.param .b32 value) clipped(.param .b32 given)
{ .reg .b32 %a; .reg .pred %p; ld.param.b32 %a, [given]; st.param.b32 [value], 9;
setp.gt.u32 %p, %a, 9; @%p ret; again: setp.ge.u32 %p, %a, 5; @%p bra out;
add.u32 %a, %a, 5; bra again; out: st.param.b32 [value], %a; }
"""
    body = TID + call("clipped", "%r0") + "activemask.b32 %r1;" + store("y", "%r20")
    ran = run(body + store("z", "%r1"), before=before, y=32, z=32)
    expected = [9 if lane > 9 else lane + 5 if lane < 5 else lane for lane in range(32)]
    assert ran.y.tolist() == expected
    assert set(ran.z.tolist()) == {0xFFFFFFFF}


def test_a_guard_lets_lanes_pass_a_call():
    body = (
        TID + "setp.lt.u32 %p1, %r0, 4;" + call("twice", "%r0", "@%p1") + "mov.b32 %r21, 77;"
        "selp.u32 %r20, %r20, %r21, %p1;" + store("y", "%r20")
    )
    ran = run(body, before=TWICE, y=32)
    np.testing.assert_array_equal(ran.y, np.where(LANE < 4, 2 * LANE, 77))


def test_a_shared_variable_of_a_function_is_one_and_a_local_one_is_a_calls_own():
    before = """.func (.param .b32 value) count(.param .b32 given)
{ .shared .align 4 .b32 total; .local .align 4 .b32 own; .reg .b32 %a, %b; .reg .pred %p;
ld.param.b32 %a, [given]; st.local.b32 [own], %a; setp.eq.u32 %p, %a, 0;
@%p st.shared.b32 [total], %a; atom.shared.add.u32 %b, [total], 1; ld.local.b32 %a, [own];
ld.shared.b32 %b, [total]; st.param.b32 [value], %b; ret; }
"""
    body = TID + call("count", "%r0") + call("count", "32") + store("y", "%r20")
    assert set(run(body, before=before, y=32).y.tolist()) == {64}


def test_recursion_is_refused_before_the_run():
    before = f""".func (.param .b32 value) deep(.param .b32 given)
{{ .reg .b32 %r<30>; ld.param.b32 %r1, [given]; {call("deep", "%r1")} ret; }}
"""
    with pytest.raises(UnsupportedInstructionError, match="call"):
        run(TID + call("deep", "%r0"), before=before)
