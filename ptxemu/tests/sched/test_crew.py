"""Clusters of a launch in several processes: the same results, errors and counts as in one."""

import mmap
import os
from dataclasses import replace

import numpy as np
import pytest
from tests.kernel_run import source

from ptxemu import api
from ptxemu.errors import ExecutionError, StepLimitError
from ptxemu.machine.device import device_for
from ptxemu.machine.independence import tie_between_clusters
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched import scheduler
from ptxemu.sched.policy import Policy

CTAS = 9
WORK = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 64, %r0;
shl.b32 %r4, %r0, 2; mov.u32 %r5, smem; add.u32 %r4, %r4, %r5;
mul.wide.u32 %rd0, %r2, 4; add.u64 %rd0, %rd0, %rd_out; add.u32 %r6, %r1, 12; mov.u32 %r3, %r2;
LOOP: mad.lo.u32 %r3, %r3, 1664525, 1013904223; st.shared.u32 [%r4], %r3; bar.sync 0;
xor.b32 %r7, %r4, 128; ld.shared.u32 %r8, [%r7]; mad.lo.u32 %r3, %r3, 3, %r8; bar.sync 0;
sub.u32 %r6, %r6, 1; setp.ne.u32 %p0, %r6, 0; @%p0 bra LOOP; st.global.u32 [%rd0], %r3;
"""
"""Two warps a CTA, more rounds in later ones."""
FEW = 32
"""Steps before clusters are dealt, here."""


@pytest.fixture(autouse=True)
def deal_early(monkeypatch):
    monkeypatch.setattr(scheduler, "STEPS_BEFORE", FEW)
    monkeypatch.setattr(scheduler, "STEPS_BETWEEN_COUNTS", FEW)


@pytest.fixture
def forks(monkeypatch):
    """How many processes were made."""
    made = []
    fork = os.fork

    def counted():
        process = fork()
        made.append(process)
        return process

    monkeypatch.setattr(os, "fork", counted)
    return made


def launch(body=WORK, *, grid=CTAS, sms=4, cluster=None, check=False, on_progress=None, **policy):
    out = np.zeros(64 * CTAS + 16, np.uint32)
    module = api.load(source(body, ["out"], shared=256))
    module.device = replace(device_for("sm_90a"), num_sms=sms)
    result = module.launch(
        "k", grid, 64, args=[out], cluster=cluster, check=check, policy=Policy(**policy),
        on_progress=on_progress,
    )  # fmt: skip
    return out, result


@pytest.mark.parametrize("sms", [2, 16])
@pytest.mark.parametrize("processes", [2, 3, 20])
def test_results_and_counts_do_not_depend_on_the_number_of_processes(processes, sms, forks):
    alone, one = launch(sms=sms)
    assert not forks
    assert len(np.unique(alone)) > 100
    dealt, several = launch(sms=sms, processes=processes)
    assert len(forks) == min(processes, CTAS) - 1
    np.testing.assert_array_equal(dealt, alone)
    assert several.warp_instructions == one.warp_instructions


def test_clusters_stay_together(forks):
    body = WORK + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    alone, one = launch(body, grid=8, cluster=2)
    dealt, several = launch(body, grid=8, cluster=2, processes=3)
    assert len(forks) == 2
    np.testing.assert_array_equal(dealt, alone)
    assert several.warp_instructions == one.warp_instructions


def test_memory_that_processes_share_is_written_in_place(forks):
    size = 4 * (64 * CTAS + 16)
    shared = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = GlobalMemory()
    memory.register(shared, "shared", is_shared=True)
    module = api.load(source(WORK, ["out"], shared=256))
    module.launch("k", CTAS, 64, args=[shared], memory=memory, policy=Policy(processes=2))
    assert len(forks) == 1
    np.testing.assert_array_equal(shared.view(np.uint32), launch()[0])


def assert_none_is_left(forks):
    """All have been waited for; the process may have other children, of other tests."""
    assert forks
    for child in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_error_of_another_process_is_raised_here(forks):
    body = WORK.replace("st.global.u32 [%rd0]", "st.global.u32 [%rd0+4096]")
    with pytest.raises(ExecutionError, match="illegal global address") as alone:
        launch(body, sms=1)
    with pytest.raises(ExecutionError, match="illegal global address") as dealt:
        launch(body, sms=1, processes=CTAS)
    assert type(dealt.value) is type(alone.value) and len(forks) == CTAS - 1
    assert_none_is_left(forks)


def test_the_limit_counts_what_all_processes_execute(forks):
    _, one = launch()
    launch(processes=3, limit=one.warp_instructions)
    endless = WORK.replace("setp.ne.u32 %p0, %r6, 0;", "setp.ne.u32 %p0, %r6, 1000000;")
    with pytest.raises(StepLimitError):
        launch(endless, processes=3, limit=20_000)
    assert_none_is_left(forks)


def test_progress_counts_all_processes():
    seen = []
    _, one = launch(processes=3, on_progress=seen.append)
    assert all(now.clusters == CTAS for now in seen)
    assert seen[-1].finished == CTAS
    assert seen[-1].warp_instructions == one.warp_instructions
    assert max(now.finished for now in seen) == CTAS


@pytest.mark.parametrize(
    ("why", "addition", "check"),
    [("the check listens", "", True), ("atomics", "red.global.add.u32 [%rd_out], 0;", False)],
)
def test_one_process_where_clusters_are_not_independent(why, addition, check, forks):
    launch(addition + WORK, processes=4, check=check)
    assert not forks, why


@pytest.mark.parametrize(
    ("instruction", "is_tie"),
    [
        ("atom.global.add.u32 %r0, [%rd0], 1;", True),
        ("atom.add.u32 %r0, [%rd0], 1;", True),
        ("atom.shared.add.u32 %r0, [%r1], 1;", False),
        ("red.release.gpu.global.add.u32 [%rd0], 1;", True),
        ("ld.volatile.global.u32 %r0, [%rd0];", True),
        ("ld.acquire.gpu.u32 %r0, [%rd0];", True),
        ("ld.global.cg.u32 %r0, [%rd0];", True),
        ("ld.acquire.cta.global.u32 %r0, [%rd0];", False),
        ("ld.volatile.shared.u32 %r0, [%r1];", False),
        ("ld.global.nc.u32 %r0, [%rd0];", False),
        ("st.release.gpu.global.u32 [%rd0], %r0;", True),
        ("st.global.u32 [%rd0], %r0;", False),
        ("mov.u32 %r0, %envreg1;", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd0], [%r1], 16;", True),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 16;", False),
        ("fence.acq_rel.gpu;", False),
    ],
)
def test_what_ties_clusters(instruction, is_tie):
    text = source(instruction + " mov.u32 %r0, 0; mov.u64 %rd0, 0; mov.u32 %r1, 0;")
    kernel = api.load(text).syntax.kernels["k"]
    assert (tie_between_clusters(kernel) is not None) == is_tie


def test_a_call_that_prints_is_a_tie():
    before = """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 1 .b8 text[2] = {65, 0};
"""
    body = """mov.u64 %rd0, text; mov.u64 %rd1, 0;
{ .param .b64 a0; .param .b64 a1; st.param.b64 [a0], %rd0; st.param.b64 [a1], %rd1;
.param .b32 r0; call.uni (r0), vprintf, (a0, a1); }"""
    kernel = api.load(source(body, before=before)).syntax.kernels["k"]
    assert tie_between_clusters(kernel) is not None
