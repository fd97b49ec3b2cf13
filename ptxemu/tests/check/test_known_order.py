"""What a warp knows of an operation, what it issues later knows too, and nothing else does."""

from tests.check.fake_run import LOAD, STORE, TMEM, FakeRun, load_tile

MMA = "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, idesc, p"


def test_later_operations_of_the_warp_know_of_the_load_too(run: FakeRun) -> None:
    a, b = run.warps
    load_tile(run, a)
    run.wait(b)
    for _ in range(2):
        run.read(run.issue(b, STORE), 0x800, 64)
    assert run.codes == []


def test_an_operation_issued_before_the_wait_does_not_know_of_it(run: FakeRun) -> None:
    a, b = run.warps
    early = run.issue(b, STORE)
    load_tile(run, a)
    run.wait(b)
    run.read(run.issue(b, STORE), 0x800, 64)
    run.read(early, 0x800, 64)
    assert run.codes == ["missing-wait"]


def test_another_warp_does_not_know_of_it(run: FakeRun) -> None:
    a, b = run.warps
    load_tile(run, a)
    run.wait(b)
    run.read(run.issue(b, STORE), 0x800, 64)
    run.read(run.issue(a, STORE), 0x800, 64)
    assert run.codes == ["missing-wait"]


def test_the_next_load_of_the_same_bytes_is_another_one(run: FakeRun) -> None:
    a, b = run.warps
    load_tile(run, a)
    run.wait(b)
    store = run.issue(b, STORE)
    run.read(store, 0x800, 64)
    run.join(b, store)
    run.barrier(a, b)
    load_tile(run, a, phase=1)
    run.read(run.issue(b, STORE), 0x800, 64)
    assert run.codes == ["missing-wait"]


def test_what_only_the_order_of_operations_tells_is_no_news_for_their_warp(run: FakeRun) -> None:
    a, b = run.warps
    load = run.issue(a, LOAD)
    run.write(load, 0x800, 64)
    ordered = run.issue(b, MMA, ordered_after=[load])
    run.read(ordered, 0x800, 64)
    run.read(run.issue(b, STORE), 0x800, 64)
    assert run.codes == ["missing-wait"]


def test_in_tensor_memory_the_order_is_asked_each_time(run: FakeRun) -> None:
    a, _ = run.warps
    first = run.issue(a, MMA, kind="tcgen05.mma")
    run.write(first, [0, 2048], 128, space=TMEM)
    ordered = run.issue(a, MMA, kind="tcgen05.mma", ordered_after=[first])
    run.read(ordered, [0, 2048], 128, space=TMEM)
    run.write(ordered, [0, 2048], 128, space=TMEM)
    assert run.codes == []
    run.read(run.issue(a, MMA, kind="tcgen05.mma"), [0, 2048], 128, space=TMEM)
    assert run.codes == ["unordered-mma"]
