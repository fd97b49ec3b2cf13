"""Draws: functions of their seed, within bounds, legal; the report's arithmetic; the command."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashdsa.bench.cases import Task, Verdict, products_ceiling
from flashdsa.bench.result import CEILING, OURS, Row
from flashdsa.bench.runner import BenchOptions
from flashdsa.bench.timer import Times
from flashdsa.errors import ArgumentValueError
from tools import result_tables
from workbench.__main__ import cli
from workbench.draws import run as run_module
from workbench.draws import timing
from workbench.draws.distribution import FIELDS, MOST, OPERATIONS, Draw, describe, draw
from workbench.draws.fixed import fixed_value
from workbench.draws.ids import draw_ids, positions
from workbench.draws.inputs import PARTS, decode_inputs, make_task
from workbench.draws.peers import OTHERS, PROMISES
from workbench.draws.report import Figures, changes, markdown, ratio_at_ceiling, reports
from workbench.draws.run import DrawOptions, measure_draw, rows_of, run_draws
from workbench.draws.timing import FULL, SHORT, DrawTimer, bound
from workbench.draws.two_sources import Source
from workbench.tests.false_peers import install


def many(operation: str, count: int = 300) -> list[Draw]:
    return [draw(operation, 5, number) for number in range(count)]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli, ["draws", *words])


def test_the_distribution_is_the_one_that_results_were_drawn_from() -> None:
    """Another one makes other draws of the same seeds: old and new results do not compare."""
    text = describe()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0b9c629bfa4e17c9"
    for operation, block in zip(OPERATIONS, text.split("\n\n"), strict=True):
        named = {name for line in block.splitlines()[1:] for name in re.split("[ ,]+", line)}
        assert block.startswith(f"{operation}:\n") and named >= set(FIELDS[operation])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_draw_is_a_function_of_its_name_and_within_bounds(operation: str) -> None:
    drawn = many(operation)
    assert [one.line for one in drawn] == [one.line for one in many(operation)]
    assert drawn[3].line.partition(" ")[2] != draw(operation, 6, 3).line.partition(" ")[2]
    for one in drawn:
        v, (size, us) = one.values, one.cost()
        assert v.keys() == {*FIELDS[operation], "tensors"}
        assert size <= MOST[0] and us <= MOST[1] and 0 < v["topk"] <= 2048
        assert one.queries >= 1 and one.keys >= 1 and "\n" not in one.line
        if "S_kv" in v:
            assert v["topk"] <= v["S_kv"] <= 2**20 and 64 <= v["S"] <= 8192
        if "b" in v:
            assert len(one.lengths) * v["next_n"] <= 1024 and max(one.lengths) <= 300_000
        if operation == "prefill":
            assert one.queries <= 65_536 and one.keys <= 135_168


def test_weights_are_those_that_are_written() -> None:
    drawn = many("decode", 2000)
    share = sum(one.values["rows"] == "packed" for one in drawn) / 2000
    assert abs(share - 0.7) < 5 * math.sqrt(0.7 * 0.3 / 2000)
    agents = [n for one in drawn if one.values["contexts"] == "agents" for n in one.lengths]
    middle = sorted(agents)[len(agents) // 2]
    assert abs(middle - 40_000) < 2000  # sqrt(8,000 x 200,000)


@pytest.mark.parametrize("kind", ["corr", "random", "causal", "window", "prefix"])
def test_ids_are_distinct_and_seen(kind: str) -> None:
    number = {"corr": (0.25,), "window": (9,), "prefix": (3,)}.get(kind, ())
    g = torch.Generator().manual_seed(1)
    seen = torch.arange(5, 105)
    ids = draw_ids((kind, *number), seen, 32, 105, g)
    assert ids.dtype == torch.int32 and ids.shape == (100, 32)
    shared = []
    for query, (row, before) in enumerate(zip(ids, ids.roll(1, 0), strict=True)):
        named = row[row >= 0].tolist()
        assert len(set(named)) == len(named)
        count = {"prefix": min(query + 3, 32)}.get(kind, min(query + 5, 32))
        assert len(named) == (count if kind not in ("corr", "random") else 32)
        assert (row[len(named) :] == -1).all()
        limit = 105 if kind in ("corr", "random") else query + 5
        assert max(named) < limit
        if kind == "window":
            assert set(range(max(0, limit - 9), limit)) <= set(named)
        shared.append(float((row == before).float().mean()))
    if kind == "corr":
        assert 0.7 < sum(shared[1:]) / 99 < 0.85


def test_every_key_is_as_likely() -> None:
    g = torch.Generator().manual_seed(2)
    counts = positions(0, torch.full((4000,), 90), 30, g).flatten().bincount(minlength=90)
    assert counts.sum() == 120_000 and (counts - 4000 / 3).abs().max() < 6 * math.sqrt(4000 / 3)


def test_a_request_names_rows_of_its_own_pages() -> None:
    one = next(x for x in many("decode") if x.values["next_n"] > 1).small()
    x = decode_inputs(one, "cpu")
    rows = x.indices.view(len(one.lengths), -1)
    pages = [set((row[row >= 0] // 64).tolist()) for row in rows]
    assert all(not (a & b) for at, a in enumerate(pages) for b in pages[:at])
    assert x.topk_length is not None  # contexts are shorter than topk
    assert ((x.indices >= 0).sum(1) == x.topk_length).all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_draws_are_legal_and_judged(operation: str) -> None:
    kinds: dict[Any, Draw] = {}
    for one in many(operation, 60):
        v = one.values
        key = [v.get(name) for name in ("ids", "scores", "kind", "rows", "dtype", "sink")]
        kinds.setdefault(str([x[0] if isinstance(x, tuple) else x for x in key]), one.small())
    for one in list(kinds.values())[:5]:
        for part in PARTS.get(operation, ("",)):
            task = make_task(one, part, "cpu", "cpu")
            found: Any = task.call()
            assert not task.judge(found).findings, one.line
            for result in found if isinstance(found, tuple) else (found,):
                result[-1:] = 7
            assert task.judge(found).findings or max(one.lengths or (9,)) < 8, one.line


@pytest.mark.parametrize(
    "operation", ["two-levels", pytest.param("two-levels-prefill", marks=pytest.mark.slow)]
)
def test_one_wrong_id_in_two_levels_is_seen(operation: str) -> None:
    """A tie to the later position, two ids of another order, an id in place of the last -1."""
    seen = set()
    for one in [x.small() for x in many(operation, 60)]:
        few = dict(one.values) | {"topk": min(one.values["topk"], 4)}
        one = replace(one, values=few)
        task = make_task(one, "", "cpu", "cpu")
        ids: Any = task.call()
        assert not task.judge(ids).findings, one.line
        levels = task.inputs
        values, some = levels.ranked(torch.arange(len(ids)))
        right = levels.best(values, some)
        count = int((right[-1] >= 0).sum())
        worst = int(right[-1, count - 1])
        ties = some[-1] & (values[-1] == values[-1, worst])
        ties[: worst + 1] = False
        wrong: dict[str, Any] = {}
        if count and bool(ties.any()):
            right[-1, count - 1] = ties.nonzero()[-1]
            rows = torch.tensor([len(ids) - 1])
            wrong["tie"] = right[-1].int()
            if levels.candidates is not None:
                wrong["tie"] = levels.ids_of(rows, right[-1:])[0].int()
        if one.values["sorted"] and count > 1:
            wrong["order"] = torch.cat([ids[-1, :2].flip(0), ids[-1, 2:]])
        if 0 < count < ids.shape[1]:
            wrong["more"] = torch.cat([ids[-1, :-1], ids[-1, :1]])
        for name, row in wrong.items():
            changed = ids.clone()
            changed[-1] = row
            assert task.judge(changed).findings, (name, one.line)
            seen.add(name)
    assert seen == {"tie", "order", "more"}


@pytest.mark.parametrize(
    "operation",
    [pytest.param(x, marks=() if x == "decode" else pytest.mark.slow) for x in OPERATIONS],
)
def test_every_peer_is_right_on_what_it_serves(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    kinds: dict[Any, Draw] = {}
    for one in many(operation, 60):
        v = one.values
        key = [v.get(name) for name in ("next_n", "kind", "rows", "dtype", "index_heads")]
        kinds.setdefault(str([x[0] if isinstance(x, tuple) else x for x in key]), one.small())
    served = set()
    bench = BenchOptions([], brief=True)

    def is_wanted(name: str) -> bool:
        return name != OTHERS["triton"]

    for one in list(kinds.values())[:6]:
        for found in measure_draw(one, DrawOptions([one], "cpu", None, is_wanted), bench, SHORT):
            assert not found.findings, found
            assert {why.partition(":")[0] for why in found.missing.values()} <= {
                "NotImplementedError"
            }, found.missing
            served |= found.times["hot"].keys() - {OURS}
            assert found.ratio("hot") is not None or operation == "backward-512"  # no peer
    assert served >= {
        "forward": {"FlashMLA", PROMISES["batch_invariant"]},
        "decode": {"FlashMLA", PROMISES["batch_invariant"]},
        "prompts": {"FlashMLA", PROMISES["batch_invariant"]},
        "chats": {"FlashMLA", PROMISES["batch_invariant"]},
        "backward": {"cuDNN Frontend", PROMISES["deterministic"]},
        "indexer": {"DeepGEMM + FlashInfer CUB", "DeepGEMM + cuDNN Frontend"},
        "prefill": {"DeepGEMM + FlashInfer CUB", "cuDNN Frontend + cuDNN Frontend"},
        "forward-512": {"FlashMLA", PROMISES["batch_invariant"]},
        "backward-512": {PROMISES["deterministic"]},
        "decode-512": {"FlashMLA", PROMISES["batch_invariant"]},
        "training": {"cuDNN Frontend"},
        "two-levels": {"our scores, torch"},
        "two-levels-prefill": {"our scores, torch"},
    }[operation] | {OTHERS["torch"]}


def row(line: str, hot: float, peer: float | None = None, **more: float) -> Row:
    us = {OURS: hot} | ({} if peer is None else {"them": peer}) | more
    times = {name: Times(value) for name, value in us.items()}
    return Row("it", line, "sm90", {}, 0.0, "", "", 0.0, {"hot": times})


def test_the_reports_arithmetic() -> None:
    ratios = [0.5, 1.0, 2.0, 4.0]
    rows = [row(f"d{at}", 10.0, 10 * ratio) for at, ratio in enumerate(ratios)]
    rows += [row("alone", 3.0), row("slow", 10.0, 20.0, other=19.0)]
    for option, us in (("deterministic", 13.0), ("batch_invariant", 11.0)):
        rows[1].times["hot"][PROMISES[option]] = Times(us)
    rows[0].missing["absent"] = "not there"
    rows[2].findings["them"] = ["wrong"]
    (found,) = reports(rows)
    figures = found.figures["hot"]
    assert figures.count == 4 and figures.lowest == 0.5  # without the wrong one and that alone
    assert figures.median == pytest.approx(1.45) and figures.p5 == pytest.approx(0.575)
    assert figures.geometric_mean == pytest.approx((0.5 * 1 * 4 * 1.9) ** 0.25)
    assert found.lowest[0] == (0.5, "hot", "them", "d0") and found.lowest[2][2] == "other"
    assert found.unserved == [(10.0, "d2"), (3.0, "alone")]
    assert [one.option for one in found.cost] == list(PROMISES)
    assert [one.largest for one in found.cost] == [pytest.approx(1.3), pytest.approx(1.1)]
    assert found.missing == {"absent: not there": 1, "them: a wrong result": 1}
    assert "| it | 4 | 0.50 | 0.57 | 1.45 | 1.40 |" in markdown([found])
    assert Figures.of([]) is None


def test_the_largest_mean_that_there_is() -> None:
    """The peer's time over that of the same work at the ceiling's rate: 2 ways of 1 GB/us."""
    rows = [
        row("a", 10.0, 12.0),
        row("b", 10.0, 27.0),
        row("alone", 10.0),
        row("untimed", 1.0, 2.0),
    ]
    for one in rows[:3]:
        one.times["hot"][CEILING] = Times(5.0)
    rows = [replace(one, work=4e6, ceiling_work=5e6) for one in rows]
    assert [ratio_at_ceiling(one) for one in rows] == [pytest.approx(3.0), 6.75, None, None]
    (found,) = reports(rows)
    assert found.at_ceiling == pytest.approx((3.0 * 6.75) ** 0.5)
    assert found.figures["hot"].count == 3


def test_work_is_products_or_each_named_row_once() -> None:
    q, kv = torch.zeros(2, 4, 8), torch.zeros(9, 8)
    ids = torch.tensor([[3, 3, -1, 7], [3, 8, 99, 5]]).int()
    products = Task(print, lambda _: Verdict({}, []), 1e9, products_ceiling("cpu"), None)
    few = replace(products, work=10.0)
    lists = [Source(kv, ids, torch.tensor([4, 3]).int()), Source(kv[:4], ids)]
    assert bound(products, q, lists) == products
    found = bound(few, q, lists)
    # q and O; rows 3, 7, 8 of the first source, 3 of the second
    assert found.ceiling.unit == "B" and found.work == 2 * 64 * 4 + (3 + 1) * 8 * 4


def test_two_runs_are_compared_draw_by_draw() -> None:
    old = [row("a", 10.0, 30.0), row("b", 20.0), row("gone", 1.0)]
    new = [row("a", 5.0, 15.0), row("b", 40.0), row("fresh", 1.0)]
    (change,) = changes(old, new)
    assert change.figures["hot"].count == 2 and change.figures["hot"].lowest == 0.5
    assert change.machine["hot"] == pytest.approx(2.0)
    assert change.lowest[0] == (0.5, "hot", "b")


def test_a_fixed_value_changes_no_other() -> None:
    free = draw("forward", 5, 3)
    words = ("heads=128", "ids=window-500", "lengths=None", "sink=True", "S_kv=8192")
    fixed = draw("forward", 5, 3, dict(fixed_value("forward", one) for one in words))
    assert dict(fixed.values) == dict(free.values) | {
        "heads": 128, "ids": ("window", 500), "lengths": None, "sink": True, "S_kv": 8192
    }  # fmt: skip
    contexts = {"b": 3, **dict([fixed_value("decode", "contexts=equal-4096")])}
    assert draw("decode", 5, 3, contexts).lengths == (4096,) * 3
    assert fixed_value("two-levels", "ids=position") == ("ids", "position")
    v41 = draw("decode-512", 5, 4, dict([fixed_value("decode-512", "rows=v41")])).small()
    task = make_task(v41, "", "cpu", "cpu")
    assert not task.judge(task.call()).findings
    with pytest.raises(ArgumentValueError, match="forward: expected one of S, S_kv, heads"):
        fixed_value("forward", "next_n=2")


def test_the_command_lists_runs_and_reports(tmp_path: Path) -> None:
    listed = invoke("forward", "training", "--list", "--count", "2", "--seed", "9")
    assert listed.output.splitlines() == [
        draw(one, 9, at).line for at in range(2) for one in ("forward", "training")
    ]
    assert "heads=40 " in invoke("forward", "--list", "--count", "1", "--fix", "heads=40").output
    out, chart = tmp_path / "x.json", tmp_path / "x.png"
    words = ["decode", "--only", "3", "--backend", "cpu", "--seed", "9", "--peers", "none"]
    shown = invoke(*words, "--out", str(out))
    assert shown.exit_code == 0 and "1 of 1 draws" in shown.output, shown.output
    document = json.loads(out.read_text())
    assert document["schema"] == "flashdsa-draws/1" and document["done"] == 1
    rows = [asdict(row("d", 10.0, 10 * ratio)) for ratio in (0.8, 1.0, 3.0)]
    out.write_text(json.dumps(document | {"rows": rows}))
    shown = invoke("report", str(out), "--baseline", str(out), "--all", "--chart", str(chart))
    assert shown.exit_code == 0 and "1.34" in shown.output and "peers' mean" in shown.output
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert invoke("report", str(tmp_path / "none.json")).exit_code == 2


def test_the_readme_can_show_all_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_tables, "ROOT", tmp_path)
    assert result_tables.draws_table() == ""
    folder = tmp_path / result_tables.RESULTS / "draws"
    folder.mkdir(parents=True)
    options = DrawOptions([draw("decode", 9, 3).small()], "cpu")
    document = run_draws(options)
    for name, ratio in (("2026-11-22-seed-1-a", 2.0), ("2026-11-23-seed-2-b", 0.5)):
        rows = [asdict(row(name, 10.0, 10 * ratio))]
        rows += [rows[0] | {"operation": "forward", "problem": {"h": h}} for h in (128, 64, 8)]
        git = {"commit": "0123456789abcdef"} if ratio == 2.0 else None
        found = document | {"rows": rows, "git": git}
        (folder / f"{name}.json").write_text(json.dumps(found))
    packed = folder / "2026-11-23-seed-2-b.json"
    packed.with_suffix(".json.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    shown = result_tables.updated(
        "<!-- draws -->\nold\n<!-- /draws --><!-- heads -->\nold\n<!-- /heads -->"
    )
    assert "| it | 2 | 0.50 | 0.57 | 1.25 | 1.00 |" in shown and "old" not in shown
    where = "2026-11-22, 2026-11-23, commit 0123456789, unrecorded: [2 documents]"
    assert f"{where}(results/draws)" in shown
    assert "| forward | 1.00 | 1.00 | - | - | 1.00 |" in shown


def test_slow_peers_keep_their_rough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rough = {OURS: 50.0, "fast": 10.0, "near": 12.0, "slow": 14.0}
    monkeypatch.setattr(timing.torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(DrawTimer, "_roughly", lambda self, name, call: rough[name])
    monkeypatch.setattr(timing, "replay_of", lambda call, count: None)
    for how in ("_hot", "_cold"):
        taken = lambda self, calls, *_: dict.fromkeys(calls, Times(1.0))
        monkeypatch.setattr(DrawTimer, how, taken)
    timer = DrawTimer(SHORT, 1, rests=False)
    calls: dict[str, Any] = dict.fromkeys(rough, print)
    for condition in ("hot", "cold"):
        times = timer.in_turns(calls, condition, 3)
        assert {name: one.median for name, one in times.items()} == {
            OURS: 1.0, "fast": 1.0, "near": 1.0, "slow": 14.0
        }  # fmt: skip


def test_a_budget_asks_for_short_samples_and_an_error_is_a_wrong_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = draw("forward", 1, 0).small()
    assert DrawOptions([one] * 10, budget=39.0).protocol is SHORT
    assert DrawOptions([one] * 10, budget=40.0).protocol is FULL
    assert DrawOptions([one]).protocol is FULL

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(run_module, "make_task", fail)
    document = run_draws(DrawOptions([one, one], "cpu"))
    assert document["done"] == 0 and "illegal" in document["stopped"]
    assert "illegal" in next(reports(rows_of(document))).wrong[0]


def test_no_draw_begins_that_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = invoke("forward", "--backend", "cpu", "--budget", "0", "--json")
    assert json.loads(shown.stdout)["done"] <= 1
