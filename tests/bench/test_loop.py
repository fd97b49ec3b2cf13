"""The loop that measures, and the records of its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdsa.bench import timer as timing
from flashdsa.bench.attention import make_forward
from flashdsa.bench.cases import Case, Operation, Task, Verdict, products_ceiling
from flashdsa.bench.chart import draw_chart
from flashdsa.bench.checkout import Checkout
from flashdsa.bench.machine import Gpu, HostMachine, describe_machine
from flashdsa.bench.result import (
    CEILING,
    OURS,
    SCHEMA,
    BenchResult,
    MemoryRow,
    Row,
    parse_result,
    read_result,
)
from flashdsa.bench.runner import (
    OPERATIONS,
    BenchOptions,
    Peer,
    memory_plan,
    result_path,
    run_bench,
)
from flashdsa.bench.timer import Call, GpuHangError, Times, WallTimer
from flashdsa.errors import ArgumentValueError, UnsupportedError

TINY = Case(s=2, s_kv=96, h=3, topk=128, dtype="float32", name="tiny")


class FalseClock:
    """Calls everything once and says 10 us for ours, 20, 30, ... for those that follow."""

    protocol = "a false clock"
    conditions: tuple[str, ...] = ("cold", "hot")

    def in_turns(self, calls: Mapping[str, Call], condition: str, repeats: int) -> dict[str, Times]:
        for call in calls.values():
            call()
        return {name: Times.of([10.0 * at] * repeats) for at, name in enumerate(calls, 1)}

    def host_us(self, call: Call) -> float | None:
        call()
        return 7.0

    def synchronize(self, what: str) -> None:
        pass


def an_operation(*results: torch.Tensor, **more: Any) -> Operation:
    """Gives `results` one after another, the last one for ever; 1 is right."""

    def make(case: Case, device: str, seed: int, backend: str) -> Task:
        left = list(results)

        def call() -> torch.Tensor:
            return left.pop(0) if len(left) > 1 else left[0]

        def judge(found: torch.Tensor) -> Verdict:
            return Verdict({"it": 0.5}, [] if bool((found == 1).all()) else ["not 1"])

        return Task(call, judge, 5e6, products_ceiling("cpu"), inputs=left, **more)

    return Operation("it", make, {}, ("hot", "cold"))


def run_one(operation: Operation, case: Case = TINY, **options: Any) -> Any:
    (row,) = run_bench(BenchOptions([(operation, [case])], **options), FalseClock()).rows
    return row


def a_peer(result: float) -> Peer:
    return lambda case, task: (
        lambda: result,
        lambda found: Verdict({}, [] if found == 1 else ["not 1"]),
    )


def test_statistics_interpolate() -> None:
    times = Times.of([3.0, 1.0, 2.0, 5.0, 4.0], late=2)
    assert (times.median, times.late) == (3.0, 2)
    assert (times.p10, times.p90) == (pytest.approx(1.4), pytest.approx(4.6))
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0)


def test_contenders_take_turns_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    made: list[str] = []
    calls: dict[str, Call] = {name: lambda name=name: made.append(name) for name in "abc"}  # type: ignore[misc]
    times = WallTimer(seed=3).in_turns(calls, "hot", 20)
    assert made[:9] == [*"aaabbbccc"]  # warm-up
    rounds = [tuple(made[at : at + 3]) for at in range(9, len(made), 3)]
    assert len(rounds) == 20 and all(sorted(one) == [*"abc"] for one in rounds)
    assert len(set(rounds)) > 2
    assert set(times) == {*"abc"}


def test_short_calls_are_repeated_and_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    count = [0]

    def call() -> None:
        count[0] += 1
        clock[0] += 0.002

    (times,) = WallTimer().in_turns({"it": call}, "hot", 4).values()
    assert count[0] == timing.WARMUP_CALLS + 4 * 25
    assert times.median == pytest.approx(2000)


def test_a_row_has_work_rate_and_share_of_the_ceiling() -> None:
    row = run_one(an_operation(torch.ones(2)))
    assert (row.operation, row.case, row.problem["s_kv"], row.unit) == ("it", "tiny", 96, "FLOP")
    assert list(row.times) == ["hot", "cold"] and set(row.times["hot"]) == {OURS, CEILING}
    assert row.rate("hot") == pytest.approx(5e6 / 10 / 1e3)
    assert row.ceiling_rate("hot") == pytest.approx(2 * 128 * 576 * 2048 / 20 / 1e3)
    assert row.host_us == {OURS: 7.0} and row.errors == {"it": 0.5} and not row.findings


def test_a_clock_that_lacks_the_conditions_takes_its_own() -> None:
    assert list(run_one(an_operation(torch.ones(2)), conditions=("cold",)).times) == ["cold"]
    options = BenchOptions([(an_operation(torch.ones(2)), [TINY])], conditions=("cold",))
    (row,) = run_bench(options, WallTimer()).rows
    assert list(row.times) == ["hot"] and row.host_us == {}


def test_wrong_results_are_found_before_and_after_timing() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert run_one(an_operation(two)).findings == {OURS: ["not 1"]}
    assert run_one(an_operation(one, two)).findings == {OURS: ["after timing: not 1"]}
    other = torch.ones(2, dtype=torch.float64)
    result = run_bench(BenchOptions([(an_operation(two), [TINY])]), FalseClock())
    assert result.wrong
    task = an_operation(torch.ones(3), torch.ones(2), exact=True)
    assert run_one(task).findings == {OURS: ["after timing: other results in a later call"]}
    assert not run_one(an_operation(torch.ones(3), torch.ones(2))).findings
    assert not run_one(an_operation(one, other)).findings


def test_peers_are_judged_and_a_wrong_one_takes_no_part_in_the_ratio() -> None:
    row = run_one(an_operation(torch.ones(2)), peers={"wrong": a_peer(2), "right": a_peer(1)})
    assert row.findings == {"wrong": ["not 1"]} and row.times["hot"]["wrong"].median == 20
    assert row.fastest_peer("hot") == "right" and row.ratio("hot") == 3.0
    assert row.host_us == {OURS: 7.0, "wrong": 7.0, "right": 7.0}


def test_a_peer_that_refuses_costs_its_own_times_only() -> None:
    def refuse(case: Case, task: Task) -> Any:
        raise RuntimeError("no such\nkernel")

    row = run_one(an_operation(torch.ones(2)), peers={"it": refuse})
    assert row.missing == {"it": "RuntimeError: no such kernel"}
    assert row.ratio("hot") is None and row.times["hot"][OURS].median == 10


def test_a_backend_that_cannot_serve_a_case_says_why() -> None:
    def make(*_: Any) -> Task:
        raise UnsupportedError("needs a kernel")

    row = run_one(replace(an_operation(torch.ones(1)), make=make))
    assert row.times == {} and row.missing == {OURS: "UnsupportedError: needs a kernel"}


class HangingClock(FalseClock):
    """Does not come back from the second case."""

    waits = 0

    def synchronize(self, what: str) -> None:
        self.waits += 1
        if self.waits == 2:
            raise GpuHangError(f"{what}: the GPU did not end it")


def test_a_hang_ends_the_run_and_keeps_what_was_measured() -> None:
    cases = [TINY, replace(TINY, name="second"), replace(TINY, name="third")]
    result = run_bench(BenchOptions([(an_operation(torch.ones(1)), cases)]), HangingClock())
    assert [row.case for row in result.rows] == ["tiny"]
    assert result.stopped == "it, second: flashdsa: the GPU did not end it"


def test_a_run_reports_progress_and_round_trips() -> None:
    told: list[tuple[int, int]] = []
    quick = replace(TINY, s_kv=64, topk=16)
    plan = [(OPERATIONS[name], [quick]) for name in ("sparse_mla_fwd", "topk")]
    options = BenchOptions(plan, repeats=2, seed=5, memory=memory_plan(quick, [1])[:1])
    result = run_bench(options, FalseClock(), lambda done, total, _: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    back = parse_result(json.loads(result.to_json()))
    assert back.rows == result.rows and back.memory == result.memory
    assert json.loads(back.to_json()) == json.loads(result.to_json())
    assert result.seed == 5 and result.host_floor_us == 7.0 and not result.wrong
    assert result.threads == torch.get_num_threads() and len(result.memory) == 1


def test_inputs_follow_the_seed() -> None:
    one, same, other = (make_forward(TINY, "cpu", seed, "cpu").inputs.q for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


PROBLEM = {"s": 16, "s_kv": 64, "h": 8, "topk": 32, "dtype": "float32", "lengths": [1, 2]}
ROW = Row(
    "sparse_mla_fwd",
    "a case",
    "sm90",
    PROBLEM,
    work=1e9,
    unit="FLOP",
    ceiling="torch.matmul",
    ceiling_work=2e9,
    times={
        "hot": {OURS: Times(10.0, 9.0, 11.0), CEILING: Times(16.0), "FlashMLA": Times(12.0)},
        "cold": {OURS: Times(10.0, late=1), CEILING: Times(17.0)},
    },
    host_us={OURS: 5.0},
    errors={"O": 1e-3},
    findings={"other": ["wrong"]},
    missing={"third": "not installed"},
)


@pytest.fixture
def result() -> BenchResult:
    return BenchResult(
        date="2026-11-20T10:00:00+00:00",
        git={"commit": "0123456789abcdef", "dirty": False},
        machine=describe_machine().as_dict(),
        versions={"python": "3.11", "torch": "2.13"},
        threads=2,
        protocol="in turns",
        rows=[ROW],
        memory=[MemoryRow("mla_bwd", "cpu", PROBLEM, 10, 20, 30, "VmHWM")],
    )


def test_round_trip(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    result.write(path)
    back = read_result(path)
    assert back.rows == result.rows and back.memory == result.memory
    assert json.loads(back.to_json()) == json.loads(result.to_json())
    assert json.loads(path.read_text())["schema"] == SCHEMA == "flashdsa-bench/3"


@pytest.mark.parametrize(
    ("document", "message"), [([], "expected schema"), ({"schema": "other/1"}, "got 'other/1'")]
)
def test_other_documents_are_refused(document: object, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        parse_result(document)


def test_a_row_with_other_fields_is_refused(result: BenchResult) -> None:
    document = json.loads(result.to_json())
    del document["rows"][0]["work"]
    document["rows"][0]["speed"] = 1
    with pytest.raises(ArgumentValueError, match=r"rows\[0\]: .*speed, work"):
        parse_result(document)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", 7, "rows: expected list; got int"),
        ("rows", [7], r"rows\[0\]: expected fields; got int"),
        ("threads", "2", "threads: expected int; got str"),
        ("threads", True, "threads: expected int; got bool"),
        ("machine", None, "machine: expected dict; got NoneType"),
        ("clocks", {"before": 1}, "clocks: before: expected dict; got int"),
        ("git", [], "git: expected dict; got list"),
        ("host_floor_us", "fast", "host_floor_us: expected float; got str"),
    ],
)
def test_a_field_of_another_kind_is_named(
    result: BenchResult, name: str, value: object, message: str
) -> None:
    document = json.loads(result.to_json()) | {name: value}
    with pytest.raises(ArgumentValueError, match=message):
        parse_result(document)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_file_that_is_no_json_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ArgumentValueError, match=r"x\.json: expected JSON"):
        read_result(tmp_path / "x.json")


def test_names_hold_date_commit_and_target(result: BenchResult, tmp_path: Path) -> None:
    assert result_path(result, "all", tmp_path).name == "2026-11-20-012345678.json"
    assert result_path(result, "topk", tmp_path).name == "2026-11-20-012345678-topk.json"
    no_commit = replace(result, git=None)
    assert result_path(no_commit, "all", tmp_path).name == "2026-11-20-nocommit.json"
    assert result_path(result, "all", tmp_path / "x.json") == tmp_path / "x.json"


def test_files_go_to_the_checkout_or_to_out(
    result: BenchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(Path("/somewhere"), "0123456789", dirty=False)
    monkeypatch.setattr("flashdsa.bench.runner.find_checkout", lambda: checkout)
    folder = result_path(result, "all").parent
    assert folder.parent == Path("/somewhere/workbench/results")
    monkeypatch.setattr("flashdsa.bench.runner.find_checkout", lambda: None)
    assert result_path(result, "all").parent == Path("out")


def test_machine_names_are_folder_names() -> None:
    machine = HostMachine("Intel(R) Xeon(R) CPU @ 2.0GHz", 8, 4, 2**34, None, "Linux", ())
    assert machine.slug() == "intel-xeon-cpu-2-0ghz-8c"
    gpu = Gpu("NVIDIA H200", (9, 0), 2**37)
    assert replace(machine, gpus=(gpu,)).slug() == "nvidia-h200"
    assert replace(machine, gpus=(gpu, gpu)).slug() == "2x-nvidia-h200"


def test_a_chart_is_drawn(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "charts" / "chart.png"
    draw_chart(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 3000


def test_kept_results_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "workbench" / "results"
    schemas = {}
    for path in folder.rglob("*.json"):
        if "mutation" not in path.parts:
            schemas[path] = json.loads(path.read_text()).get("schema", "")
    kept = [path for path, schema in schemas.items() if schema.startswith("flashdsa-bench/")]
    assert len(kept) >= 4
    for path in kept:
        assert read_result(path).rows
