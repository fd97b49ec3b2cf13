"""TMEM: what orders MMAs, loads, stores and deallocation."""

import pytest
from tests.check.fake_run import STORE, TMEM, FakeOperation, FakeRun, FakeWarp, levels

from ptxemu.machine.state import Ordering

MMA = "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, i, p"
ROWS = [lane * 2048 for lane in range(128)]


def mma(
    run: FakeRun, warp: FakeWarp, *, after: list[FakeOperation] | None = None, text: str = MMA
) -> FakeOperation:
    """An MMA that overwrites TMEM columns 0..63."""
    operation = run.issue(warp, text, kind="tcgen05.mma", ordered_after=after or [])
    run.write(operation, ROWS, 256, space=TMEM)
    return operation


def commit(
    run: FakeRun, warp: FakeWarp, tracked: list[FakeOperation], *, phase: int = 0
) -> FakeOperation:
    operation = run.issue(warp, "tcgen05.commit", ordered_after=tracked)
    run.arrive(operation, phase=phase)
    run.checker.async_completed(operation)
    return operation


def tmem_load(run: FakeRun, warp: FakeWarp) -> FakeOperation:
    operation = run.issue(warp, "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r}, [d]", kind="tcgen05.ld")
    run.read(operation, ROWS[:32], 4, space=TMEM)
    return operation


def test_reading_the_accumulator_before_the_commit_was_waited_for_is_an_error(run: FakeRun) -> None:
    issuer, reader = run.warps
    product = mma(run, issuer)
    commit(run, issuer, [product])
    tmem_load(run, reader)
    (finding,) = run.findings
    assert (finding.code, finding.level) == ("missing-wait", "error")
    assert "needs tcgen05.commit and a wait on its mbarrier" in finding.message
    assert "TMEM of cta (0,0,0) lane 0 column 0" in finding.message


def test_without_the_fence_behind_the_wait_there_is_a_note(run: FakeRun) -> None:
    issuer, reader = run.warps
    commit(run, issuer, [mma(run, issuer)])
    run.wait(reader)
    tmem_load(run, reader)
    assert levels(run) == [("missing-tcgen05-fence", "note")]


@pytest.mark.parametrize("fence", ["none", "too late", "of the third warp", "in time"])
def test_without_the_fence_before_the_arrival_there_is_a_note(fence: str) -> None:
    """A tcgen05.ld is waited for and handed on, by a third warp, to who overwrites the columns."""
    run = FakeRun(warps=3)
    reader, third, issuer = run.warps
    run.access(reader, "tcgen05.st", "write", ROWS[:32], 4, space=TMEM)
    run.join(reader, tmem_load(run, reader))
    if fence == "in time":
        run.fence(reader, "tcgen05.before_thread_sync")
    run.barrier(reader, third)
    if fence == "too late":
        run.fence(reader, "tcgen05.before_thread_sync")
    if fence == "of the third warp":
        run.fence(third, "tcgen05.before_thread_sync")
    run.barrier(third, issuer, number=1)
    run.fence(issuer, "tcgen05.after_thread_sync")
    store = run.issue(issuer, "tcgen05.st.sync.aligned [a], {r}", kind="tcgen05.st")
    run.write(store, ROWS[:32], 4, space=TMEM)
    if fence in ("none", "too late"):
        assert levels(run) == [("missing-tcgen05-fence", "note")]
        assert "needs tcgen05.fence::before_thread_sync" in run.findings[0].message
    else:
        assert levels(run) == []


def test_a_commit_includes_what_earlier_commits_of_its_thread_tracked(run: FakeRun) -> None:
    issuer, reader = run.warps
    first = commit(run, issuer, [mma(run, issuer)])
    commit(run, issuer, [first], phase=1)
    run.wait(reader, phase=1)
    run.fence(reader, "tcgen05.after_thread_sync")
    tmem_load(run, reader)
    assert run.codes == []


