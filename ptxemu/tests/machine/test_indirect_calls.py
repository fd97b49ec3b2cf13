"""Calls through registers, tables of functions, and addresses in initial values."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import ExecutionError

FUNCTIONS = """
.func (.param .b32 r) twice(.param .b32 a)
{ .reg .b32 %v; ld.param.b32 %v, [a]; add.u32 %v, %v, %v; st.param.b32 [r], %v; ret; }
.func (.param .b32 r) plus7(.param .b32 a)
{ .reg .b32 %v; ld.param.b32 %v, [a]; add.u32 %v, %v, 7; st.param.b32 [r], %v; ret; }
.func (.param .b64 r) other(.param .b32 a)
{ .reg .b64 %v; mov.b64 %v, 1; st.param.b64 [r], %v; ret; }
.global .u32 five = 5; .global .align 8 .u64 places[2] = {five, generic(five)};
"""
CALL = f"""{TID} TARGET
.param .b32 arg; .param .b32 res; st.param.b32 [arg], %r0;
P: .callprototype (.param .b32 _) _ (.param .b32 _); GUARD call (res), %rd1, (arg), P;
ld.param.b32 %r2, [res]; mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd_y, %rd5;
st.global.u32 [%rd5], %r2;"""
BY_LANE = """and.b32 %r1, %r0, 1; setp.eq.u32 %p0, %r1, 0; mov.u64 %rd1, twice; mov.u64 %rd2, plus7;
selp.b64 %rd1, %rd1, %rd2, %p0;"""


def test_a_guard_keeps_lanes_from_the_call():
    body = CALL.replace("TARGET", BY_LANE + "st.param.b32 [res], 3;").replace("GUARD", "@%p0")
    ran = run(body.replace("st.param.b32 [res], 3;", ""), before=FUNCTIONS, y=32)
    lanes = np.arange(32)
    np.testing.assert_array_equal(ran.y[::2], 2 * lanes[::2])
    assert not ran.y[1::2].any()


@pytest.mark.parametrize("target", ["mov.u64 %rd1, other;", "mov.u64 %rd1, 64;"])
def test_a_function_that_the_prototype_does_not_fit_stops_the_kernel(target):
    body = CALL.replace("TARGET", target).replace("GUARD", "")
    with pytest.raises(ExecutionError, match="trap"):
        run(body, before=FUNCTIONS, y=32)


def test_initial_values_hold_addresses_of_other_variables():
    body = """ld.global.u64 %rd1, [places+8]; ld.u32 %r1, [%rd1];
    st.global.u32 [%rd_y], %r1;"""
    assert run(body, before=FUNCTIONS, y=1).y[0] == 5
