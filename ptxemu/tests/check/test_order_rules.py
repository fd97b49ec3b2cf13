"""Happens-before of generic accesses: barriers, mbarriers, flags; bytes, words and pages."""

import json

import pytest
from tests.check.fake_run import GLOBAL, FakeRun


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


def test_write_then_read_without_barrier_is_one_error_that_names_both(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, [0x400, 0x404])
    run.read(b, [0x404, 0x408])
    run.finish()
    (race, uninitialised) = run.findings
    assert (race.code, race.level, race.count) == ("race", "error", 1)
    assert race.first is not None and race.second is not None
    assert (race.first.warp, race.first.ptx_line, race.first.source_line) == (0, 10, 1)
    assert (race.second.warp, race.second.ptx_line, race.second.action) == (1, 20, "generic read")
    assert "\n" not in race.message
    for part in ("kernel fake", "cta (0,0,0) warp 1", "PTX line 10", "kernel.py:2", "0x404"):
        assert part in race.message
    assert "needs a barrier" in race.message
    assert uninitialised.code == "uninitialised-read" and "0x408" in uninitialised.message


def test_findings_are_json(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.read(b, 0x400)
    (finding,) = run.findings
    data = json.loads(json.dumps(finding.to_json_dict()))
    assert data["first"]["cta"] == [0, 0, 0] and data["level"] == "error"


def test_repetitions_of_a_pair_of_instructions_only_count(run: FakeRun) -> None:
    a, b = run.warps
    for word in range(5):
        run.barrier(a, b, use=word)
        run.write(a, [0x400, 0x404])
        run.read(b, [0x400, 0x404])
    (finding,) = run.findings
    assert finding.count == 5


@pytest.mark.parametrize("fixed, code", [(True, "same-value-race"), (False, "race")])
def test_two_warps_that_write_the_same_value_race_unless_no_data_decide_it(
    fixed: bool, code: str
) -> None:
    run = FakeRun(fixed_values=fixed)
    a, b = run.warps
    run.write(a, 0x400)
    run.access(b, "st.b32", "write", 0x400, is_silent=True)
    assert run.codes == [code]


@pytest.mark.parametrize("second", ["read", "write"])
def test_a_barrier_orders(run: FakeRun, second: str) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.barrier(a, b)
    getattr(run, second)(b, 0x400)
    assert run.codes == []


def test_what_follows_the_barrier_is_not_ordered_by_it(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.barrier(a, b)
    run.write(a, 0x400)
    run.read(b, 0x400)
    assert run.codes == ["race"]


def test_overwriting_what_another_warp_may_still_read_is_a_race(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.barrier(a, b)
    run.read(b, 0x400)
    run.write(a, 0x400)
    assert run.codes == ["race"]
    run.barrier(a, b, use=1)
    run.write(a, 0x400)
    assert run.findings[0].count == 1


def test_order_is_transitive_through_a_third_warp() -> None:
    run = FakeRun(warps=3)
    a, b, c = run.warps
    run.write(a, 0x400)
    run.barrier(a, b, number=1)
    run.barrier(b, c, number=2)
    run.read(c, 0x400)
    assert run.codes == []


def test_all_readers_must_be_waited_for_before_a_write() -> None:
    run = FakeRun(warps=4)
    writer, *readers = run.warps
    run.write(writer, 0x400)
    run.barrier(*run.warps)
    for reader in readers:
        run.read(reader, 0x400)
    run.barrier(writer, readers[0], readers[2], use=1)
    run.write(writer, 0x400)
    (finding,) = run.findings
    assert finding.first is not None and finding.first.warp == readers[1].index


def test_what_a_lane_does_in_its_order_and_reads_never_race(run: FakeRun) -> None:
    a, b = run.warps
    own = [0x400 + 4 * lane for lane in range(32)]
    run.write(a, own)
    run.write(a, own)
    run.barrier(a, b)
    run.read(a, 0x400)
    run.read(b, 0x400)
    assert run.codes == []


def test_two_warps_may_write_different_halves_and_bytes_of_a_word(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, [0x400, 0x404], size=2)
    run.write(b, [0x402, 0x406], size=2)
    run.write(a, 0x40C, size=1)
    run.write(b, 0x40D, size=1)
    assert run.codes == []
    run.read(b, 0x404, size=4)
    (finding,) = run.findings
    assert "0x404" in finding.message


def test_a_word_written_before_its_page_was_refined_is_remembered(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.write(b, 0x500, size=1)
    run.read(b, 0x402, size=2)
    (finding,) = run.findings
    assert finding.code == "race" and "0x402" in finding.message


def test_accesses_that_span_pages_are_seen_whole(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, [0x3FF8, 0x7FF8], size=16)
    run.barrier(a, b)
    run.write(a, 0x8004)
    run.read(b, [0x3FF8, 0x7FF8], size=16)
    (finding,) = run.findings
    assert finding.code == "race" and "0x8004" in finding.message


def test_a_later_phase_of_an_mbarrier_includes_the_earlier_ones() -> None:
    run = FakeRun(warps=3)
    a, b, c = run.warps
    run.write(a, 0x800)
    run.arrive(a, phase=0)
    run.checker.acquired(b, ("mbarrier", 0, 0, 0), "relaxed")
    run.arrive(b, phase=1)
    run.wait(c, phase=1)
    run.read(c, 0x800)
    assert run.codes == []


def test_global_memory_of_the_arguments_is_initialised_and_checked(run: FakeRun) -> None:
    a, b = run.warps
    run.read(a, 0x7F00_0000_0000, space=GLOBAL)
    run.write(b, 0x7F00_0000_0000, space=GLOBAL)
    (finding,) = run.findings
    assert finding.code == "race" and "global memory 0x7f0000000000" in finding.message


def test_what_follows_the_fence_is_not_released_by_it(run: FakeRun) -> None:
    a, b = run.warps
    run.fence(a, "acq_rel.gpu")
    run.write(a, 0x1000, space=GLOBAL)
    run.access(a, "st.relaxed", "write", 0x2000, space=GLOBAL, order="relaxed", scope="gpu")
    run.access(b, "ld.acquire", "read", 0x2000, space=GLOBAL, order="acquire", scope="gpu")
    run.read(b, 0x1000, space=GLOBAL)
    assert run.codes == ["race"]


def test_what_an_atomic_has_observed_comes_before_what_follows_it() -> None:
    run = FakeRun(warps=3)
    a, b, c = run.warps
    run.write(a, 0x3000, space=GLOBAL)
    for warp in (a, b):
        run.access(warp, "red.add", "atomic", 0x2000, space=GLOBAL, order="relaxed", scope="gpu")
    run.barrier(b, c)
    run.write(c, 0x2000, space=GLOBAL)
    assert run.codes == []
    run.read(c, 0x3000, space=GLOBAL)
    assert run.codes == ["race"]


def test_weak_and_atomic_accesses_of_shared_memory_are_an_error(run: FakeRun) -> None:
    a, b = run.warps
    run.write(a, 0x400)
    run.access(b, "atom.add", "atomic", 0x400, order="relaxed", scope="cta")
    assert [(f.code, f.level) for f in run.findings] == [("lost-update", "error")]


def test_findings_stay_the_same_when_unused_states_are_dropped(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptxemu.check.shadow_memory.STATES_BEFORE_COMPACTION", 8)
    run.checker._memory._compact_at = 8
    a, b = run.warps
    run.write(a, 0x400)
    for use in range(50):
        run.write(a, [0x800, 0x900])
        run.barrier(a, b, use=use)
        run.read(b, 0x800)
        run.barrier(a, b, use=use, number=1)
    assert run.codes == []
    run.read(b, 0x400)
    run.read(b, 0x900)
    run.write(a, 0x900)
    assert run.codes == ["race"]
    assert len(run.checker._memory._states) < 40


@pytest.mark.parametrize("count", [3, 20])
def test_a_fence_acquires_all_that_relaxed_reads_saw_before_it(count: int) -> None:
    run = FakeRun(clusters=2, warps=1)
    a, b = run.warps
    flag = {"space": GLOBAL, "scope": "gpu"}
    for number in range(count):
        run.write(a, 0x1000 + 4 * number, space=GLOBAL)
        run.access(a, "st.release", "write", 0x2000, order="release", **flag)
        run.access(b, "ld.relaxed", "read", 0x2000, order="relaxed", **flag)
    run.fence(b, "acq_rel.cta")
    run.read(b, 0x1000, space=GLOBAL)
    assert run.codes == ["race"]
    run.fence(b, "acq_rel.gpu")
    for number in range(1, count):
        run.read(b, 0x1000 + 4 * number, space=GLOBAL)
    assert run.codes == ["race"]
