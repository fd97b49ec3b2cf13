"""The result file: schema, round trip, where it goes; its chart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashdsa.bench.chart import draw_chart
from flashdsa.bench.checkout import Checkout
from flashdsa.bench.gpu.decode import DECODE_SCHEMA
from flashdsa.bench.gpu.forward import FORWARD_SCHEMA
from flashdsa.bench.gpu.result import FIRST_SCHEMA as GPU_FIRST_SCHEMA
from flashdsa.bench.gpu.result import SCHEMA as GPU_SCHEMA
from flashdsa.bench.gpu.result import read_gpu_result
from flashdsa.bench.machine import Gpu, HostMachine, describe_machine
from flashdsa.bench.result import (
    SCHEMA,
    BenchResult,
    MemoryRow,
    TimingRow,
    parse_result,
    read_result,
    write_result,
)
from flashdsa.bench.runner import result_path
from flashdsa.errors import ArgumentValueError

PROBLEM: dict[str, int | str] = {"S": 16, "S_kv": 64, "H": 8, "topk": 32, "dtype": "float32"}
TIMING = TimingRow(
    op="sparse_mla_fwd",
    backend="cpu",
    problem=PROBLEM,
    repeats=3,
    seconds_median=0.2,
    seconds_p10=0.1,
    seconds_p90=0.3,
    unit="GFLOPS",
    rate=80.0,
    ceiling="torch.matmul",
    ceiling_rate=100.0,
    ratio=0.8,
)
MEMORY = [
    MemoryRow("mla_bwd", "cpu", PROBLEM | {"S": s}, 10, 20, s << 20, "VmHWM") for s in (16, 64)
]


@pytest.fixture
def result() -> BenchResult:
    return BenchResult(
        date="2026-11-20T10:00:00+00:00",
        git={"commit": "0123456789abcdef", "dirty": False},
        machine=describe_machine().as_dict(),
        versions={"python": "3.11", "torch": "2.13"},
        threads=2,
        protocol="in turns",
        rows=[TIMING],
        memory=MEMORY,
    )


def test_round_trip(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_result(result, path)
    back = read_result(path)
    assert back.rows == result.rows and back.memory == result.memory
    assert json.loads(back.to_json()) == json.loads(result.to_json())
    assert json.loads(path.read_text())["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected schema"),
        ({"schema": "other/1"}, "got 'other/1'"),
    ],
)
def test_other_documents_are_refused(document: object, message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        parse_result(document)


def test_a_row_with_other_fields_is_refused(result: BenchResult) -> None:
    document = json.loads(result.to_json())
    del document["rows"][0]["ratio"]
    document["rows"][0]["speed"] = 1
    with pytest.raises(ArgumentValueError, match=r"rows\[0\]: .*ratio, speed"):
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


@pytest.mark.parametrize("part", ["rows", "memory", "both"])
def test_a_chart_is_drawn_of_what_is_there(result: BenchResult, tmp_path: Path, part: str) -> None:
    if part != "both":
        result = replace(result, **{"memory" if part == "rows" else "rows": []})
    path = tmp_path / "charts" / "chart.png"
    draw_chart(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


OTHER_SCHEMAS = {
    "context_parallel": ("flashdsa-context-parallel/1",),
    "ptxemu": ("ptxemu-bench/1", "ptxemu-bench/2"),
    "indexer_training": ("flashdsa-indexer-training/1",),
    "indexer": (
        "flashdsa-ragged/1",
        "flashdsa-indexer-all/1",
        "flashdsa-prefill/1",
        "flashdsa-prefill/2",
        "flashdsa-prefill/3",
    ),
    "integrations": ("flashdsa-integrations/1",),
    "majorness": ("flashdsa-majorness/1",),
    "peers": ("flashdsa-peers/1",),
    "mutation": ("flashdsa-mutation/1",),
    "sanitizers": ("flashdsa-sanitizers/1", "flashdsa-sanitizers/2"),
    "sparse_mla_bwd": (
        "flashdsa-backward-peers/1",
        "flashdsa-backward-overlap/1",
        "flashdsa-before-after/1",
    ),
    "sparse_mla_decode": (DECODE_SCHEMA,),
    "sparse_mla_fwd": ("flashdsa-forward-peers/1", FORWARD_SCHEMA),
}
"""Of the results that other programs wrote, by folder, old ones included."""


def test_results_in_the_repository_are_of_this_schema() -> None:
    folder = Path(__file__).parents[2] / "workbench" / "results"
    for path in folder.rglob("*.json"):
        if path.parent.name in OTHER_SCHEMAS:
            assert json.loads(path.read_text())["schema"] in OTHER_SCHEMAS[path.parent.name]
        elif json.loads(path.read_text())["schema"] in (GPU_SCHEMA, GPU_FIRST_SCHEMA):
            read_gpu_result(path)
        else:
            read_result(path)
