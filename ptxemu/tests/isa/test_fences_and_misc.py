"""Fences are told by kind; registers move between warps; traps, hints and no-ops."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import (
    DeadlockError,
    ExecutionError,
    IllegalInstructionError,
    UnsupportedInstructionError,
)
from ptxemu.events import Fence, FenceKind, Space

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
