"""Tables of measured speeds are those of the results that they name."""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

import pytest

from benchmarks.draw_context_parallel import measured_step, rates_of
from flashdsa.analysis.model.context_parallel import Layer, step
from tests.docs.test_printed_numbers import DOCS, number, rows_under

RESULTS = DOCS.parent / "benchmarks/results"


def result(name: str) -> Any:
    """A JSON file of benchmarks/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_mixed_lengths_of_the_hopper_indexer() -> None:
    written = rows_under("kernels/indexer-sm90.md", "batch")
    every = result("indexer/2026-11-22-all-h200.json")["rows"]
    rows = [row for row in every if row["kind"] == "ragged"]
    ratios = []
    for (name, cells), row in zip(written.items(), rows, strict=True):
        assert row["case"] == f"ragged, {name}"
        ours, pair, floor = (row[which] for which in ("ours_us", "pair_us", "floor_us"))
        ratios.append(pair / ours)
        assert cells == [f"{ours:.1f}", f"{pair:.1f}", f"{pair / ours:.2f}", f"{floor:.1f}"], name
    words = f"The geometric mean is {geometric_mean(ratios):.2f}"
    page = (DOCS / "kernels/indexer-sm90.md").read_text()
    assert words in page and f"the lowest {min(ratios):.2f}" in page


def test_the_hopper_indexer_over_shared_keys() -> None:
    """Every row of the result; the claims are those of the first eight."""
    written = rows_under("kernels/indexer-prefill-sm90.md", "shape, heads, dtype")
    rows = result("indexer/2026-11-22-prefill-h200.json")["rows"]
    for (name, cells), row in zip(written.items(), rows, strict=True):
        assert name == row["name"] and row["wrong_rows"] == 0
        ms, best = row["ms"], row.get("best_top_k")
        wanted = [ms["ours"], ms.get("logits"), ms.get(best)]
        texts = ["" if one is None else f"{one:.3f}" for one in wanted]
        assert cells == [*texts, f"{row['ratio']:.2f}" if best else ""], name
    ratios = [row["ratio"] for row in rows[:8]]
    mean, lowest, highest = geometric_mean(ratios), min(ratios), max(ratios)
    page = (DOCS / "kernels/indexer-prefill-sm90.md").read_text()
    assert f"Geometric mean of the first eight {mean:.2f}, lowest {lowest:.2f}" in page
    readme = (DOCS.parent / "README.md").read_text()
    assert f"(prefill): {mean:.2f} in that of eight shapes, lowest {lowest:.2f}." in readme
    changes = " ".join((DOCS.parent / "CHANGELOG.md").read_text().split())
    claim = f"{lowest:.2f} to {highest:.2f} times the speed of DeepGEMM's logits and the best top-k"
    assert f"{claim}, {mean:.2f} in the geometric mean" in changes


def test_tokens_a_second_under_transformers() -> None:
    by_name: dict[str, dict[int, Any]] = {}
    for row in result("integrations/2026-11-21-transformers-h200.json")["rows"]:
        by_name.setdefault(row["implementation"], {})[row["length"]] = row
    names = {"sdpa": "sdpa", "eager": "eager"}
    names |= {f"flashdsa, indexer={one}": f'`"{one}"`' for one in ("exact", "model")}
    names["flashdsa, indexer=fp8"] = '`indexer="fp8"`'
    written = rows_under("guides/migration.md", "attention")
    for name, cells in written.items():
        (rows,) = (by_name[one] for one, words in names.items() if name.endswith(words))
        decoded = []
        for length, (speed, memory) in zip(rows, (cells[:2], cells[2:4], cells[4:6]), strict=True):
            row = rows[length]
            if "prefill_tokens_per_s" not in row:
                assert speed == "out of memory", name
                continue
            tokens = round(row["prefill_tokens_per_s"], -2)
            assert number(speed.removesuffix("tokens/s")) == tokens, name
            assert memory == f"{row['peak_GiB_above_weights']:.1f} GiB", name
            if length > min(rows):
                decoded.append(f"{row['decode_ms_a_token']:.1f}")
        assert cells[6] == (" / ".join(decoded) + " ms" if decoded else ""), name


def test_efficiency_on_many_gpus() -> None:
    written = rows_under("guides/context-parallel.md", "part")
    for place, gpus in enumerate((2, 4)):
        document = result(f"context_parallel/2026-11-21-{gpus}xh200.json")
        attention = document["attention"]
        share = {
            "forward, against one GPU": attention["forward, correlated"]["efficiency"],
            "backward": attention["backward, correlated, grad_wire fp32"]["efficiency"],
        }
        for name, efficiency in share.items():
            assert written[name][place] == f"{100 * efficiency:.1f} %", (name, gpus)
        ratio = document["indexer"]["zigzag"]["time over ideal"]
        assert written["indexer, time over ideal"][place] == f"{ratio:.2f}", gpus
        spread, alone = measured_step(document)
        assert written["the step"][place] == f"{100 * alone / gpus / spread:.1f} %", gpus


def test_how_far_the_model_is_off_on_many_gpus() -> None:
    page = " ".join((DOCS / "concepts/performance-model.md").read_text().split())
    documents = [result(f"context_parallel/2026-11-21-{gpus}xh200.json") for gpus in (2, 4)]
    layer = Layer(**documents[-1]["sizes"], overlap=False)
    rates = rates_of(documents[-1], layer)
    quick = []
    for document in documents:
        spread, _ = measured_step(document)
        quick.append(1 - 1e3 * step(layer, document["ranks"], rates).seconds / spread)
    first, second = (f"{100 * one:.1f}" for one in quick)
    assert f"it is {first} and {second} % too quick" in page


def test_microseconds_of_decode() -> None:
    written = rows_under("kernels/sparse-mla-decode-sm90.md", "case")
    document = result("sparse_mla_decode/2026-11-21-h200.json")
    by_name = {row["name"]: row for row in document["rows"]}
    for name, cells in written.items():
        packed, bf16 = by_name[name], by_name[f"{name}, bf16"]
        for cell, row in zip(cells[:3], (packed, bf16, packed["peer"]), strict=True):
            measured = [row["hot_us"], row["cold_us"]]
            assert [number(one) for one in cell.split("/")] == pytest.approx(measured, abs=0.051)
        ratio = f"{packed['hot_ratio']:.2f}x / {packed['cold_ratio']:.2f}x"
        assert cells[3] == ratio, name


def training_name(row: dict[str, Any], *, with_heads: bool) -> str:
    """A row of the page's tables, of a row of the result."""
    if not row["S_kv"]:
        return row["step"]
    heads = f"H={row['H']}, " if with_heads or row["step"] in ("target", "all") else ""
    return f"{row['step']}, {heads}{row['S_kv']:,} {row['ids']}"


@pytest.mark.parametrize(
    ("part", "heading"), [("rows", "step"), ("wrappers", "step, with their Python")]
)
def test_milliseconds_of_training_the_indexer(part: str, heading: str) -> None:
    rows = result("indexer_training/2026-11-21-training-h200.json")[part]
    measured = {training_name(row, with_heads=False): row for row in rows}
    written = rows_under("kernels/indexer-training-sm90.md", heading)
    assert set(written) == set(measured)
    for name, cells in written.items():
        row = measured[name]
        pairs = [f"{row[who]['burst']:.2f} / {row[who]['hot']:.2f}" for who in ("cudnn", "ours")]
        assert cells == [*pairs, "{:.2f}x / {:.2f}x".format(*row["ratio"])], name


def test_milliseconds_of_training_that_have_no_peer() -> None:
    rows = result("indexer_training/2026-11-21-training-h200.json")["alone"]
    measured = {
        training_name(row, with_heads=True): [
            f"{row['ours']['burst']:.2f} / {row['ours']['hot']:.2f}"
        ]
        for row in rows
    }
    assert rows_under("kernels/indexer-training-sm90.md", "step alone") == measured
