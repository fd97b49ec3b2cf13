"""Unions of neighbouring queries: numbers counted by hand, and the command around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from flashdsa.backends.sm90.sparse_mla import DECODES
from flashdsa.bench.cases import Task
from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from workbench.__main__ import cli
from workbench.draws.distribution import draw
from workbench.draws.inputs import make_task
from workbench.overlap import measure_overlap
from workbench.pretended_gpu import pretended_gpu
from workbench.ways.judge import judge, regret
from workbench.ways.measure import CHOICES, SCHEMA, by_way, ways_of

INDICES = torch.tensor([[5, 3, 1, -1], [1, 3, 7, 7], [9, 8, -1, -1], [8, 9, 4, 2]])
"""Distinct rows 3, 3, 2, 4; unions of two {1, 3, 5, 7} and {2, 4, 8, 9}."""


def test_unions_counted_by_hand() -> None:
    found = measure_overlap(INDICES, (1, 2, 4))
    assert (found.sequences, found.queries, found.topk) == (1, 4, 4)
    assert found.valid == 13 / 16
    assert found.distinct == 12 / 13
    # Of the distinct rows of queries 1 to 3: {1, 3} of 3, none of 2, {8, 9} of 4.
    assert found.shared == pytest.approx(4 / 9)
    alone, two, four = found.groups
    assert (alone.union_rows, alone.ratio, alone.left) == (3.0, 1.0, 1.0)
    assert (two.groups, two.union_rows, two.named_rows) == (2, 4.0, 6.0)
    assert two.ratio == pytest.approx(8 / 6)
    assert (two.smallest, two.largest) == pytest.approx((4 / 3, 4 / 3))
    assert (four.union_rows, four.ratio) == (8.0, pytest.approx(8 * 4 / 12))


def test_what_reused_lists_keep_counted_by_hand() -> None:
    found = measure_overlap(INDICES, (1, 2))
    # Two queries before: {1, 3, 5} has none of {8, 9}, {1, 3, 7} none of {8, 9, 4, 2}.
    assert found.kept == {1: pytest.approx(4 / 9), 2: 0.0}


def test_groups_do_not_reach_into_the_next_sequence() -> None:
    apart = torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]).int()
    (two,) = measure_overlap(apart, (2,)).groups
    assert (two.groups, two.ratio) == (2, 1.0)


def test_shape_of_flash_mla() -> None:
    (two,) = measure_overlap(INDICES[:, None], (2,)).groups
    assert two.union_rows == 4.0


@pytest.mark.parametrize(
    ("indices", "groups", "error", "says"),
    [
        (torch.ones(4, 4), (2,), ArgumentTypeError, "expected integers, got torch.float32"),
        (torch.ones(4).int(), (2,), ArgumentValueError, r"expected \[S, topk\]"),
        (INDICES, (8,), ArgumentValueError, "sizes from 1 to 4"),
        (-torch.ones(4, 4).int(), (2,), ArgumentValueError, "no slot names a row"),
    ],
)
def test_errors_name_what_was_expected(
    indices: torch.Tensor, groups: tuple[int, ...], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        measure_overlap(indices, groups)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["overlap", *arguments])


def test_the_command_prints_what_the_function_finds(tmp_path: Path) -> None:
    torch.save({"layer3": INDICES}, tmp_path / "x.pt")
    result = _run(str(tmp_path / "x.pt"), "--key", "layer3", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [group["queries"] for group in document["groups"]] == [1, 2, 4]
    assert document["groups"][1]["union_rows"] == 4.0
    np.save(tmp_path / "x.npy", INDICES.numpy())
    text = _run(str(tmp_path / "x.npy"), "--groups", "2").stdout
    assert "1.333" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)


def test_what_is_no_index_tensor_is_one_line(tmp_path: Path) -> None:
    torch.save({"layer3": INDICES}, tmp_path / "x.pt")
    (tmp_path / "text.pt").write_text("no tensor")
    for arguments, says in (
        (["missing.pt"], "No such file"),
        ([str(tmp_path / "text.pt")], "not a tensor saved by torch.save"),
        ([str(tmp_path / "x.pt")], "holds layer3; choose one by --key"),
        (["indices.csv"], "expected a name ending in .pt or .npy"),
    ):
        result = _run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert says in line


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
