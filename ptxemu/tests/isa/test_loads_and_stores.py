"""Loads and stores reach every state space, in every width, and refuse wrong addresses."""

import numpy as np
import pytest
from tests.kernel_run import TID, aligned, load, run, source, store

from ptxemu import api
from ptxemu.errors import ExecutionError, UnsupportedInstructionError
from ptxemu.events import AccessKind, Space

THREAD = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("vector", "type_", "registers", "dtype", "words"),
    [
        ("v8", "b32", "{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}", np.uint32, 8),
        ("v4", "b64", "{%rd1, %rd2, %rd3, %rd4}", np.uint64, 4),
    ],
)
def test_a_vector_of_32_bytes_is_copied(vector, type_, registers, dtype, words):
    x = np.arange(32 * words).astype(dtype)
    size = words * x.itemsize
    via_shared = f"""
mov.u32 %r20, smem; mad.lo.u32 %r21, %r0, {size}, %r20;
st.shared.{vector}.{type_} [%r21], {registers}; ld.shared.{vector}.{type_} {registers}, [%r21];
"""
    body = (
        TID
        + load(registers, "x", type_=f"{vector}.{type_}", size=size)
        + via_shared
        + store("y", registers, "%r0", f"{vector}.{type_}", size)
    )
    ran = run(body, x=x, y=np.zeros_like(x), shared=1024, arch="sm_100a")
    np.testing.assert_array_equal(ran.y, x)


def test_lanes_that_are_masked_keep_their_registers_and_write_nothing():
    body = f"""
{TID} mov.b32 %r1, 99; setp.lt.u32 %p1, %r0, 5;
mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd_x, %rd1; @%p1 ld.global.u32 %r1, [%rd1];
{store("y", "%r1")}
@!%p1 st.global.u32 [%rd1], %r0;"""
    ran = run(body, x=np.full(32, 7, np.uint32), y=32)
    np.testing.assert_array_equal(ran.y, np.where(THREAD < 5, 7, 99))
    np.testing.assert_array_equal(ran.x, np.where(THREAD < 5, 7, THREAD))


def test_of_lanes_that_write_one_address_the_last_one_wins():
    ran = run(TID + store("y", "%r0", "0"), y=1)
    assert ran.y[0] == 31


def test_a_sink_drops_an_element():
    body = TID + load("{_, %r1}", "x", type_="v2.u32", size=8) + store("y", "%r1")
    ran = run(body, x=np.arange(64, dtype=np.uint32), y=32)
    np.testing.assert_array_equal(ran.y, np.arange(1, 64, 2))


def test_generic_addresses_reach_shared_global_local_and_constant_memory_in_one_instruction():
    before = ".const .align 4 .u32 table[2] = {1234, 5};\n"
    body = f"""
.local .align 8 .b8 depot[16];
{TID}
mov.u32 %r1, smem; mov.b32 %r2, 77; st.shared.u32 [%r1+8], %r2;
cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1; add.s64 %rd1, %rd1, 8;
mov.u64 %rd2, depot; cvta.local.u64 %rd3, %rd2; add.u32 %r3, %r0, 1000;
st.local.u32 [%rd2+4], %r3; add.s64 %rd3, %rd3, 4;
mov.u64 %rd4, table; cvta.const.u64 %rd4, %rd4; and.b32 %r4, %r0, 3;
setp.eq.u32 %p0, %r4, 0; setp.eq.u32 %p1, %r4, 1; setp.eq.u32 %p2, %r4, 2; mov.b64 %rd5, %rd_x;
@%p0 mov.b64 %rd5, %rd1; @%p1 mov.b64 %rd5, %rd3; @%p2 mov.b64 %rd5, %rd4; ld.u32 %r5, [%rd5];
{store("y", "%r5")}"""
    ran = run(body, shared=64, x=np.array([42], np.uint32), y=32, before=before)
    expected = [(77, 1000 + thread, 1234, 42)[thread % 4] for thread in range(32)]
    assert ran.y.tolist() == expected


