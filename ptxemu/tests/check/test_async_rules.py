"""Asynchronous operations: proxies, completion, mbarrier objects."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.check.fake_run import GLOBAL, LOAD, STORE, FakeRun, FakeWarp, levels, load_tile

from ptxemu.engines.mbarrier import mbarriers
from ptxemu.events import Access, AccessKind, Proxy

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
                operation, GLOBAL, None, np.array([0x3000]), 128, AccessKind.READ, Proxy.TENSORMAP,
                operation.instruction,
            )
        )  # fmt: skip

    run.write(a, 0x3000, space=GLOBAL)
    if released:
        run.fence(a, "tensormap.release")
    run.barrier(a, b)
    if acquired:
        run.fence(b, "tensormap.acquire")
    use_map()
    assert run.codes == ([] if released and acquired else ["missing-tensormap-fence"])
    if not (released and acquired):
        assert f"generic.{'acquire' if released else 'release'} by" in run.findings[0].message


# completion


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


@pytest.mark.parametrize(
    ("reader", "joined", "expected"),
    [
        ("wgmma.mma_async", False, ("missing-proxy-fence-after-cp-async", "warning")),
        ("tcgen05.mma", False, ("missing-proxy-fence-after-cp-async", "warning")),
        ("tcgen05.cp", False, ("missing-proxy-fence-after-cp-async", "warning")),
        ("wgmma.mma_async", True, ("missing-proxy-fence", "error")),
        ("cp.async.bulk.tensor", False, ("missing-proxy-fence", "error")),
    ],
)
def test_products_read_what_cp_async_arrived_for_without_fence_in_practice(
    run: FakeRun, reader: str, joined: bool, expected: tuple[str, str]
) -> None:
    a, b = run.warps
    copy = run.issue(a, "cp.async.cg.shared.global [buf], [in], 16", kind="cp.async")
    run.write(copy, 0x800, 16)
    text = "cp.async.mbarrier.arrive.noinc.shared.b64 [bar]"
    arrival = run.issue(a, text, kind="cp.async.mbarrier.arrive", ordered_after=[copy])
    run.arrive(arrival)
    if joined:
        run.join(a, copy)
    run.wait(b)
    run.read(run.issue(b, reader, kind=reader.removesuffix("_async")), 0x800, 16)
    assert levels(run) == [expected]


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


def test_a_relaxed_cluster_barrier_orders_nothing_else() -> None:
    run = FakeRun(ctas=2, warps=1)
    a, b = run.warps
    run.write(a, 0x800)
    run.fence(a, "mbarrier_init")
    run.cluster_barrier(relaxed=True)
    run.read(b, 0x800, owner=0)
    run.wait(a)
    assert run.codes[0] == "relaxed-barrier-race"
    assert run.findings[0].kind == "isa"


def test_using_an_mbarrier_without_barrier_behind_its_init_is_a_race(run: FakeRun) -> None:
    a, b = run.warps
    init_mbarrier(run, a)
    run.wait(b, offset=0x400)
    assert run.codes == ["race"]


@pytest.mark.parametrize("ordered", [True, False])
def test_data_may_become_an_mbarrier_once_its_readers_are_done(run: FakeRun, ordered: bool) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.read(a, 0x400)
    if ordered:
        run.barrier(a, b)
    init_mbarrier(run, b)
    assert set(run.codes) == (set() if ordered else {"race"})


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
    run.ctas[0].engines[mbarriers] = SimpleNamespace(by_offset={0x400: barrier})
    run.exit(run.ctas[0])
    run.finish()
    assert levels(run) == ([] if code is None else [(code, "warning")])
