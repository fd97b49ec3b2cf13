"""Benches beside peers without a GPU: false peers on the CPU are called, judged and timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashdsa.bench.cases import Case
from flashdsa.bench.indexer import IndexerInputs, float64_scores
from flashdsa.bench.result import CEILING, OURS, read_result
from flashdsa.bench.runner import BenchOptions, run_bench
from flashdsa.bench.timer import WallTimer
from workbench import charts
from workbench.__main__ import cli
from workbench.bench import indexer, prefill
from workbench.bench.registry import BENCHES
from workbench.cli.bench import OPERATIONS, summary
from workbench.dense_to_sparse import PARTS
from workbench.draws.run import read_document
from workbench.tests.false_peers import install

LENGTHS = (2500, 5, 0, 2048, 2100)
ROOT = Path(__file__).parents[2]


ALWAYS = ("sparse_mla_fwd", "mla_bwd")
"""Operations whose cases are always run; others come later."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def run(name: str, *chosen: Case) -> list[Any]:
    bench = BENCHES[name]
    plan = [(bench.operation, chosen)]
    return run_bench(BenchOptions(plan, repeats=1, peers=bench.peers), WallTimer()).rows


def small(name: str) -> list[Case]:
    """The quick form of one case with each set of options."""
    found: dict[tuple[str, ...], Case] = {}
    for case in BENCHES[name].cases:
        found.setdefault((*case.options, case.dtype), case.quick())
    return list(found.values())


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in BENCHES]
)
def test_every_kind_of_case_is_right_and_so_are_its_peers(name: str) -> None:
    bench = BENCHES[name]
    for row in run(name, *small(name)):
        assert not row.findings, row.case
        assert {OURS, CEILING} <= row.times["hot"].keys()
        for peer, why in row.missing.items():  # not a fault of the call's
            assert why.startswith("NotImplementedError") or row.problem["dtype"] == "bf16", peer
        if bench.peers and not row.missing:
            assert row.fastest_peer("hot") in bench.peers and row.ratio("hot") > 0


@pytest.mark.parametrize("name", BENCHES)
def test_cases_have_names_of_their_own(name: str) -> None:
    labels = [case.label for case in BENCHES[name].cases]
    assert len(set(labels)) == len(labels) > 0
    assert tuple(BENCHES) == OPERATIONS


@pytest.mark.usefixtures("peers")
def test_a_peer_is_judged_where_it_had_to_choose() -> None:
    case = indexer.ragged_case("tiny", LENGTHS)
    task = indexer.OPERATION.make(case, "cpu", 0, "cpu")
    for name, prepare in indexer.PEERS.items():
        call, judge = prepare(case, task)
        picked: Any = call()
        assert judge(picked).findings == [], name
        picked[0, 0] = picked[0, 1]
        assert judge(picked).findings == ["row 0: a token twice"], name


def test_without_peers_every_row_says_so() -> None:
    (row,) = run("sparse_mla_fwd", Case(2, 64, 2, 16))
    assert row.ratio("hot") is None and "flash_mla" in row.missing["FlashMLA"]


@pytest.mark.parametrize("data", indexer.DISTRIBUTIONS)
def test_scores_have_the_distribution_that_the_case_names(data: str) -> None:
    case = indexer.ragged_case("x", (2300, 70), data=data)
    task = indexer.OPERATION.make(case, "cpu", 0, "cpu")
    x: IndexerInputs = task.inputs
    ids: Any = task.call()
    assert not task.judge(ids).findings
    for row in range(2):
        scores, _ = float64_scores(x, row)
        scores = scores / indexer.SCORE
        if data == "equal":
            assert scores.unique().numel() == 1
        elif data == "two":
            assert scores.unique().numel() == 2
        elif data == "one bin":
            assert 0.999 < scores.min() < scores.max() < 1.005 and scores.unique().numel() > 30
        else:
            up = scores.diff() > 0
            assert bool(up.all() if data == "ascending" else (~up).all())


def test_ties_must_go_to_the_smallest_positions() -> None:
    case = indexer.ragged_case("x", (2300,), data="equal")
    task = indexer.OPERATION.make(case, "cpu", 0, "cpu")
    x: IndexerInputs = task.inputs
    ids: Any = task.call()
    page = int(x.block_table[0, 2299 // 64])
    ids[0, 0] = page * 64 + 2299 % 64  # as good as any, but the largest position
    assert task.judge(ids).findings == ["row 0: ties not broken to the smallest positions"]


def test_the_prefills_judge_sees_what_is_wrong() -> None:
    case = Case(32, 64, 16, 8, "fp8", {"sequences": 2})
    task = prefill.OPERATION.make(case, "cpu", 0, "cpu")
    right: Any = task.call()
    assert not task.judge(right).findings
    outside, twice, worse = (right.clone() for _ in range(3))
    outside[-2, 0] = 0  # of the other sequence
    twice[-2, 0] = twice[-2, 1]
    for wrong in (outside, twice):
        assert task.judge(wrong).findings == ["query 30: a row outside its range, or twice"]
    missing = set(range(32, 63)) - set(right[-2].tolist())
    for row in missing:
        worse[-2, 0] = row
        if "left out a score" in " ".join(task.judge(worse).findings):
            break
    else:
        pytest.fail("no worse row was seen")


@pytest.mark.usefixtures("peers")
def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    words = ["bench", "indexer", "--backend", "cpu", "--quick", "--only", "ragged", "--seed", "7"]
    words += ["--peers", "torch,cudnn", "--out", str(out)]
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0, shown.output
    assert "hot: fastest peer over ours" in shown.output and "fastest peer" in shown.output
    result = read_result(out)
    assert result.seed == 7 and [row.case[:6] for row in result.rows] == ["ragged"] * 2
    names = {OURS, CEILING, "DeepGEMM + cuDNN Frontend", "DeepGEMM + torch.topk"}
    assert all(row.times["hot"].keys() == names for row in result.rows)
    as_json = CliRunner().invoke(cli, [*words, "--peers", "none", "--json"])
    assert json.loads(as_json.stdout)["schema"] == "flashdsa-bench/3"
    assert not summary(replace(result, rows=[]))


def test_a_case_that_there_is_not_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(cli, ["bench", "mla_bwd", "--backend", "cpu", "--only", "nothing"])
    assert shown.exit_code == 2 and "H=128, random" in shown.output


KEPT = {
    "transformers": ["integrations/2026-11-21-transformers-h200.json"],
    "dense-to-sparse": [f"dense_to_sparse/2026-11-23-h200/{part}.json.gz" for part in PARTS],
    "context-parallel": [f"context_parallel/2026-11-21-{n}xh200.json" for n in (2, 4)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(charts.KINDS.keys() - {"draws"}))  # test_draws.py draws it
def test_every_chart_can_be_drawn_from_what_is_kept(kind: str, tmp_path: Path) -> None:
    folder = ROOT / "workbench" / "results"
    documents = [read_document(folder / name) for name in KEPT[kind]]
    target = tmp_path / "chart.png"
    charts.KINDS[kind](documents, target)
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 4000