def test_addresses_within_a_state_space_have_32_bits_too():
    before = ".const .align 4 .u32 table[2] = {1234, 5};\n"
    body = f"""
.local .align 8 .b8 depot[16]; {TID}
mov.u32 %r1, depot; st.local.u32 [%r1+4], %r0; cvt.u64.u32 %rd1, %r1; cvta.local.u64 %rd1, %rd1;
ld.u32 %r2, [%rd1+4]; cvta.to.local.u64 %rd2, %rd1; ld.local.u32 %r3, [%rd2+4];
mov.u32 %r4, table; ld.const.u32 %r5, [%r4+4]; mov.u32 %r6, p_y; ld.param.u64 %rd3, [%r6];
sub.s64 %rd3, %rd3, %rd_y; cvt.u32.u64 %r7, %rd3;
add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r7; {store("y", "%r2")}"""
    np.testing.assert_array_equal(run(body, y=32, before=before).y, 2 * THREAD + 5)


def test_parameters_are_read_by_name_and_by_generic_address():
    body = f"""
{TID} ld.param.v2.b32 {{%r1, %r2}}, [p_y];
mov.b64 %rd1, p_y; cvta.param.u64 %rd1, %rd1; ld.u32 %r3, [%rd1];
sub.u32 %r4, %r1, %r3; {store("y", "%r4")}"""
    assert (run(body, y=np.ones(32, np.uint32)).y == 0).all()


def test_a_store_to_a_parameter_is_refused():
    body = "mov.b64 %rd1, p_y; st.u32 [%rd1], 1;"
    with pytest.raises(ExecutionError, match="read-only"):
        run(body, y=32)


def test_a_store_to_an_array_that_may_not_be_written_is_refused():
    x = aligned(np.zeros(32, np.uint32))
    x.flags.writeable = False
    module = api.load(source(TID + store("x", "%r0"), {"x": x}))
    with pytest.raises(ExecutionError, match="read-only memory"):
        module.launch("k", 1, 32, args=[x])


def test_a_misaligned_address_names_instruction_lane_and_address():
    body = TID + "add.s64 %rd1, %rd_x, 2; ld.global.u32 %r1, [%rd1];"
    with pytest.raises(ExecutionError, match=r"ld\.global\.u32: .*warp 0 lane 0.*not aligned to 4"):
        run(body, x=np.zeros(8, np.uint32))


def test_a_vector_must_be_aligned_to_its_whole_size():
    body = TID + "add.s64 %rd1, %rd_x, 8; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];"
    with pytest.raises(ExecutionError, match="not aligned to 16"):
        run(body, x=np.zeros(32, np.uint64))


def test_an_address_behind_an_array_names_the_lane_and_the_array():
    with pytest.raises(ExecutionError, match=r"lane 30: illegal global .*0 bytes behind.*p_x"):
        run(TID + load("%r1", "x"), x=np.zeros(30, np.uint32))


def test_a_store_behind_an_array_is_refused():
    with pytest.raises(ExecutionError, match=r"st\.global\.u32.*lane 31"):
        run(TID + store("x", "%r0"), x=np.zeros(31, np.uint32))


def test_shared_memory_below_and_behind_is_refused():
    for address in ("0", "smem+64"):
        body = f"mov.u32 %r1, {address}; ld.shared.u32 %r2, [%r1];"
        with pytest.raises(ExecutionError, match="shared memory is 0x400 to 0x440"):
            run(body, shared=64)


def test_a_local_address_behind_the_depot_is_refused():
    body = ".local .align 8 .b8 depot[40]; mov.u64 %rd1, depot; ld.local.u64 %rd2, [%rd1+64];"
    with pytest.raises(ExecutionError, match="40 bytes of local memory"):
        run(body)


