"""Lifetimes: exits of CTAs, copies nobody waits for, complaints of the machine."""

import pytest
from tests.check.fake_run import SHARED, STORE, FakeRun, levels, load_tile


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


@pytest.mark.parametrize("entered", [True, False])
def test_dsmem_is_accessed_after_its_cta_has_started(entered: bool) -> None:
    run = FakeRun(ctas=2, warps=1)
    if entered:
        run.cluster_barrier()
    run.write(run.warps[1], 0x800, owner=0)
    run.cluster_barrier(use=1)
    assert levels(run) == ([] if entered else [("dsmem-entry", "error")])
    assert entered or "may not have started" in run.findings[0].message


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


def test_a_store_that_reads_behind_the_exit_is_an_error_once_another_cta_has_the_room(
    run: FakeRun,
) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    operation = run.issue(a, STORE)
    run.read(operation, 0x800, 4)
    run.exit(run.ctas[0])
    assert levels(run) == [("read-after-exit", "warning")]
    run.start_cluster(1)
    assert levels(run) == [("read-after-exit", "error")]
    assert "needs cp.async.bulk.wait_group.read before the exit" in run.findings[0].message


def test_a_store_that_reads_behind_the_exit_still_needs_its_proxy_fence(run: FakeRun) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    operation = run.issue(a, STORE)
    run.exit(run.ctas[0])
    run.read(operation, 0x800, 4)
    run.checker.async_completed(operation)
    assert sorted(run.codes) == ["missing-proxy-fence", "read-after-exit"]


def test_a_product_that_reads_behind_the_exit_is_an_error(run: FakeRun) -> None:
    a, _ = run.warps
    run.write(a, 0x800)
    run.fence(a, "proxy.async")
    run.read(run.issue(a, "wgmma.mma_async [buf]", kind="wgmma"), 0x800, 4)
    run.exit(run.ctas[0])
    assert levels(run) == [("async-after-exit", "error")]
    assert "needs wgmma.wait_group before the exit" in run.findings[0].message


def test_a_load_must_have_written_before_its_cta_exits(run: FakeRun) -> None:
    load_tile(run, run.warps[0])
    run.exit(run.ctas[0])
    assert levels(run) == [("async-after-exit", "error"), ("signal-after-exit", "warning")]


@pytest.mark.parametrize("joined", [True, False])
def test_own_cp_async_behind_the_exit_is_a_warning(run: FakeRun, joined: bool) -> None:
    a, _ = run.warps
    operation = run.issue(a, "cp.async.cg.shared.global [buf], [in], 16", kind="cp.async")
    run.write(operation, 0x800, 16)
    if joined:
        run.join(a, operation)
    run.exit(run.ctas[0])
    assert levels(run) == ([] if joined else [("async-after-exit", "warning")])


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
