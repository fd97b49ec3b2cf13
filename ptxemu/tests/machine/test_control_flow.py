"""Control flow: switches, loops without an end, calls, also through registers."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError, UnsupportedInstructionError
from ptxemu.sched.policy import Policy

# Control flow: a switch past its end, loops without an end in sight; the rest is in silicon.


def test_an_index_past_the_targets_is_refused():
    body = "TARGETS: .branchtargets a, b, c; mov.b32 %r2, 3; brx.idx %r2, TARGETS; a: b: c:"
    with pytest.raises(ExecutionError, match="index 3 of a list of 3 targets"):
        run(body)


def test_a_long_computation_without_any_progress_is_no_livelock():
    """Nothing here changes what another warp could see for 20,000 visible instructions."""
    body = f"""{TID} mov.b32 %r1, 0;
again: ld.global.u32 %r2, [%rd_x]; nanosleep.u32 1; add.u32 %r1, %r1, %r2;
setp.lt.u32 %p1, %r1, 10000; @%p1 bra again; {store("y", "%r1")}"""
    assert run(body, x=np.ones(1, np.uint32), y=32).y[0] == 10000


def test_a_spin_without_an_end_is_a_livelock_that_names_its_place():
    body = "again: ld.volatile.global.u32 %r1, [%rd_x]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"
    with pytest.raises(DeadlockError, match=r"livelock.*\n.*warp 0 spins near PTX line"):
        run(body, x=1)


@pytest.mark.parametrize("warps", ["round_robin", "random"])
def test_a_spin_ends_when_another_warp_writes(warps):
    body = f"""{TID} setp.lt.u32 %p1, %r0, 32; @%p1 bra again; mov.b32 %r2, 0;
delay: add.u32 %r2, %r2, 1; nanosleep.u32 9; setp.lt.u32 %p2, %r2, 3000; @%p2 bra delay;
st.release.gpu.global.u32 [%rd_x], %r2; ret;
again: ld.acquire.gpu.global.u32 %r1, [%rd_x]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;
{store("y", "%r1")}"""
    assert run(body, block=64, x=1, y=32, policy=Policy(warps=warps)).y[5] == 3000


# Calls of functions of the module run their bodies.

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


# Calls through registers, tables of functions, and addresses in initial values.

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


# Shared memory of any size, as `.shared .b8 flag;` declares it.


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 1023])
def test_a_size_that_is_no_multiple_of_four(size):
    last = size - 1
    body = (
        f"mov.u32 %r1, smem;\nmov.u16 %h0, 77;\nst.shared.u8 [%r1+{last}], %h0;\n"
        f"ld.shared.u8 %h1, [%r1+{last}];\ncvt.u32.u16 %r2, %h1;\n" + TID + store("out", "%r2")
    )
    assert (run(body, shared=size, out=32).out == np.uint32(77)).all()
