"""Fences, hints, registers, atomics, multimem, and what is refused."""

import numpy as np
import pytest
from tests.kernel_run import TID, load, run, store

from ptxemu.errors import (
    DeadlockError,
    ExecutionError,
    IllegalInstructionError,
    PtxEmuError,
    UnsupportedInstructionError,
)
from ptxemu.events import AccessKind, Fence, FenceKind, Space

# Fences are told by kind; registers move between warps; traps, hints and no-ops.

SHARED, GLOBAL = frozenset((Space.SHARED,)), frozenset((Space.GLOBAL,))


def memory(order, scope):
    return Fence(FenceKind.MEMORY, order, scope)


RELEASE = Fence(FenceKind.TENSORMAP_RELEASE, scope="gpu")
ACQUIRE = Fence(FenceKind.TENSORMAP_ACQUIRE, scope="gpu")


@pytest.mark.parametrize(
    ("instruction", "fence"),
    [
        ("acq_rel.gpu", memory("acq_rel", "gpu")),
        ("cluster", memory("acq_rel", "cluster")),
        ("sc.cta", memory("sc", "cta")),
        ("acquire.sync_restrict::shared::cluster.cluster", memory("acquire", "cluster")),
        ("release.sync_restrict::shared::cta.cluster", memory("release", "cluster")),
        ("membar.gl", memory("sc", "gpu")),
        ("membar.sys", memory("sc", "sys")),
        ("proxy.async", Fence(FenceKind.ASYNC_PROXY)),
        ("proxy.async.shared::cta", Fence(FenceKind.ASYNC_PROXY, spaces=SHARED)),
        ("proxy.async.global", Fence(FenceKind.ASYNC_PROXY, spaces=GLOBAL)),
        ("proxy.alias", Fence(FenceKind.ALIAS_PROXY)),
        ("mbarrier_init.release.cluster", Fence(FenceKind.MBARRIER_INIT)),
        ("proxy.tensormap::generic.release.gpu", RELEASE),
        ("proxy.tensormap::generic.acquire.gpu [%rd_x], 128", ACQUIRE),
    ],
)
def test_a_fence_is_told_by_kind(instruction, fence):
    text = instruction if instruction.startswith("membar") else f"fence.{instruction}"
    seen = run(f"{text};", x=np.zeros(32, np.uint32)).seen.sync
    assert [(what, told) for what, _, told, _ in seen] == [("fenced", fence)]


@pytest.mark.parametrize("instruction", ["fence.proxy.magic", "fence.acq_rel", "membar.cluster"])
def test_an_unknown_fence_fails_before_the_run(instruction):
    with pytest.raises(UnsupportedInstructionError):
        run(f"{instruction};")


@pytest.mark.parametrize(
    "instruction",
    [
        "prefetch.global.L2 [%rd_x]", "prefetch.tensormap [%rd_x]", "prefetch.L1 [%rd_x+100000]",
        "prefetchu.L1 [%rd_x]", "applypriority.global.L2::evict_normal [%rd_x], 128",
        "discard.global.L2 [%rd_x], 128", "createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd1, 0.5",
        "griddepcontrol.wait", "griddepcontrol.launch_dependents", "nanosleep.u32 100", "pmevent 3",
        "brkpt",
    ],
)  # fmt: skip
def test_hints_change_nothing(instruction):
    x = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(run(f"{instruction};", x=x).x, x)


def test_discard_checks_its_address():
    with pytest.raises(ExecutionError, match="not aligned to 128"):
        run("discard.global.L2 [%rd_x+64], 128;", x=np.zeros(64, np.uint32))


def test_a_trap_names_the_warp_and_the_lanes():
    body = TID + "setp.eq.u32 %p1, %r0, 37; @%p1 trap;"
    with pytest.raises(ExecutionError, match=r"trap in cta \(0,0,0\) warp 1, 1 lanes from lane 5"):
        run(body, block=64)


def registers_body(producer, consumer):
    return f"""{TID} setp.lt.u32 %p1, %r0, 128; @%p1 bra producer;
setmaxnreg.inc.sync.aligned.u32 {consumer}; bra out;
producer: setmaxnreg.dec.sync.aligned.u32 {producer}; out: {store("y", "%r0")}"""


