"""What is measured on the original: which synchronisation ordered anything."""

import numpy as np
import pytest
from tests.kernel_run import TID, setup, source

from ptxemu import api
from ptxemu.errors import LaunchError
from ptxemu.mutate import Replay, Report, mutate
from ptxemu.mutate.effects import EffectRecorder

ZEROS = (np.zeros(64, np.uint32),)
EXCHANGE = """
    shl.b32 %r1, %r0, 2;
    mov.u32 %r2, smem;
    add.u32 %r3, %r2, %r1;
    st.shared.b32 [%r3], %r0;
    bar.sync 0;
    xor.b32 %r4, %r1, 252;
    add.u32 %r4, %r2, %r4;
    ld.shared.b32 %r5, [%r4];
"""
STORE = "mul.wide.u32 %rd0, %r0, 4; add.s64 %rd1, %rd_out, %rd0; st.global.b32 [%rd1], %r5;"


def verdicts(body, *, block=64):
    text = source(TID + body, {"out": None}, shared=1024)
    report = Report("k", *mutate(Replay(setup(text, ZEROS, block=block))))
    return [(r.mutation.site.category, r.verdict) for r in report.results], report


def test_a_barrier_that_orders_accesses_is_caught_and_a_second_one_is_redundant():
    found, report = verdicts(EXCHANGE.replace("bar.sync 0;", "bar.sync 0; bar.sync 0;") + STORE)
    # Between the two nothing happens but the second, which hands on what the first one ordered.
    assert found == [("barrier", "survived"), ("barrier", "redundant")]
    assert report.share() == report.share_of_reached() == 0.0
    found, report = verdicts(EXCHANGE + STORE)
    assert found == [("barrier", "caught")]
    assert report.share() == report.share_of_reached() == 1.0


def test_a_barrier_behind_the_last_access_is_not_redundant_if_something_was_learnt():
    found, report = verdicts(EXCHANGE + STORE + "bar.sync 0;")
    assert found == [("barrier", "caught"), ("barrier", "survived")]
    assert report.share() == 0.5


def test_a_proxy_fence_without_generic_accesses_before_it_is_redundant():
    found, _ = verdicts("fence.proxy.async.shared::cta;" + EXCHANGE + STORE)
    assert found == [("proxy-fence", "redundant"), ("barrier", "caught")]


def test_a_proxy_fence_behind_a_write_is_not_though_nothing_needs_it_here():
    found, _ = verdicts(EXCHANGE + "fence.proxy.async.shared::cta;" + STORE)
    assert found == [("barrier", "caught"), ("proxy-fence", "survived")]


def test_a_wait_for_nothing_pending_is_redundant():
    found, _ = verdicts("cp.async.bulk.wait_group 0;" + EXCHANGE + STORE)
    assert ("group-wait", "redundant") in found and ("group-wait", "survived") not in found


PRODUCT = """mov.u32 %r1, smem; st.shared.b32 [%r1], 0; fence.proxy.async; bar.sync 0;
shr.u32 %r2, %r1, 4; cvt.u64.u32 %rd0, %r2; wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r4, %r5, %r6, %r7}, %rd0, %rd0, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""


def test_a_barrier_behind_each_warps_wait_for_a_product_is_not_redundant():
    reload = "setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [%r1], 1;"
    found, _ = verdicts(f"{PRODUCT} bar.sync 0; {reload}", block=128)
    assert [verdict for category, verdict in found if category == "barrier"][1:] == ["survived"]


INIT = """
    setp.ne.u32 %p0, %r0, 0;
    mov.u32 %r2, smem;
    @%p0 bra INITIALISED;
    mbarrier.init.shared.b64 [%r2], 1;
    INITIALISED:
    bar.sync 0;
