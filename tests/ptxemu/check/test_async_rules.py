"""Asynchronous operations: proxies, completion, mbarrier objects, TMEM, lifetimes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ptxemu.events import Access, AccessKind, Proxy
from tests.ptxemu.check.fake_run import GLOBAL, SHARED, TMEM, FakeOperation, FakeRun, FakeWarp

STORE = "cp.async.bulk.global.shared::cta.bulk_group [out], [buf], 64"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier [buf], [in], 64, [bar]"


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


def levels(run: FakeRun) -> list[tuple[str, str]]:
    return [(finding.code, finding.level) for finding in run.findings]


def load_tile(run: FakeRun, warp: FakeWarp, *, phase: int = 0) -> FakeOperation:
    """A bulk load into 0x800 that completes phase `phase` of the mbarrier at 0."""
    operation = run.issue(warp, LOAD)
    run.write(operation, 0x800, 64)
    run.arrive(operation, phase=phase)
    run.checker.async_completed(operation)
    return operation


# generic -> async


@pytest.mark.parametrize("kind", ["proxy.async", "proxy.async.shared::cta"])
@pytest.mark.parametrize("fencer", ["writer", "issuer"])
def test_fence_before_or_behind_the_barrier_lets_a_bulk_store_read(
    run: FakeRun, fencer: str, kind: str
) -> None:
    a, b = run.warps
    run.write(a, list(range(0x800, 0x840, 4)))
    if fencer == "writer":
        run.fence(a, kind)
    run.barrier(a, b)
    if fencer == "issuer":
        run.fence(b, kind)
    operation = run.issue(b, STORE)
    run.read(operation, 0x800, 64)
    assert run.codes == []


@pytest.mark.parametrize("fence", [None, "proxy.async.global", "acq_rel.cta", "mbarrier_init"])
def test_without_the_right_fence_the_bulk_store_is_an_error(
    run: FakeRun, fence: str | None
) -> None:
    a, b = run.warps
    run.write(a, list(range(0x800, 0x840, 4)))
    if fence is not None:
        run.fence(a, fence)
    run.barrier(a, b)
    operation = run.issue(b, STORE)
    run.read(operation, 0x800, 64)
    (finding,) = run.findings
    assert (finding.code, finding.level) == ("missing-proxy-fence", "error")
    assert "needs fence.proxy.async, between PTX line 10" in finding.message
    assert finding.second is not None
    assert finding.second.agent.endswith("issued by cta (0,0,0) warp 1")


def test_a_write_behind_the_fence_needs_another_one(run: FakeRun) -> None:
    a, b = run.warps
    run.fence(a, "proxy.async")
    run.write(a, 0x800)
    run.barrier(a, b)
    run.read(run.issue(b, STORE), 0x800)
    assert run.codes == ["missing-proxy-fence"]


def test_a_fence_without_a_barrier_is_a_race(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    run.read(run.issue(b, STORE), 0x800)
    assert run.codes == ["race"]


def test_refilling_what_was_written_without_fence_is_an_error_and_what_was_read_a_warning(
    run: FakeRun,
) -> None:
    a, b = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    run.read(a, 0x800)
    run.write(b, 0x900)
    run.barrier(a, b)
    operation = run.issue(b, LOAD)
    run.write(operation, 0x800, 16)
    run.write(operation, 0x900, 16)
    assert sorted(levels(run)) == [
        ("missing-proxy-fence", "error"),
        ("missing-proxy-fence-after-read", "warning"),
    ]


def test_refilling_before_the_reader_is_done_is_a_race(run: FakeRun) -> None:
    a, b = run.warps
    load_tile(run, b)
    run.wait(a)
    run.read(a, 0x800)
    operation = run.issue(b, LOAD)
    run.write(operation, 0x800, 64)
    assert "race" in run.codes


def test_global_memory_needs_the_fence_too(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x10000, space=GLOBAL)
    run.fence(a, "proxy.async.shared::cta")
    run.barrier(a, b)
    run.read(run.issue(b, LOAD), 0x10000, space=GLOBAL)
    assert run.codes == ["missing-proxy-fence"]
    run.fence(b, "proxy.async.global")
    run.read(run.issue(b, LOAD), 0x10000, space=GLOBAL)
    assert run.findings[0].count == 1


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("acquired", [True, False])
def test_tensor_maps_need_the_tensormap_fences(
    run: FakeRun, released: bool, acquired: bool
) -> None:
    a, b = run.warps

    def use_map() -> None:
        operation = run.issue(b, LOAD)
        run.checker.accessed(
            Access(
                operation,
                GLOBAL,
                None,
                np.array([0x3000]),
                128,
                AccessKind.READ,
                Proxy.TENSORMAP,
                operation.instruction,
            )
        )

    run.write(a, 0x3000, space=GLOBAL)
    if released:
        run.fence(a, "proxy.tensormap::generic.release.gpu")
    run.barrier(a, b)
    if acquired:
        run.fence(b, "proxy.tensormap::generic.acquire.gpu")
    use_map()
    assert run.codes == ([] if released and acquired else ["missing-tensormap-fence"])
    if not (released and acquired):
        assert f"generic.{'acquire' if released else 'release'} by" in run.findings[0].message


# completion


def test_a_load_is_read_behind_its_mbarrier(run: FakeRun) -> None:
    a, b = run.warps
    load_tile(run, a)
    run.wait(b)
    run.read(b, 0x800)
    assert run.codes == []


@pytest.mark.parametrize("reader_is_early", [False, True])
def test_reading_a_load_without_the_wait_names_the_load_first(
    run: FakeRun, reader_is_early: bool
) -> None:
    a, b = run.warps
    run.write(b, 0x800)
    run.fence(b, "proxy.async")
    run.barrier(a, b)
    operation = run.issue(a, LOAD)
    if reader_is_early:
        run.read(b, 0x800)
    run.write(operation, 0x800, 64)
    run.arrive(operation)
    if not reader_is_early:
        run.read(b, 0x800)
    (finding,) = run.findings
    assert finding.code == "missing-wait"
    assert "needs a wait on the mbarrier" in finding.message
    assert finding.first is not None and finding.first.instruction == LOAD


@pytest.mark.parametrize("joined", [None, "reads", "all"])
def test_the_source_of_a_bulk_store_may_change_behind_wait_group_read(
    run: FakeRun, joined: str | None
) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    operation = run.issue(a, STORE)
    if joined is None:
        run.write(a, 0x800)  # even before the operation has read
    run.read(operation, 0x800, 4)
    if joined is not None:
        run.join(a, operation, reads=joined == "reads")
        run.write(a, 0x800)
        assert run.codes == []
        return
    (finding,) = run.findings
    assert finding.code == "missing-wait"
    assert "needs cp.async.bulk.wait_group.read, between" in finding.message


def test_wait_group_read_does_not_complete_the_write(run: FakeRun) -> None:
    a, _ = run.warps
    operation = run.issue(a, STORE)
    run.write(operation, 0x10000, 64, space=GLOBAL)
    run.join(a, operation, reads=True)
    run.read(a, 0x10000, space=GLOBAL)
    assert run.codes == ["missing-wait"]


def test_wait_group_counts_for_other_warps_only_behind_a_barrier(run: FakeRun) -> None:
    a, b = run.warps
    operation = run.issue(a, STORE)
    run.write(run.warps[0], 0x800)
    run.fence(a, "proxy.async")
    operation = run.issue(a, STORE)
    run.read(operation, 0x800, 4)
    run.join(a, operation, reads=True)
    run.barrier(a, b)
    run.write(b, 0x800)
    assert run.codes == []


def test_cp_async_needs_its_wait_and_then_the_fence(run: FakeRun) -> None:
    a, _ = run.warps
    text = "cp.async.ca.shared.global [buf], [in], 16"
    operation = run.issue(a, text, kind="cp.async")
    run.write(operation, 0x800, 16)
    run.read(a, 0x800)
    (finding,) = run.findings
    assert finding.code == "missing-wait" and "cp.async.wait_group" in finding.message
    run.join(a, operation)
    run.read(a, 0x800)
    run.read(run.issue(a, STORE), 0x800, 16)
    assert run.codes == ["missing-wait", "missing-proxy-fence"]
    assert run.findings[0].count == 1
    run.fence(a, "proxy.async")
    run.read(run.issue(a, STORE), 0x800, 16)
    assert run.findings[1].count == 1


def test_operations_order_each_other_through_mbarriers_without_fence(run: FakeRun) -> None:
    loader, mma = run.warps
    load_tile(run, loader)
    run.wait(mma)
    product = run.issue(mma, "wgmma.mma_async", kind="wgmma")
    run.read(product, 0x800, 64)
    run.join(mma, product)
    run.arrive(mma, offset=8)
    run.wait(loader, offset=8)
    load_tile(run, loader, phase=1)
    assert run.codes == []


def test_refilling_before_the_product_is_waited_for_is_an_error(run: FakeRun) -> None:
    loader, mma = run.warps
    load_tile(run, loader)
    run.wait(mma)
    product = run.issue(mma, "wgmma.mma_async", kind="wgmma")
    run.read(product, 0x800, 64)
    run.arrive(mma, offset=8)
    run.wait(loader, offset=8)
    load_tile(run, loader, phase=1)
    (finding,) = run.findings
    assert finding.code == "missing-wait" and "needs wgmma.wait_group" in finding.message


# mbarrier objects


def init_mbarrier(run: FakeRun, warp: FakeWarp) -> None:
    run.access(warp, "mbarrier.init.shared.b64 [bar], 1", "write", 0x400, 8)


@pytest.mark.parametrize("fence", ["mbarrier_init", "proxy.async", None])
def test_the_async_proxy_needs_a_fence_behind_mbarrier_init(
    run: FakeRun, fence: str | None
) -> None:
    a, b = run.warps
    init_mbarrier(run, a)
    if fence is not None:
        run.fence(a, fence)
    run.barrier(a, b)
    run.arrive(b, offset=0x400)
    operation = run.issue(b, LOAD)
    run.arrive(operation, offset=0x400)
    run.wait(a, offset=0x400)
    run.checker.async_completed(operation)
    assert levels(run) == ([] if fence else [("missing-mbarrier-init-fence", "warning")])


@pytest.mark.parametrize("fence", [True, False])
def test_a_relaxed_cluster_barrier_orders_inits_behind_their_fence(fence: bool) -> None:
    run = FakeRun(ctas=2, warps=1)
    a, b = run.warps
    init_mbarrier(run, a)
    if fence:
        run.fence(a, "mbarrier_init")
    run.cluster_barrier(relaxed=True)
    run.access(b, "mbarrier.arrive", "atomic", 0x400, 8, owner=0, order="relaxed")
    run.arrive(b, offset=0x400)
    run.wait(a, offset=0x400)
    assert levels(run) == ([] if fence else [("missing-mbarrier-init-fence", "error")])


def test_a_relaxed_cluster_barrier_orders_nothing_else() -> None:
    run = FakeRun(ctas=2, warps=1)
    a, b = run.warps
    run.write(a, 0x800)
    run.fence(a, "mbarrier_init")
    run.cluster_barrier(relaxed=True)
    run.read(b, 0x800, owner=0)
    run.wait(a)
    assert run.codes[0] == "race"


def test_using_an_mbarrier_without_barrier_behind_its_init_is_a_race(run: FakeRun) -> None:
    a, b = run.warps
    init_mbarrier(run, a)
    run.wait(b, offset=0x400)
    assert run.codes == ["race"]


def test_plain_accesses_to_an_mbarrier_are_errors_until_it_is_invalidated(run: FakeRun) -> None:
    a, _ = run.warps
    init_mbarrier(run, a)
    run.read(a, 0x404)
    assert levels(run) == [("mbarrier-access", "error")]
    run.access(a, "mbarrier.inval [bar]", "write", 0x400, 8)
    run.write(a, 0x404)
    assert run.findings[0].count == 1


@pytest.mark.parametrize(
    "tx, pending, code",
    [(0, 2, None), (64, 2, "mbarrier-tx-left"), (0, 1, "mbarrier-arrivals-left")],
)
def test_mbarriers_are_looked_at_when_all_is_over(
    run: FakeRun, tx: int, pending: int, code: str | None
) -> None:
    barrier = SimpleNamespace(tx_count=tx, pending=pending, expected=2, phase=3)
    run.ctas[0].engines["mbarrier"] = SimpleNamespace(by_offset={0x400: barrier})
    run.exit(run.ctas[0])
    run.finish()
    assert levels(run) == ([] if code is None else [(code, "warning")])


# tcgen05

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


def test_the_accumulator_is_read_behind_commit_and_wait(run: FakeRun) -> None:
    issuer, reader = run.warps
    product = mma(run, issuer)
    run.checker.async_completed(product)
    commit(run, issuer, [product])
    run.wait(reader)
    run.fence(reader, "tcgen05.after_thread_sync")
    tmem_load(run, reader)
    assert run.codes == []


def test_reading_the_accumulator_before_the_commit_was_waited_for_is_an_error(
    run: FakeRun,
) -> None:
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


def test_a_commit_includes_what_earlier_commits_of_its_thread_tracked(run: FakeRun) -> None:
    issuer, reader = run.warps
    first = commit(run, issuer, [mma(run, issuer)])
    commit(run, issuer, [first], phase=1)
    run.wait(reader, phase=1)
    run.fence(reader, "tcgen05.after_thread_sync")
    tmem_load(run, reader)
    assert run.codes == []


def test_mmas_that_the_isa_pipelines_are_in_order_and_others_are_not(run: FakeRun) -> None:
    issuer = run.warps[0]
    first = mma(run, issuer)
    mma(run, issuer, after=[first])
    assert run.codes == []
    mma(run, issuer, text=MMA.replace("f16", "tf32"))
    assert levels(run) == [("unordered-mma", "error")]
    assert "one accumulator" in run.findings[0].message


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
    second.details.update(ordered_after=[], ordered_if_synced=[first])
    run.checker.async_issued(second, other)
    run.write(second, ROWS, 256, space=TMEM)
    assert run.codes == ([] if synchronised else ["unordered-mma"])


@pytest.mark.parametrize("waited", [True, False])
def test_an_mma_may_read_what_st_wrote_behind_wait_st(run: FakeRun, waited: bool) -> None:
    writer, issuer = run.warps
    store = run.issue(writer, "tcgen05.st.sync.aligned [a], {r}", kind="tcgen05.st")
    run.write(store, ROWS[:32], 256, space=TMEM)
    if waited:
        run.join(writer, store)
    run.barrier(writer, issuer)
    run.fence(issuer, "tcgen05.after_thread_sync")
    product = run.issue(issuer, MMA, kind="tcgen05.mma")
    run.read(product, ROWS[:32], 256, space=TMEM)
    assert run.codes == ([] if waited else ["missing-tcgen05-wait"])
    assert waited or "needs tcgen05.wait::st" in run.findings[0].message


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


def test_reading_shared_memory_that_nobody_writes_is_reported_when_its_cluster_is_gone(
    run: FakeRun,
) -> None:
    a, b = run.warps
    run.read(a, [0x400, 0x500])
    run.read(run.issue(a, STORE), 0x500)
    run.write(b, 0x400)
    assert run.codes == ["race"]
    run.exit(run.ctas[0])
    assert ("uninitialised-read", "warning") in levels(run)
    assert ("uninitialised-async-read", "warning") in levels(run)
    assert all("0x500" in f.message for f in run.findings if "uninit" in f.code)


def test_dealloc_while_another_warp_still_loads_is_a_warning(run: FakeRun) -> None:
    a, b = run.warps
    run.access(a, "tcgen05.st", "write", ROWS, 128, space=TMEM)
    run.barrier(a, b)
    load = tmem_load(run, b)
    run.join(b, load)
    run.access(a, "tcgen05.dealloc [d], 32", "write", ROWS, 128, space=TMEM)
    assert ("tmem-dealloc-race", "warning") in levels(run)


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


# lifetimes


@pytest.mark.parametrize("ordered", [True, False])
def test_dsmem_is_accessed_before_its_cta_exits(ordered: bool) -> None:
    run = FakeRun(ctas=2, warps=1)
    a, b = run.warps
    run.write(a, 0x800)
    run.cluster_barrier()
    run.read(b, 0x800, owner=0)
    if ordered:
        run.cluster_barrier(use=1)
    run.exit(run.ctas[0])
    run.exit(run.ctas[1])
    assert levels(run) == ([] if ordered else [("dsmem-exit", "error")])
    assert ordered or "needs a cluster barrier" in run.findings[0].message


def test_dsmem_access_behind_the_exit_is_the_same_error() -> None:
    run = FakeRun(ctas=2, warps=1)
    run.write(run.warps[0], 0x800)
    run.cluster_barrier()
    run.exit(run.ctas[0])
    run.checker.complained("error", "exited-cta", "the machine's words", None, None)
    run.read(run.warps[1], 0x800, owner=0)
    assert levels(run) == [("dsmem-exit", "error")]


@pytest.mark.parametrize("joined", [True, False])
def test_a_bulk_store_must_have_read_before_its_cta_exits(run: FakeRun, joined: bool) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    operation = run.issue(a, STORE)
    run.read(operation, 0x800, 4)
    if joined:
        run.join(a, operation, reads=True)
    run.exit(run.ctas[0])
    assert levels(run) == ([] if joined else [("read-after-exit", "warning")])


def test_a_store_that_reads_behind_the_exit_is_no_uninitialised_read(run: FakeRun) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    operation = run.issue(a, STORE)
    run.exit(run.ctas[0])
    run.read(operation, 0x800, 4)
    run.finish()
    assert run.codes == ["read-after-exit"]


def test_a_load_must_have_written_before_its_cta_exits(run: FakeRun) -> None:
    load_tile(run, run.warps[0])
    run.exit(run.ctas[0])
    assert levels(run) == [("async-after-exit", "error"), ("signal-after-exit", "warning")]


def test_a_commit_that_nobody_waits_for_is_a_warning(run: FakeRun) -> None:
    commit(run, run.warps[0], [])
    run.exit(run.ctas[0])
    assert levels(run) == [("signal-after-exit", "warning")]


def test_complaints_of_the_machine_are_findings_once_an_instruction(run: FakeRun) -> None:
    a, _ = run.warps
    for _ in range(3):
        run.checker.complained("error", "tmem-leak", "64 columns", a, run.instruction("exit"))
    (finding,) = run.findings
    assert (finding.code, finding.level, finding.count) == ("tmem-leak", "error", 3)
    assert "64 columns" in finding.message and "PTX line 10" in finding.message


def test_spaces_that_no_other_agent_sees_are_ignored(run: FakeRun) -> None:
    from ptxemu.events import Space

    a, b = run.warps
    run.write(a, 0x0, space=Space.LOCAL)
    run.read(b, 0x0, space=Space.LOCAL)
    assert run.codes == []
    run.write(a, 0x400, space=SHARED)
    assert run.codes == []
