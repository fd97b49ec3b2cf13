"""Judges of peers, scores of chosen distributions, and the picture of a kept run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashdsa.bench.cases import Case
from flashdsa.bench.indexer import IndexerInputs, float64_scores, make_inputs, ragged_case
from workbench.bench import indexer, prefill
from workbench.bench.top_ks import NAMES, load_top_k
from workbench.dense_to_sparse import draw, headline, read_run
from workbench.tests.false_peers import install

LENGTHS = (2500, 5, 0, 2048, 2100)
ROOT = Path(__file__).parents[2]


def inputs_of(lengths: tuple[int, ...]) -> IndexerInputs:
    return make_inputs(ragged_case("tiny", lengths), "cpu", 0)


def test_a_peer_is_judged_where_it_had_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    x = inputs_of(LENGTHS)
    peer = indexer.DeepGemm(x)
    peer.make_plan()
    for name in NAMES:
        picked = load_top_k(name, x.seq_lens, peer.width, x.ids.shape[1])(peer.logits())
        assert indexer.judge_peer(x, picked).findings == [], name
        picked[0, 0] = picked[0, 1]
        assert indexer.judge_peer(x, picked).findings == ["row 0: a token twice"], name


@pytest.mark.parametrize("data", ["equal", "ascending", "descending", "one bin"])
def test_scores_have_the_distribution_that_the_draw_names(data: str) -> None:
    x = inputs_of((2300, 70))
    indexer.fill_scores(x, data, torch.Generator().manual_seed(1))
    for row in range(2):
        scores, _ = float64_scores(x, row)
        scores = scores / indexer.SCORE
        if data == "equal":
            assert scores.unique().numel() == 1
        elif data == "one bin":
            assert 0.999 < scores.min() < scores.max() < 1.005 and scores.unique().numel() > 30
        else:
            up = scores.diff() > 0
            assert bool(up.all() if data == "ascending" else (~up).all())


def test_the_prefills_judge_sees_what_is_wrong() -> None:
    x = prefill.make_inputs(Case(32, 64, 16, 8, "fp8"), "cpu", 0)
    x["starts"] = torch.full((32,), 32, dtype=torch.int32)
    task = prefill.task_of(x, 8, "cpu")
    right: Any = task.call()
    assert not task.judge(right).findings
    outside, twice, worse = (right.clone() for _ in range(3))
    outside[-2, 0] = 0  # before its range
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


@pytest.mark.slow
def test_the_guides_picture_can_be_drawn_from_what_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "chart.png"
    run = read_run(ROOT / "workbench/results/dense_to_sparse/2026-11-23-h200")
    draw(run, target)
    assert "97.8% or more" in headline(run) and "1.040 over them, 1.041 over all" in headline(run)
    assert "131,072 tokens is 2.1 times as fast" in headline(run)
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 4000