"""
WAIT = "WAIT{0}: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], {1}; @!%p1 bra WAIT{0};"


def effects(body, block=64):
    text = source(TID + body, {"out": None}, shared=1024)
    recorder = EffectRecorder("k")
    module = api.load(text)
    module.launch("k", 1, block, args=ZEROS, observer=recorder)
    instructions = module.syntax.functions["k"].instructions
    waits = [i.pc for i in instructions if i.modifiers[:2] == ("mbarrier", "try_wait")]
    return recorder.effects, waits


def test_a_wait_for_the_phase_before_the_first_is_idle():
    found, (wait,) = effects(INIT + WAIT.format(0, 1))
    assert found.is_idle(wait, waits=True)


def test_a_wait_for_an_arrival_is_not_idle_even_if_no_access_is_learnt():
    arrive = "@!%p0 mbarrier.arrive.shared.b64 _, [%r2];"
    found, (wait,) = effects(INIT + arrive + WAIT.format(0, 0))
    assert not found.is_idle(wait, waits=True)


def test_of_two_equal_waits_in_a_row_each_is_idle_for_the_other_one_is_there():
    arrive = "@!%p0 mbarrier.arrive.shared.b64 _, [%r2];"
    found, waits = effects(INIT + arrive + WAIT.format(0, 0) + WAIT.format(1, 0))
    assert [found.is_idle(wait, waits=True) for wait in waits] == [True, True]


def test_what_was_not_executed_is_not_idle():
    found, (wait,) = effects(INIT + "bra END;" + WAIT.format(0, 1) + "END:")
    assert not found.is_idle(wait, waits=True)


TCGEN05 = """
    mov.u32 %r2, smem;
    shr.u32 %r1, %r0, 5;
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ALLOCATED:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r3, [%r2];
    shl.b32 %r4, %r1, 21;
    add.u32 %r4, %r4, %r3;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    tcgen05.fence::before_thread_sync;
    bar.sync 1;
    tcgen05.fence::after_thread_sync;
    bar.sync 2;
    tcgen05.fence::after_thread_sync;
    @%p0 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
    END:
"""


def test_a_tcgen05_fence_has_an_effect_if_no_other_orders_the_same():
    """The second and the third have one, and the last, for the one before it is not used."""
    text = source(TID + TCGEN05, {"out": None}, shared=1024, arch="sm_100a")
    _, results = mutate(Replay(setup(text, ZEROS)), only=["tcgen05-fence"], notes=True)
    assert [(r.mutation.site.instruction.opcode.split("::")[1], r.verdict) for r in results] == [
        ("before_thread_sync", "redundant"),
        ("after_thread_sync", "survived"),
        ("before_thread_sync", "survived"),
        ("before_thread_sync", "redundant"),
        ("after_thread_sync", "redundant"),
        ("after_thread_sync", "caught"),
    ]


def test_a_wait_for_loads_is_redundant_only_if_no_load_is_pending():
    body = """
        mov.u32 %r2, smem;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        ld.shared.b32 %r4, [%r2];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];
        tcgen05.wait::ld.sync.aligned;
        add.u32 %r5, %r5, 1;
        st.shared.b32 [%r2+64], %r5;
        tcgen05.wait::ld.sync.aligned;
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r4];
        tcgen05.wait::ld.sync.aligned;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
    """
    text = source(TID + body, {"out": None}, shared=1024, arch="sm_100a")
    _, results = mutate(Replay(setup(text, ZEROS, block=32)), only=["tcgen05-wait"])
    loads = [r.verdict for r in results if "wait::ld" in r.mutation.site.instruction.text]
    assert loads == ["caught", "redundant", "caught"]


def test_launches_of_one_kernel_are_judged_together():
    """Of the two barriers each launch needs one, and does not reach the other."""
    body = EXCHANGE.replace(
        "bar.sync 0;",
        """
        ld.global.u32 %r6, [%rd_out];
        setp.ne.u32 %p0, %r6, 0;
        @%p0 bra OTHER;
        bar.sync 0;
        bra.uni READY;
        OTHER: bar.sync 0;
        READY:
        """,
    )
    text = source(TID + body, {"out": None}, shared=1024)

    def subject(first):
        return Replay(setup(text, [np.full(64, first, np.uint32)]))

    def verdicts_of(*subjects):
        _, results = mutate(subjects[0], also=subjects[1:])
        return [(result.verdict, result.launch) for result in results]

    assert verdicts_of(subject(0)) == [("caught", 0), ("not reached", None)]
    assert verdicts_of(subject(1)) == [("not reached", None), ("caught", 0)]
    assert verdicts_of(subject(0), subject(1)) == [("caught", 0), ("caught", 1)]


def test_launches_of_other_kernels_are_refused():
    def subject(body):
        return Replay(setup(source(TID + body, {"out": None}, shared=1024), ZEROS))

    with pytest.raises(LaunchError, match="not of one kernel"):
        mutate(subject("bar.sync 0;"), also=[subject("bar.sync 1;")])
