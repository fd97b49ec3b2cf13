"""The canonical patterns of tcgen05: relaxed arrivals and waits with tcgen05 fences around them."""

import pytest
from tests.check.fake_run import LOAD, TMEM, FakeOperation, FakeRun, FakeWarp, levels
from tests.check.test_tcgen05_rules import MMA, commit, mma, tmem_load

BAR = ("mbarrier", 0, 0, 0)


def relaxed_wait(run: FakeRun, warp: FakeWarp) -> None:
    """mbarrier.try_wait.relaxed that succeeds."""
    run.checker.acquired(warp, BAR, "relaxed")


def completed_product(run: FakeRun, warp: FakeWarp) -> FakeOperation:
    """An MMA of operands at 0x800 with its commit."""
    product = mma(run, warp)
    run.access(product, MMA, "read", 0x800, 64)
    run.checker.async_completed(product)
    commit(run, warp, [product])
    return product


@pytest.mark.parametrize("fenced", [True, False])
def test_a_relaxed_wait_for_a_commit_and_a_tcgen05_fence_order_a_load(
    run: FakeRun, fenced: bool
) -> None:
    issuer, reader = run.warps
    run.write(issuer, 0x800, 64)
    run.fence(issuer, "proxy.async")
    completed_product(run, issuer)
    relaxed_wait(run, reader)
    if fenced:
        run.fence(reader, "tcgen05.after_thread_sync")
    tmem_load(run, reader)
    assert levels(run) == ([] if fenced else [("missing-wait", "error")])


@pytest.mark.parametrize("missing", [None, "before_thread_sync", "after_thread_sync"])
def test_tcgen05_fences_around_a_relaxed_handover_order_a_load_before_an_mma(
    run: FakeRun, missing: str | None
) -> None:
    reader, issuer = run.warps
    run.write(reader, [lane * 2048 for lane in range(32)], 4, space=TMEM)
    load = tmem_load(run, reader)
    run.join(reader, load)
    if missing != "before_thread_sync":
        run.fence(reader, "tcgen05.before_thread_sync")
    run.checker.released(reader, BAR, "relaxed")
    relaxed_wait(run, issuer)
    if missing != "after_thread_sync":
        run.fence(issuer, "tcgen05.after_thread_sync")
    operation = run.issue(issuer, MMA, kind="tcgen05.mma", ordered_after=[])
    run.write(operation, [lane * 2048 for lane in range(32)], 4, space=TMEM)
    of_load = [f for f in run.findings if "tcgen05.ld" in f.message]
    assert [f.level for f in of_load] == ([] if missing is None else ["error"])


def test_a_relaxed_wait_knows_that_operands_were_read(run: FakeRun) -> None:
    issuer, producer = run.warps
    run.write(issuer, 0x800, 64)
    run.fence(issuer, "proxy.async")
    run.barrier(issuer, producer)
    completed_product(run, issuer)
    relaxed_wait(run, producer)
    run.write(run.issue(producer, LOAD), 0x800, 64)
    assert levels(run) == []


def test_a_relaxed_wait_for_a_copy_does_not_make_its_data_visible(run: FakeRun) -> None:
    producer, reader = run.warps
    copy = run.issue(producer, LOAD)
    run.write(copy, 0x800, 64)
    run.arrive(copy)
    relaxed_wait(run, reader)
    run.read(reader, 0x800, 64)
    assert levels(run) == [("missing-wait", "error")]


@pytest.mark.parametrize("waited", [True, False])
def test_a_relaxed_arrival_that_was_seen_came_before_the_exit(waited: bool) -> None:
    run = FakeRun(ctas=2, warps=1)
    owner, peer = run.warps
    run.checker.released(peer, BAR, "relaxed")
    if waited:
        relaxed_wait(run, owner)
    run.exit(run.ctas[0])
    assert levels(run) == ([] if waited else [("signal-after-exit", "error")])


@pytest.mark.parametrize("relaxed", [True, False])
def test_a_relaxed_cluster_barrier_does_not_order_arrivals_before_the_exit(relaxed: bool) -> None:
    """PTX ISA, "barrier.cluster": .relaxed says nothing of accesses before it."""
    run = FakeRun(ctas=2, warps=1)
    peer = run.warps[1]
    run.arrive(peer)
    run.cluster_barrier(relaxed=relaxed)
    run.exit(run.ctas[0])
    assert levels(run) == ([("signal-after-exit", "error")] if relaxed else [])
