"""The judge of ways, and the fit of the choice's constants to its documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.sparse_mla import DECODES
from flashdsa.backends.sm90.sparse_mla_ways import Call, Way, choose
from flashdsa.bench.cases import Task
from flashdsa.heuristics.h200 import SPARSE_MLA
from workbench.__main__ import cli
from workbench.draws.distribution import draw
from workbench.draws.inputs import make_task
from workbench.draws.run import read_document
from workbench.pretended_gpu import pretended_gpu
from workbench.ways.fit import call_of, changed, fitted, loss, paths, tried
from workbench.ways.judge import judge, regret
from workbench.ways.measure import CHOICES, SCHEMA, by_way, ways_of

# name: kind, estimate, hot, cold; the taken one first
DRAWS = [
    {"a": ("clusters", 9.0, 10.0, 20.0), "b": ("stream-K", 11.0, 12.0, 20.0)},
    {"a": ("clusters", 9.0, 10.0, 20.0), "b": ("stream-K", 11.0, 8.0, 10.0)},
    {"b": ("stream-K", 5.0, 10.0, 10.0), "c": ("stream-K", 6.0, 1.0, 1.0),
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
    clusters, stream_k = found["clusters"], found["stream-K"]
    assert (clusters.taken, stream_k.taken) == (50, 25)
    # Hot: 1.2 and 0.8 of four draws, the geometric mean; cold 1 and 0.5.
    assert clusters.lost == pytest.approx((100 * (0.96**0.25 - 1), 100 * (0.5**0.25 - 1)))
    assert stream_k.lost == pytest.approx((100 * (2**0.25 - 1), 0))
    assert (clusters.worst, stream_k.worst) == (1.2, 2)
    assert (clusters.below, stream_k.below) == (1, 1)
    assert (clusters.better, stream_k.better) == (1, 1)
    # Nothing can replace the only way of a draw.
    assert found["forward"].lost == (0, 0)
    assert regret(rows())[0] == pytest.approx((10 / 8 * 10) ** 0.25)


def test_the_rule() -> None:
    stream_k = next(one for one in judge(rows()) if one.kind == "stream-K")
    assert stream_k.stays(10**6)  # a quarter of the draws
    alone = next(one for one in judge(rows()) if one.kind == "forward")
    assert not alone.stays(0)


def test_constants_are_fitted_to_attention_alone(tmp_path: Path) -> None:
    """A fit is one JSON document; draws that do not say their calls are refused."""
    document = tmp_path / "x.json"
    for operation in ("forward", "decode-512", "indexer"):
        found = [{**row, "line": f"{operation}/1/{n} x"} for n, row in enumerate(rows())]
        held = {"schema": SCHEMA, "operation": operation, "draws": found}
        document.write_text(json.dumps(held))
        done = CliRunner().invoke(cli, ["ways", "--read", str(document), "--fit", "--json"])
        if operation == "forward":
            assert json.loads(done.stdout)["constants"].startswith("SparseMlaConstants(")
        else:
            assert done.exit_code == 2 and "--fit: expected documents of" in done.stderr


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


DOCUMENTS = sorted(Path(__file__).parents[1].glob("results/ways/*.json.gz"))
MOST_LOSS = 1.03
"""Time that the choice takes of each draw's fastest way, in the mean of all documents. New
constants, or new documents, must not choose worse."""


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    return [row for path in DOCUMENTS for row in read_document(path)["draws"]]


def test_todays_choice_is_nearly_the_fastest_of_recorded_ways(
    recorded: list[dict[str, Any]],
) -> None:
    calls = tried(recorded)
    assert len(calls) > 200
    assert 1 < loss(calls, SPARSE_MLA) < MOST_LOSS
    worse = replace(SPARSE_MLA, forward_gain=10.0, stream_k_gain=10.0)
    assert loss(calls, worse) > MOST_LOSS


@pytest.mark.parametrize("operation", ["forward", "prompts", "decode", "chats"])
def test_a_draw_says_its_call(operation: str) -> None:
    """As the backend describes the operands, of which it needs the values of none."""
    seen: list[Any] = []

    def asked(runner: Runner, call: Call) -> Way:
        seen.append(call)
        return choose(runner, call)

    with pretended_gpu():
        for number in range(6):
            small = draw(operation, 5, number).small()
            task = make_task(small, "", "cpu", "sm90")
            with CHOICES[operation].replaced(asked):
                task.call()
            assert seen.pop() == call_of(small) and not seen


def test_constants_are_fitted(recorded: list[dict[str, Any]]) -> None:
    calls = tried(recorded)[:30]
    spoilt = replace(SPARSE_MLA, stream_k_gain=SPARSE_MLA.stream_k_gain * 3)
    assert loss(calls, fitted(calls, spoilt)) < loss(calls, spoilt)
    path = ("stream_k", "packed", "tile")
    assert path in set(paths(SPARSE_MLA))
    usual = SPARSE_MLA.stream_k["packed"].tile
    assert changed(SPARSE_MLA, path, 2).stream_k["packed"].tile == 2 * usual
