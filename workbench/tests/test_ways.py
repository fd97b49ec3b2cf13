"""The judge of ways: figures by hand; a call is served by the way that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashdsa.backends.sm90.sparse_mla import DECODES
from flashdsa.bench.cases import Task
from workbench.__main__ import cli
from workbench.draws.distribution import draw
from workbench.draws.inputs import make_task
from workbench.pretended_gpu import pretended_gpu
from workbench.ways.judge import judge, regret
from workbench.ways.measure import CHOICES, SCHEMA, by_way, ways_of

# name: kind, estimate, hot, cold; the taken one first
DRAWS = [
    {"a": ("clusters", 9.0, 10.0, 20.0), "b": ("dealt", 11.0, 12.0, 20.0)},
    {"a": ("clusters", 9.0, 10.0, 20.0), "b": ("dealt", 11.0, 8.0, 10.0)},
    {"b": ("dealt", 5.0, 10.0, 10.0), "c": ("dealt", 6.0, 1.0, 1.0),
     "a": ("clusters", None, 20.0, 10.0)},
    {"f": ("forward", 1.0, 5.0, 5.0)},
]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    fields = ("kind", "estimate", "hot", "cold")
    tables = [
        {name: dict(zip(fields, way, strict=True)) for name, way in ways.items()} for ways in DRAWS
    ]
    return [{"line": "", "wrong": [], "ways": table} for table in tables]


def test_the_choice_is_replayed_without_each_kind() -> None:
    found = {one.kind: one for one in judge(rows())}
    clusters, dealt = found["clusters"], found["dealt"]
    assert (clusters.taken, dealt.taken) == (50, 25)
    # Hot: 1.2 and 0.8 of four draws, the geometric mean; cold 1 and 0.5.
    assert clusters.lost == pytest.approx((100 * (0.96**0.25 - 1), 100 * (0.5**0.25 - 1)))
    assert dealt.lost == pytest.approx((100 * (2**0.25 - 1), 0))
    assert (clusters.worst, dealt.worst) == (1.2, 2)
    assert (clusters.below, dealt.below) == (1, 1)
    assert (clusters.better, dealt.better) == (1, 1)
    # Nothing can replace the only way of a draw.
    assert found["forward"].lost == (0, 0)
    assert regret(rows())[0] == pytest.approx((10 / 8 * 10) ** 0.25)


def test_the_rule() -> None:
    dealt = next(one for one in judge(rows()) if one.kind == "dealt")
    assert dealt.stays(10**6)  # a quarter of the draws
    alone = next(one for one in judge(rows()) if one.kind == "forward")
    assert not alone.stays(0)


def test_a_document_is_judged_again(tmp_path: Path) -> None:
    document = tmp_path / "x.json"
    document.write_text(json.dumps({"schema": SCHEMA, "operation": "decode", "draws": rows()}))
    done = CliRunner().invoke(cli, ["ways", "--read", str(document)])
    assert done.exit_code == 0
    assert "clusters" in done.output and "4 draws" in done.output
    document.write_text(json.dumps({"schema": "else", "draws": []}))
    done = CliRunner().invoke(cli, ["ways", "--read", str(document)])
    assert done.exit_code != 0


@pytest.mark.parametrize("operation", ["prompts", "chats", "forward-512", "decode-512"])
def test_a_call_is_served_by_the_way_that_is_asked_for(operation: str) -> None:
    names = {spec.name for spec in DECODES.values()}
    with pretended_gpu() as gpu:
        gpu.counts = True
        for number in range(4):
            task: Task = make_task(draw(operation, 3, number).small(), "", "cpu", "sm90")
            found = ways_of(CHOICES[operation], task)
            assert len(found) > 1
            for way in found:
                gpu.launches.clear()
                by_way(CHOICES[operation], task, way)()
                decodes = set(gpu.launches) & names
                assert bool(decodes) == way.kind.startswith("decode")
                assert ("mla_used_slots" in gpu.launches) == way.finds_ends


def test_an_indexers_call_is_served_by_the_way_that_is_asked_for() -> None:
    with pretended_gpu() as gpu:
        gpu.counts = True
        small = draw("indexer", 3, 6).small()
        small.values["topk"] = 512
        task: Task = make_task(small, "", "cpu", "sm90")
        kernels = {}
        for way in ways_of(CHOICES["indexer"], task):
            gpu.launches.clear()
            by_way(CHOICES["indexer"], task, way)()
            kernels[str(way.kind)] = set(gpu.launches)
    assert kernels["unscored"] == {"indexer_unscored"}
    assert kernels["ranked"] == {"indexer_logits", "indexer_rank"}
    assert kernels["shared"] == kernels["row"] == {"indexer"}