@pytest.mark.parametrize(
    ("producer", "consumer", "directives"), [(24, 240, ""), (40, 232, ".maxnreg 168")]
)
def test_registers_move_from_producers_to_consumers(producer, consumer, directives):
    ran = run(registers_body(producer, consumer), block=384, y=384, directives=directives)
    np.testing.assert_array_equal(ran.y, np.arange(384))


def test_more_registers_than_the_launch_has_are_a_deadlock_that_says_so():
    with pytest.raises(DeadlockError, match=r"setmaxnreg.inc to 240: \d+ registers are free"):
        run(registers_body(40, 240), block=384, y=384)


def test_registers_are_allocated_for_a_multiple_of_four_warps():
    """As FlashAttention-4 counts on: of 11 warps the last ones give, 4 take more than that."""
    body = f"""{TID} setp.ge.u32 %p1, %r0, 288; @%p1 bra giver;
setp.lt.u32 %p2, %r0, 128; @%p2 setmaxnreg.inc.sync.aligned.u32 224; bra out;
giver: setmaxnreg.dec.sync.aligned.u32 112; out: {store("y", "%r0")}"""
    np.testing.assert_array_equal(run(body, block=352, y=352).y, np.arange(352))


def test_warps_of_a_warpgroup_must_ask_for_the_same_registers():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 32; @%p1 bra other;
setmaxnreg.dec.sync.aligned.u32 40; bra out; other: setmaxnreg.dec.sync.aligned.u32 32; out:"""
    assert "setmaxnreg-differs" in run(body, block=128).seen.codes


@pytest.mark.parametrize("count", ["20", "260", "44", "%r0"])
def test_a_wrong_register_count_is_refused(count):
    with pytest.raises(IllegalInstructionError, match=r"expected a multiple of 8 in 24\.\.256"):
        run(TID + f"setmaxnreg.dec.sync.aligned.u32 {count};", block=128)


# Instructions with a wrong number of operands are refused by name, not by a crash.


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.shared.b64 [%rd1];",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, %r2, %r3, %r4};",
        "shfl.sync.idx.b32 %r1, %r2;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3];",
        "tensormap.replace.tile.rank.global.b1024.b32 [%rd1];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1];",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1;",
        "redux.sync.add.u32 %r1;",
        "st.global.b32 [%rd1];",
        "atom.global.add.u32 %r1, [%rd1];",
        "elect.sync %r1;",
    ],
)
def test_too_few_operands(text):
    with pytest.raises(PtxEmuError, match=text.split(".")[0]):
        run(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("suld.b.1d.b32.trap %r1, [%rd1, {%r2}];", "textures and surfaces"),
        ("alloca.u64 %rd1, %rd2;", "run-time size"),
        ("red.global.add.f16x2 [%rd1], %r1;", "noftz"),
        (
            "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col::w [%rd1, {%r1, %r1, %r1}];",
            "im2col::w is not",
        ),
    ],
)
def test_what_is_not_emulated_says_so(text, reason):
    with pytest.raises(PtxEmuError, match=reason):
        run(text)


# Atomics: what each lane gets back, vectors, reports; values are in `tests.silicon`.


@pytest.mark.parametrize(
    ("operation", "type_", "start", "operands", "result", "found"),
    [
        ("add", "u32", 0xFFFFFFFF, [2, 3], 4, [0xFFFFFFFF, 1]),
        ("min", "s32", 4, [0xFFFFFFFF, 3], 0xFFFFFFFF, [4, 0xFFFFFFFF]),
        ("inc", "u32", 1, [2, 2, 2], 1, [1, 2, 0]),
        ("dec", "u32", 1, [5, 5, 3], 3, [1, 0, 5]),
        ("exch", "b32", 9, [1, 2], 2, [9, 1]),
    ],
)
def test_lanes_act_in_lane_order_and_get_what_they_found(
    operation, type_, start, operands, result, found
):
    body = f"""{TID}{load("%r1", "b")} atom.global.{operation}.{type_} %r2, [%rd_x], %r1;
{store("y", "%r2")}"""
    x, b = np.array([start], np.uint32), np.array(operands, np.uint32)
    ran = run(body, block=len(operands), x=x, b=b, y=len(operands))
    assert (ran.x[0], ran.y.tolist()) == (result, found)


@pytest.mark.parametrize(
    "opcode", ["red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 {}, %rd1", "red.add.v4.f32 {}"]
)
def test_a_vector_reduction_adds_its_elements(opcode):
    operands = opcode.format("[%rd_x], {%f1, %f2, %f1, %f2}")
    body = f"mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f40000000; {operands};"
    ran = run(body, x=np.zeros(4, np.float32))
    np.testing.assert_array_equal(ran.x, [32, 64, 32, 64])


def test_an_atom_is_reported_with_its_order():
    body = "atom.acq_rel.sys.global.add.u32 %r1, [%rd_x], 1; red.global.add.u32 [%rd_x], 1;"
    first, second = run(body, block=2, x=1).seen.accesses
    assert (first.kind, first.order, first.scope) == (AccessKind.ATOMIC, "acq_rel", "sys")
    assert (second.order, second.scope, len(second.starts)) == ("relaxed", "gpu", 2)


# multimem on one GPU: a multicast object is plain memory, its reduction the one value.

PLACE = f"{TID} mul.wide.u32 %rd1, %r0, 16; add.s64 %rd2, %rd_x, %rd1; add.s64 %rd3, %rd_y, %rd1;"


def test_load_reduce_gives_the_value_and_store_replaces_it():
    x = np.arange(128, dtype=np.float32)
    ran = run(
        f"""{PLACE}
        multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd2];
        multimem.st.relaxed.sys.global.v4.f32 [%rd3], {{%f3, %f2, %f1, %f0}};""",
        x=x,
        y=np.zeros(128, np.float32),
    )
    np.testing.assert_array_equal(ran.y.reshape(32, 4), x.reshape(32, 4)[:, ::-1])


def test_halves_are_loaded_with_a_wider_sum():
    x = np.arange(256, dtype=np.float16)
    ran = run(
        f"""{PLACE}
        multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 {{%r1, %r2, %r3, %r4}}, [%rd2];
        st.global.v4.b32 [%rd3], {{%r1, %r2, %r3, %r4}};""",
        x=x,
        y=np.zeros(256, np.float16),
    )
    np.testing.assert_array_equal(ran.y, x)


def test_a_reduction_adds():
    ran = run(
        f"{TID} and.b32 %r1, %r0, 1; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd_y, %rd1;"
        "multimem.red.release.gpu.global.add.u32 [%rd1], %r0;",
        y=np.array([5, 7], np.uint32),
    )
    np.testing.assert_array_equal(ran.y, [5 + sum(range(0, 32, 2)), 7 + sum(range(1, 32, 2))])


@pytest.mark.parametrize(
    "text",
    [
        "multimem.ld_reduce.global.add.acc::f32.f32 %f0, [%rd_y];",
        "multimem.ld_reduce.global.and.u32 %r0, [%rd_y];",
        "multimem.red.shared.add.u32 [%rd_y], %r0;",
        "multimem.red.global.add.b32 [%rd_y], %r0;",
    ],
)
def test_what_the_manual_does_not_have_is_refused(text):
    with pytest.raises(UnsupportedInstructionError):
        run(text, y=4)


def test_bulk_copies_go_to_the_one_replica():
    ran = run(
        f"""{TID} mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
        st.shared.u32 [%r2], %r0; fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p0, %r0, 0;
        @%p0 bra DONE; multimem.cp.async.bulk.global.shared::cta.bulk_group [%rd_x], [%r1], 128;
        multimem.cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd_y], [%r1], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        DONE:""",
        shared=128,
        x=np.zeros(32, np.uint32),
        y=np.full(32, 10, np.uint32),
    )
    np.testing.assert_array_equal(ran.x, np.arange(32))
    np.testing.assert_array_equal(ran.y, 10 + np.arange(32))
