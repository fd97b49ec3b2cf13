"""The timeline: slices nest, waits name barriers and phases, arrows lead from signals to waits."""

import json
from collections import defaultdict

import pytest
from tests.kernel_run import source

from ptxemu import api
from ptxemu.errors import DeadlockError
from ptxemu.sched.policy import Policy
from ptxemu.trace import Recorder, to_chrome
from tests import producer_consumer

SCHEDULES = [
    pytest.param(time, Policy(asynchronous=asynchronous, warps=warps, seed=3), id=f"{time}-{a}")
    for time in ("parallel", "schedule")
    for a, asynchronous, warps in (
        ("late", "late", "round_robin"),
        ("eager", "eager", "random"),
        ("random", "random", "random"),
    )
]


def record(time="parallel", policy=None):
    recorder = Recorder(time=time)
    producer_consumer.launch(observer=recorder, policy=policy)
    recorder.finish()
    return recorder


@pytest.mark.parametrize(("time", "policy"), SCHEDULES)
def test_the_document_is_json_whose_slices_nest(time, policy):
    document = json.loads(json.dumps(to_chrome(record(time, policy))))
    rows = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] > 0
            start = event["ts"]
            rows[event["pid"], event["tid"]].append((start, start + event["dur"]))
    assert rows
    for slices in rows.values():
        stack = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


@pytest.mark.parametrize(("time", "policy"), SCHEDULES)
def test_both_copies_are_on_the_rows_of_their_units(time, policy):
    recorder = record(time, policy)
    operations = {s.row[2]: s for s in recorder.slices if s.kind == "operation"}
    assert set(operations) == {"bulk load", "bulk store"}
    assert all(s.details["bytes"] == 2 * producer_consumer.BYTES for s in operations.values())
    assert operations["bulk load"].end <= operations["bulk store"].start


def test_a_wait_names_its_mbarrier_and_phase_and_the_arrow_starts_at_the_copy():
    recorder = record(policy=Policy(asynchronous="late", warps="round_robin"))
    waits = {s.row[2]: s for s in recorder.slices if "mbarrier" in s.name}
    assert set(waits) == {0, 1, 2, 3}
    assert {s.name for s in waits.values()} == {"wait: mbarrier 0x400 of cta 0, phase 0"}
    sources = {f.target.row[2]: f.source for f in recorder.flows if "mbarrier" in f.target.name}
    assert {one.row for one in sources.values()} == {(0, "unit", "bulk load")}
    for flow in recorder.flows:
        assert flow.source.start <= flow.source_time <= flow.source.end
        assert flow.source_time <= flow.target.end


def test_threads_are_named_and_arrows_come_in_pairs_inside_slices():
    document = to_chrome(record(), {0: "copy"})
    events = document["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp 0 (copy)", "warp 1", "bulk load", "bulk store"} <= names
    slices = [e for e in events if e["ph"] == "X"]
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            assert any(
                s["pid"] == event["pid"]
                and s["tid"] == event["tid"]
                and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                for s in slices
            )
    assert arrows
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["ts"] <= finish["ts"]


def test_in_parallel_time_the_schedule_does_not_matter():
    ends = [
        sorted((s.row, s.name, s.start, s.end) for s in record(policy=policy).slices)
        for policy in (
            Policy(asynchronous="late", warps="round_robin"),
            Policy(asynchronous="random", seed=5),
        )
    ]
    assert ends[0] == ends[1]


def test_a_deadlock_shows_the_wait_that_never_ends():
    recorder = Recorder()
    body = """
        mov.u32 %r1, smem; mbarrier.init.shared.b64 [%r1], 2;
        W: mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 0; @!%p0 bra W;
    """
    with pytest.raises(DeadlockError):
        api.load(source(body, {}, shared=64)).launch("k", 1, 1, observer=recorder)
    recorder.finish()
    (wait,) = [s for s in recorder.slices if s.name.startswith("never ends")]
    assert "2 of 2 arrivals are missing" in wait.name


def test_recording_stops_at_its_limit_and_says_so():
    recorder = Recorder(max_slices=5)
    producer_consumer.launch(observer=recorder)
    recorder.finish()
    assert recorder.truncated
    assert len(recorder.slices) == 5
    assert to_chrome(recorder)["otherData"]["truncated"]
