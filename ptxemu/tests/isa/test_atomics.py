"""Atomics: values, what each lane gets back, order of lanes, spaces, reports."""

import numpy as np
import pytest
from tests.kernel_run import TID, load, run, store

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.events import AccessKind


def one(operation, type_, start, operands, dtype, register="%r1"):
    """One atom a lane on one address: (what is in memory, what lanes got)."""
    size = np.dtype(dtype).itemsize
    body = f"""
{TID}{load(register, "b", type_="b" + str(8 * size), size=size)}
atom.global.{operation}.{type_} {register.replace("1", "2")}, [%rd_x], {register};
{store("y", register.replace("1", "2"), "%r0", "b" + str(8 * size), size)}"""
    ran = run(
        body,
        block=len(operands),
        x=np.array([start], dtype),
        b=np.array(operands, dtype),
        y=np.zeros(len(operands), dtype),
    )
    return ran.x[0], ran.y


@pytest.mark.parametrize(
    ("operation", "type_", "dtype", "start", "operands", "result", "found"),
    [
        ("add", "u32", np.uint32, 0xFFFFFFFF, [2, 3], 4, [0xFFFFFFFF, 1]),
        ("add", "s32", np.int32, -5, [2, 3], 0, [-5, -3]),
        ("min", "s32", np.int32, 4, [-1, 3], -1, [4, -1]),
        ("min", "u32", np.uint32, 4, [0xFFFFFFFF, 3], 3, [4, 4]),
        ("max", "s32", np.int32, -4, [-9, 3], 3, [-4, -4]),
        ("max", "u32", np.uint32, 4, [0xFFFFFFFF, 3], 0xFFFFFFFF, [4, 0xFFFFFFFF]),
        ("inc", "u32", np.uint32, 1, [2, 2, 2], 1, [1, 2, 0]),
        ("dec", "u32", np.uint32, 1, [5, 5, 3], 3, [1, 0, 5]),
        ("and", "b32", np.uint32, 0xFF, [0x3C, 0x0F], 0x0C, [0xFF, 0x3C]),
        ("or", "b32", np.uint32, 1, [2, 4], 7, [1, 3]),
        ("xor", "b32", np.uint32, 1, [3, 3], 1, [1, 2]),
        ("exch", "b32", np.uint32, 9, [1, 2], 2, [9, 1]),
    ],
)
def test_lanes_act_in_lane_order_and_get_what_they_found(
    operation, type_, dtype, start, operands, result, found
):
    memory, got = one(operation, type_, start, operands, dtype)
    assert memory == result
    assert got.tolist() == found


def test_float_add_flushes_subnormals_in_global_but_not_in_shared_memory():
    tiny = np.float32(1e-40)
    memory, _ = one("add", "f32", 0.0, [tiny, tiny], np.float32, "%f1")
    assert memory == 0
    body = f"""
{TID}{load("%f1", "b", type_="f32")} mov.u32 %r1, smem; mov.b32 %r2, 0;
st.shared.b32 [%r1], %r2; atom.shared.add.f32 %f2, [%r1], %f1; ld.shared.f32 %f3, [%r1];
{store("y", "%f3", type_="f32")}"""
    shared = run(body, block=1, shared=4, b=np.array([tiny]), y=np.zeros(1, np.float32))
    assert shared.y[0] == tiny


def test_half_adds_round_each_half():
    x = np.array([1.0, 2048.0], np.float16)
    b = np.array([0.5, 1.0], np.float16)
    body = "ld.global.b32 %r1, [%rd_b]; red.global.add.noftz.f16x2 [%rd_x], %r1;"
    np.testing.assert_array_equal(run(body, block=1, x=x, b=b).x, np.float16([1.5, 2048.0]))


def test_half_adds_without_noftz_are_refused():
    with pytest.raises(UnsupportedInstructionError, match="noftz"):
        run("red.global.add.f16x2 [%rd_x], %r1;", x=1)