def test_an_unknown_modifier_fails_before_the_run():
    with pytest.raises(UnsupportedInstructionError, match="frobnicate"):
        run("ld.global.frobnicate.u32 %r1, [%rd_x];", x=32)


@pytest.mark.parametrize(
    ("opcode", "order", "scope"),
    [
        ("ld.global.u32", "weak", ""),
        ("ld.weak.global.u32", "weak", ""),
        ("ld.volatile.global.u32", "volatile", "sys"),
        ("ld.relaxed.gpu.global.u32", "relaxed", "gpu"),
        ("ld.acquire.sys.global.u32", "acquire", "sys"),
        ("ld.mmio.relaxed.sys.global.u32", "relaxed", "sys"),
        ("ld.global.nc.L1::no_allocate.L2::256B.u32", "weak", ""),
    ],
)
def test_a_load_is_reported_with_its_order_and_scope(opcode, order, scope):
    seen = run(f"{opcode} %r1, [%rd_x];", x=32).seen.accesses
    assert [(a.kind, a.space, a.order, a.scope) for a in seen] == [
        (AccessKind.READ, Space.GLOBAL, order, scope)
    ]


def test_a_release_store_is_reported_with_its_bytes():
    (access,) = run("st.release.gpu.global.u64 [%rd_x+8], 1;", block=1, x=32).seen.accesses
    assert (access.kind, access.size, access.order, access.scope) == (
        AccessKind.WRITE,
        8,
        "release",
        "gpu",
    )
    assert len(access.starts) == 1


def test_a_shared_access_is_reported_at_its_offset_in_its_cta():
    body = "mov.u32 %r1, smem; st.shared.u32 [%r1+4], 1;"
    (access,) = run(body, block=1, grid=2, cluster=2, shared=16).seen.accesses[:1]
    assert (access.space, access.starts.tolist()) == (Space.SHARED, [0x404])


def test_st_bulk_zeroes_shared_memory():
    body = f"""
{TID} mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], 5; bar.warp.sync -1;
setp.eq.u32 %p1, %r0, 0; @%p1 st.bulk.weak.shared::cta [%r1], 64, 0; bar.warp.sync -1;
ld.shared.u32 %r3, [%r2]; {store("y", "%r3")}"""
    ran = run(body, shared=128, y=32, arch="sm_100a")
    np.testing.assert_array_equal(ran.y, np.where(THREAD < 16, 0, 5))


def test_vprintf_text_is_collected():
    before = """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 1 .b8 text[19] = {116,61,37,100,32,102,61,37,46,49,102,32,37,115,32,37,120,10,0};
.global .align 1 .b8 word[3] = {104,105,0};
"""
    body = f"""
.local .align 8 .b8 depot[32]; {TID}
mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1;
st.local.u32 [%rd1], %r0; mov.b64 %rd5, 0d3FF8000000000000; st.local.u64 [%rd1+8], %rd5;
mov.u64 %rd6, word; cvta.global.u64 %rd6, %rd6; st.local.u64 [%rd1+16], %rd6;
mov.b32 %r2, 255; st.local.u32 [%rd1+24], %r2; mov.u64 %rd3, text; cvta.global.u64 %rd4, %rd3;
{{ .param .b64 a0; st.param.b64 [a0], %rd4; .param .b64 a1; st.param.b64 [a1], %rd2;
.param .b32 r0; call.uni (r0), vprintf, (a0, a1); ld.param.b32 %r1, [r0]; }}
{store("y", "%r1")}"""
    ran = run(body, block=2, y=2, before=before)
    assert ran.result.printed == ["t=0 f=1.5 hi ff\n", "t=1 f=1.5 hi ff\n"]
    assert ran.y.tolist() == [16, 16]


def test_a_call_of_an_unknown_function_fails_before_the_run():
    before = ".extern .func mystery ();\n"
    with pytest.raises(UnsupportedInstructionError, match="mystery: a function that calls itself"):
        run("call.uni mystery, ();", before=before)
