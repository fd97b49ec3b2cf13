"""The result file: schema, what is refused, where it goes; its chart; what the repository keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

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
from flashdsa.bench.runner import result_path
from flashdsa.bench.timer import Times
from flashdsa.errors import ArgumentValueError

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
        "captured": {OURS: Times(10.0, late=1)},
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


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
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
            schemas[path] = json.loads(path.read_text())["schema"]
    kept = [path for path, schema in schemas.items() if schema.startswith("flashdsa-bench/")]
    assert len(kept) >= 4
    for path in kept:
        assert read_result(path).rows
