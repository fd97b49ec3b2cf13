"""Warps that wait are asked only when what they wait for has changed; Python's collector."""

import gc
import weakref

import numpy as np
import pytest
from tests.kernel_run import TID, run, source, store

from ptxemu import api
from ptxemu.sched import scheduler
from ptxemu.sched.collector import THRESHOLDS, rare_collections
from ptxemu.sched.policy import Policy

# Warps that wait are asked only when what they wait for has changed; nothing else changes.

INIT = f"""{TID} mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; mov.u32 %r5, 0;
@%p0 bra READY; mbarrier.init.shared.b64 [%r1], COUNT; READY: bar.sync 0;
"""
WORK = """mov.u32 %r2, 0; WORK: st.shared.u32 [%r1+64], %r2; add.u32 %r2, %r2, 1;
setp.lt.u32 %p3, %r2, 300; @%p3 bra WORK;
"""
WAITS = {
    "bar": "setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT; " + WORK + "WAIT: bar.sync 1;",
    "mbarrier": INIT.replace("COUNT", "1")
    + "setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT; "
    + WORK
    + "@!%p0 mbarrier.arrive.shared.b64 _, [%r1]; bra END; WAIT: "
    "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT; END:",
    "cluster": "setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT; "
    + WORK
    + "WAIT: barrier.cluster.arrive; barrier.cluster.wait;",
    "exit": "setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT; " + WORK + "exit; WAIT: bar.sync 1;",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_waiting_warp_is_not_asked_while_another_works(name, monkeypatch):
    asked = 0
    advance = scheduler.advance

    def counted(warp):
        nonlocal asked
        asked += 1
        return advance(warp)

    monkeypatch.setattr(scheduler, "advance", counted)
    body = WAITS[name] if name == "mbarrier" else f"{TID} mov.u32 %r1, smem; {WAITS[name]}"
    api.load(source(body, {}, shared=128)).launch("k", 1, 512)
    assert asked < 1000  # 300 stores and branches of one warp; polled it would be thousands


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_arrivals_of_lanes_that_complete_several_phases(threads):
    """16 arrivals a phase, 32 lanes a warp: states as if each lane had arrived by itself."""
    body = (
        INIT.replace("COUNT", "16")
        + "mbarrier.arrive.shared.b64 %rd5, [%r1]; shr.u64 %rd6, %rd5, 20; cvt.u32.u64 %r6, %rd6;"
        + "mbarrier.pending_count.b64 %r7, %rd5; mad.lo.u32 %r6, %r6, 100, %r7;"
        + store("y", "%r6")
    )
    ran = run(body, block=threads, shared=128, y=threads, policy=Policy(warps="round_robin"))
    lanes = np.arange(threads)
    assert sorted(ran.y) == sorted(lanes // 16 * 100 + 16 - lanes % 16)


def test_lanes_that_wait_by_state_wait_together():
    """As cuda::barrier does: every lane has a state of its own, all of one phase."""
    body = (
        INIT.replace("COUNT", "64")
        + "AGAIN: mbarrier.arrive.shared.b64 %rd5, [%r1];"
        + "WAIT: mbarrier.try_wait.shared.b64 %p1, [%r1], %rd5; @!%p1 bra WAIT;"
        + "add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 50; @%p3 bra AGAIN;"
        + store("y", "%r5")
    )
    ran = run(body, block=64, shared=128, y=64)
    assert ran.y.tolist() == [50] * 64
    assert ran.result.warp_instructions < 2 * 50 * 12


@pytest.mark.parametrize("expected", [4 * 32, 4 * 20])
def test_the_words_of_a_warp_complete_a_phase_at_the_byte(expected):
    """What is over when the phase completes counts in the next one."""
    body = (
        INIT.replace("COUNT", "1")
        + f"@!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expected};"
        + "shl.b32 %r3, %r0, 2; add.u32 %r3, %r3, %r1;"
        + "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r3+64], %r0, [%r1];"
        + "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;"
        + "ld.shared.u32 %r4, [%r3+64];"
        + store("y", "%r4")
    )
    ran = run(body, block=32, shared=256, y=32)
    assert ran.y.tolist() == list(range(32))


def test_progress_is_told_by_the_clock_where_steps_take_long(monkeypatch):
    monkeypatch.setattr(scheduler, "STEPS_BETWEEN_COUNTS", 1 << 30)
    monkeypatch.setattr(scheduler, "SECONDS_BETWEEN_COUNTS", 0.0)
    told = []
    body = f"{TID} mov.u32 %r1, smem; {WORK}"
    api.load(source(body, {}, shared=128)).launch("k", 1, 32, on_progress=told.append)
    assert len(told) > 10


# During a run Python's collector looks rarely, and afterwards it is as it was.


def test_thresholds_and_generations_come_back():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()  # Python 3.12 freezes some itself
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > frozen
        with rare_collections():  # a launch that an observer makes
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_what_a_program_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    younger = [[] for _ in range(1000)]  # more than those of the frozen ones that end meanwhile
    try:
        with rare_collections():
            assert frozen - len(younger) < gc.get_freeze_count() <= frozen
        assert frozen - len(younger) < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.itself = self


def test_what_is_made_inside_and_forgotten_is_gone_behind_it():
    """And is not left among the old objects, which are looked through rarely."""

    @rare_collections()
    def make():
        return weakref.ref(Knot())

    older = weakref.ref(Knot())
    assert make()() is None
    gc.collect()
    assert older() is None  # what is older was only passed over


def test_an_error_brings_them_back_too():
    before = gc.get_threshold()
    with pytest.raises(ValueError), rare_collections():
        raise ValueError
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off():
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with rare_collections():
            assert not gc.isenabled()
            assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()