def test_a_vector_reduction_adds_its_elements():
    x = np.zeros(4, np.float32)
    body = """mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f40000000;
red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%rd_x], {%f1, %f2, %f1, %f2}, %rd1;"""
    np.testing.assert_array_equal(run(body, x=x).x, [32, 64, 32, 64])


def test_a_vector_reduction_at_a_generic_address_adds_its_elements():
    x = np.zeros(2, np.float32)
    body = """mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f40000000;
red.add.v2.f32 [%rd_x], {%f1, %f2};"""
    np.testing.assert_array_equal(run(body, x=x).x, [32, 64])


def test_a_vector_atom_returns_the_old_vector():
    body = f"""{TID} mov.b32 %f1, 0f3F800000;
atom.global.add.v2.f32 {{%f2, %f3}}, [%rd_x], {{%f1, %f1}};
{store("y", "%f3", type_="f32")}"""
    ran = run(body, x=np.array([5, 7], np.float32), y=np.zeros(32, np.float32))
    np.testing.assert_array_equal(ran.y, 7 + np.arange(32))


@pytest.mark.parametrize(("compare", "result"), [(5, 6), (4, 5)])
def test_compare_and_swap(compare, result):
    body = f"""{TID} mov.b32 %r1, {compare}; mov.b32 %r2, 6;
atom.global.cas.b32 %r3, [%rd_x], %r1, %r2; {store("y", "%r3")}"""
    ran = run(body, block=1, x=np.array([5], np.uint32), y=1)
    assert (ran.x[0], ran.y[0]) == (result, 5)


def test_counters_of_all_warps_and_ctas_add_up():
    body = f"""{TID} mov.b32 %r1, 1; red.global.add.u32 [%rd_x], %r1;
mov.u32 %r2, smem; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r2], 0; bar.sync 0;
atom.shared.add.u32 %r3, [%r2], 1; bar.sync 0; ld.shared.u32 %r4, [%r2];
@%p1 red.global.max.u32 [%rd_y], %r4;"""
    ran = run(body, block=96, grid=3, shared=4, x=1, y=1)
    assert (ran.x[0], ran.y[0]) == (288, 96)


def test_an_atom_on_another_ctas_shared_memory():
    body = f"""{TID} mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank;
st.shared.u32 [%r1], 100; barrier.cluster.arrive; barrier.cluster.wait;
mapa.shared::cluster.u32 %r3, %r1, 0; atom.shared::cluster.add.u32 %r4, [%r3], 1;
barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 %r5, [%r1];
setp.eq.u32 %p1, %r0, 0; @%p1 bra out; ret; out: {store("y", "%r5", "%r2")}"""
    ran = run(body, block=32, grid=2, cluster=2, shared=4, y=2)
    assert ran.y.tolist() == [164, 100]


def test_an_atom_is_reported_with_its_order():
    body = "atom.acq_rel.sys.global.add.u32 %r1, [%rd_x], 1; red.global.add.u32 [%rd_x], 1;"
    first, second = run(body, block=2, x=1).seen.accesses
    assert (first.kind, first.order, first.scope) == (AccessKind.ATOMIC, "acq_rel", "sys")
    assert (second.order, second.scope, len(second.starts)) == ("relaxed", "gpu", 2)


def test_a_spin_lock_is_passed_between_warps():
    body = f"""{TID} and.b32 %r1, %r0, 31; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
again: atom.acquire.gpu.global.cas.b32 %r2, [%rd_x], 0, 1;
setp.ne.u32 %p2, %r2, 0; @%p2 bra again;
ld.global.u32 %r3, [%rd_y]; add.u32 %r3, %r3, 1; st.global.u32 [%rd_y], %r3;
atom.release.gpu.global.exch.b32 %r2, [%rd_x], 0;"""
    assert run(body, block=256, x=1, y=1).y[0] == 8
