"""The timeline, the memory map, and the command's files."""

import json
from collections import defaultdict
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.kernel_run import source

from ptxemu import api
from ptxemu.cli.kernel_names import file_name
from ptxemu.cli.main import main
from ptxemu.errors import DeadlockError
from ptxemu.events import FanOut, Space
from ptxemu.sched.policy import Policy
from ptxemu.trace import MemoryMap, Recorder, to_chrome
from ptxemu.trace.memory_picture import draw
from tests import producer_consumer

# The timeline: slices nest, waits name barriers and phases, arrows lead from signals to waits.

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


# The memory map: who wrote which bytes, when they were read, when they are free.

SMEM = (Space.SHARED, 0)


@pytest.fixture(scope="module")
def mapped():
    recorder = Recorder()
    memory_map = MemoryMap(recorder)
    producer_consumer.launch(
        observer=FanOut(recorder, memory_map),
        policy=Policy(asynchronous="late", warps="round_robin"),
    )
    return memory_map


def test_pieces_that_touch_are_one_range(mapped):
    touches = [t for t in mapped.touches[SMEM] if t.who == "bulk load"]
    (load,) = touches
    buffer = producer_consumer.BUFFER
    assert load.is_write
    assert load.ranges == ((buffer, buffer + producer_consumer.BYTES),)


def test_each_warp_reads_its_part(mapped):
    buffer = producer_consumer.BUFFER
    reads = {t.who: t.ranges for t in mapped.touches[SMEM] if not t.is_write}
    for warp in range(4):
        assert reads[warp] == ((buffer + 128 * warp, buffer + 128 * warp + 128),)


def test_the_picture_goes_from_unwritten_over_the_copy_to_the_warps(mapped):
    raster = mapped.raster(SMEM, columns=2000)
    row = (producer_consumer.BUFFER - raster.first) // raster.per_row
    numbers = raster.writers[row]
    seen = [0, *(int(n) for n, before in zip(numbers[1:], numbers, strict=False) if n != before)]
    names = ["nobody", *raster.names]
    assert [names[n] for n in seen] == ["nobody", "bulk load", 3]  # the copy is reversed


def test_bytes_are_live_from_the_write_to_the_last_read(mapped):
    raster = mapped.raster(SMEM, columns=2000)
    row = (producer_consumer.BUFFER - raster.first) // raster.per_row
    reads = np.flatnonzero(raster.is_read[row])
    writes = np.flatnonzero(np.diff(raster.writers[row])) + 1
    live = raster.is_live[row]
    assert live[writes[0] : reads[0] + 1].all()
    assert not live[reads[0] + 1 : writes[1]].any()
    assert live[writes[1] : reads[-1] + 1].all()
    assert not live[: writes[0]].any()


def test_the_picture_is_well_formed_with_axes_and_legend(mapped):
    root = ElementTree.fromstring(draw(mapped, roles={0: "copy"}, title="<k>"))
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"<k>", "logical time (ticks)", "CTA-relative shared address"} <= words
    assert {"bulk load", "copy", "warp 1", "not written yet"} <= words
    assert "Shared memory of cta (0,0,0)" in words


def test_columns_of_tmem_are_rows_of_their_own():
    recorder = Recorder()
    memory_map = MemoryMap(recorder)
    body = """
        mov.u32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
        ld.shared.u32 %r2, [%r1]; add.u32 %r2, %r2, 8;
        tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r1, %r1}; tcgen05.wait::st.sync.aligned;
        sub.u32 %r2, %r2, 8; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    """
    text = source(body, {}, arch="sm_100a", shared=64)
    api.load(text).launch("k", 1, 32, observer=FanOut(recorder, memory_map))
    (store,) = memory_map.touches[Space.TMEM, 0]
    assert store.who == "TMEM store"
    assert store.ranges == ((8, 10),)
    raster = memory_map.raster((Space.TMEM, 0))
    assert (raster.first, raster.per_row, len(raster.writers)) == (8, 1, 2)


# `ptxemu trace` on the command line: its files and what it prints.

LAUNCH = ["--block", "128", "--arg", "u32[128]=arange", "--arg", "u32[128]=zeros", "--quiet"]


def trace(folder, *options, text=producer_consumer.TEXT):
    path = folder / "kernel.ptx"
    path.write_text(text)
    return main(["trace", str(path), "--out", str(folder / "out"), *options])


def test_three_files_and_the_counts(tmp_path, capsys):
    assert trace(tmp_path, *LAUNCH, "--role", "copy=0", "--role", "compute=1-3") == 0
    out = capsys.readouterr().out
    assert "compute (1-3)" in out
    assert "wait" in out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"0-k.trace.json", "0-k.memory.svg", "0-k.counts.json"}
    document = json.loads((tmp_path / "out" / "0-k.trace.json").read_text())
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert "warp 0 (copy)" in names
    assert "<svg" in (tmp_path / "out" / "0-k.memory.svg").read_text()


def test_json_has_the_counts_of_each_role(tmp_path, capsys):
    assert trace(tmp_path, *LAUNCH, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (launch,) = report["launches"]
    first = launch["roles"][0]
    assert first["role"] == "load+store"
    assert first["bytes"]["global -> shared (bulk load)"] == producer_consumer.BYTES


def test_a_deadlock_still_leaves_the_trace(tmp_path, capsys):
    body = """
        mov.u32 %r1, smem;
        mbarrier.init.shared.b64 [%r1], 2;
        W: mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 0;
        @!%p0 bra W;
    """
    code = trace(tmp_path, "--block", "1", "--quiet", text=source(body, {}, shared=64))
    assert code == 1
    assert "deadlock" in capsys.readouterr().err
    assert "never ends" in (tmp_path / "out" / "0-k.trace.json").read_text()


@pytest.mark.parametrize("role", ["mma", "mma=x", "mma=1-"])
def test_a_role_of_another_form_is_an_error(tmp_path, capsys, role):
    assert trace(tmp_path, *LAUNCH, "--role", role) == 2
    assert "name=first-last" in capsys.readouterr().err


def test_names_of_cute_dsl_kernels_are_cut_to_what_a_person_knows():
    name = "kernel_cutlass_kernel___main__PersistentDenseGemmKernel_object_at__TiledMMA_Thr"
    assert file_name(name) == "PersistentDenseGemmKernel"
    assert file_name("axpy") == "axpy"