@pytest.mark.parametrize("synchronised", [True, False])
def test_mmas_of_two_threads_are_in_order_only_if_the_threads_synchronise(
    run: FakeRun, synchronised: bool
) -> None:
    one, other = run.warps
    first = mma(run, one)
    if synchronised:
        run.barrier(one, other)
        run.fence(other, "tcgen05.after_thread_sync")
    second = FakeOperation(99, "tcgen05.mma", other, run.instruction("tcgen05.mma of other"))
    second.ordering = Ordering(if_synced=[first])  # type: ignore[list-item]
    run.checker.async_issued(second, other)
    run.write(second, ROWS, 256, space=TMEM)
    assert run.codes == ([] if synchronised else ["unordered-mma"])


@pytest.mark.parametrize("waited", [True, False])
def test_an_mma_may_overwrite_what_ld_read_behind_wait_ld(run: FakeRun, waited: bool) -> None:
    issuer, reader = run.warps
    first = mma(run, issuer)
    commit(run, issuer, [first])
    run.wait(reader)
    run.fence(reader, "tcgen05.after_thread_sync")
    load = tmem_load(run, reader)
    if waited:
        run.join(reader, load)
    run.fence(reader, "tcgen05.before_thread_sync")
    run.barrier(reader, issuer)
    run.fence(issuer, "tcgen05.after_thread_sync")
    mma(run, issuer, after=[first])
    assert run.codes == ([] if waited else ["missing-tcgen05-wait"])


def test_accumulating_into_cells_that_nobody_wrote_is_an_error(run: FakeRun) -> None:
    product = run.issue(run.warps[0], MMA, kind="tcgen05.mma")
    run.read(product, ROWS, 256, space=TMEM)
    run.write(product, ROWS, 256, space=TMEM)
    run.finish()
    assert levels(run) == [("uninitialised-tmem-read", "error")]


def test_loading_cells_that_nobody_wrote_is_a_warning(run: FakeRun) -> None:
    tmem_load(run, run.warps[0])
    run.finish()
    assert levels(run) == [("uninitialised-tmem-read", "warning")]


def test_reading_shared_memory_that_nobody_writes_is_reported_when_its_cluster_is_gone(
    run: FakeRun,
) -> None:
    a, b = run.warps
    run.read(a, [0x400, 0x500])
    operation = run.issue(a, STORE)
    run.read(operation, 0x500)
    run.write(b, 0x400)
    assert run.codes == ["race"]
    run.exit(run.ctas[0])
    run.checker.async_completed(operation)
    assert ("uninitialised-read", "warning") in levels(run)
    assert ("uninitialised-async-read", "warning") in levels(run)
    assert all("0x500" in f.message for f in run.findings if "uninit" in f.code)


def test_dealloc_while_another_warp_still_loads_is_an_error(run: FakeRun) -> None:
    a, b = run.warps
    run.access(a, "tcgen05.st", "write", ROWS, 128, space=TMEM)
    run.barrier(a, b)
    load = tmem_load(run, b)
    run.join(b, load)
    run.access(a, "tcgen05.dealloc [d], 32", "write", ROWS, 128, space=TMEM)
    assert ("tmem-dealloc-race", "error") in levels(run)


def test_lanes_of_tmem_are_told_apart(run: FakeRun) -> None:
    a, b = run.warps
    for warp, lanes in ((a, ROWS[:32]), (b, ROWS[32:64])):
        store = run.issue(warp, f"tcgen05.st of {warp.index}", kind="tcgen05.st")
        run.write(store, lanes, 64, space=TMEM)
    assert run.codes == []
    store = run.issue(b, "tcgen05.st again", kind="tcgen05.st")
    run.write(store, [ROWS[31] + 60], 4, space=TMEM)
    (finding,) = run.findings
    assert "lane 31 column 15" in finding.message


def test_a_commit_that_nobody_waits_for_is_a_warning(run: FakeRun) -> None:
    commit(run, run.warps[0], [])
    run.exit(run.ctas[0])
    assert levels(run) == [("signal-after-exit", "warning")]


def load_of_a_product(run: FakeRun, issuer: FakeWarp, reader: FakeWarp) -> FakeOperation:
    """A tcgen05.ld behind the commit of the MMA that wrote what it reads."""
    commit(run, issuer, [mma(run, issuer)])
    run.wait(reader)
    run.fence(reader, "tcgen05.after_thread_sync")
    return tmem_load(run, reader)


@pytest.mark.parametrize("how", ["nothing", "touch", "use", "wait"])
def test_an_mma_overwrites_what_was_loaded_behind_wait_ld_only(run: FakeRun, how: str) -> None:
    """PTX ISA, "Register dependencies, same thread": a use of the registers orders no access."""
    reader, issuer = run.warps
    load = load_of_a_product(run, issuer, reader)
    if how == "touch":
        run.touch(reader, load)
    elif how == "use":
        run.use(reader, load)
    elif how == "wait":
        run.join(reader, load)
    run.fence(reader, "tcgen05.before_thread_sync")
    run.barrier(reader, issuer)
    run.fence(issuer, "tcgen05.after_thread_sync")
    mma(run, issuer)
    expected = {
        "nothing": [("missing-tcgen05-wait", "error")],
        "touch": [("late-tmem-read", "error")],
        "use": [("tmem-load-not-waited", "error"), ("tmem-read-by-register", "error")],
        "wait": [],
    }
    assert levels(run) == expected[how]


def test_a_computation_with_registers_orders_a_load_before_the_exit(run: FakeRun) -> None:
    load = load_of_a_product(run, *run.warps)
    run.touch(run.warps[1], load)
    run.exit(run.ctas[0])
    assert run.codes == []
    again = FakeRun()
    load_of_a_product(again, *again.warps)
    again.exit(again.ctas[0])
    assert again.codes == ["read-after-exit"]


@pytest.mark.parametrize("waited", [True, False])
def test_a_peer_waits_for_each_commit_that_arrives_in_its_shared_memory(waited: bool) -> None:
    """That a later commit has arrived says that the products are done, not that the earlier
    commit's signal has reached the peer."""
    run = FakeRun(ctas=2, warps=1)
    issuer, peer = run.warps
    product = mma(run, issuer)
    run.checker.async_completed(product)
    before: list[FakeOperation] = [product]
    for phase in range(2):
        operation = FakeOperation(50 + phase, "tcgen05.commit", issuer, run.instruction("commit"))
        operation.mbarriers = tuple((cta.index, 8 * phase) for cta in run.ctas)
        operation.ordering = Ordering(before)  # type: ignore[arg-type]
        run.checker.async_issued(operation, issuer)
        for cta in run.ctas:
            run.arrive(operation, cta=cta.index, offset=8 * phase)
        run.checker.async_completed(operation)
        before = [operation]
    for warp in (issuer, peer):
        if waited or warp is issuer:
            run.wait(warp, cta=warp.cta.index, offset=0)
        run.wait(warp, cta=warp.cta.index, offset=8)
    for cta in run.ctas:
        run.exit(cta)
    assert run.codes == ([] if waited else ["signal-after-exit"])


@pytest.mark.parametrize("read", [True, False])
def test_a_product_over_part_of_a_result_that_nobody_has_read_is_a_finding(
    run: FakeRun, read: bool
) -> None:
    issuer = run.warps[0]
    product = mma(run, issuer)
    run.checker.async_completed(product)
    commit(run, issuer, [product])
    run.wait(issuer)
    if read:
        everything = run.issue(issuer, "tcgen05.ld of all [d]", kind="tcgen05.ld")
        run.read(everything, ROWS, 256, space=TMEM)
        run.join(issuer, everything)
    other = run.issue(issuer, "tcgen05.mma to column 32", kind="tcgen05.mma")
    run.write(other, [row + 128 for row in ROWS], 256, space=TMEM)
    found = [level for level in levels(run) if level[0] == "tmem-overlap"]
    assert found == ([] if read else [("tmem-overlap", "warning")])
