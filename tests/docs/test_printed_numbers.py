"""Numbers that the documents share with a command are those that the command prints."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import flashdsa
from flashdsa import reference
from flashdsa.analysis.model.backward_sm100 import S_KV
from flashdsa.analysis.model.context_parallel import Layer, Rates, falls_below, sweep
from flashdsa.analysis.model.shapes import QUERIES
from flashdsa.analysis.model.unknowns import attention_ranges
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.indexer.clusters import choose_clusters
from flashdsa.bench.gpu.forward import read_forward_result
from flashdsa.cli.main import cli
from flashdsa.kernels.indexer.sm100.plan import PAGES_PER_STAGE, IndexerPlan
from flashdsa.problem import PAGE_SIZE
from ptxemu.cli.report import FAIL_ON
from tools.mutation_tables import read_table

DOCS = Path(__file__).parents[2] / "docs"


def rows_under(page: str, heading: str) -> dict[str, list[str]]:
    """The table whose header begins with `heading`: cells of each row by the first one."""
    text = (DOCS / page).read_text()
    start = text.index(f"| {heading} |")
    table = re.split(r"\n\n", text[start:])[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first: rest for first, *rest in cells}


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    """What `flashdsa model --json` prints."""
    document: dict[str, Any] = json.loads(CliRunner().invoke(cli, ["model", "--json"]).stdout)
    return document


def number(cell: str) -> float:
    return float(cell.replace("*", "").replace(",", "").replace("%", ""))


INDEXER_KINDS = {
    "nine shapes": "shape",
    "further batches of one length": "equal",
    "nine shapes, captured": "captured",
    "mixed lengths": "ragged",
    "score patterns": "distribution",
    "requests with two queries": "requests",
}
"""Kinds of the bench's cases by their names on the page."""


def test_the_indexers_ratios_to_its_peers() -> None:
    path = DOCS.parent / "benchmarks/results/indexer/2026-11-22-all-h200.json"
    cases = json.loads(path.read_text())["rows"]
    printed = rows_under("kernels/indexer-sm90.md", "kind of cases")
    assert list(printed) == [*INDEXER_KINDS, "all"]
    for name, (count, mean, lowest) in printed.items():
        kind = INDEXER_KINDS.get(name)
        ratios = [c["pair_us"] / c["ours_us"] for c in cases if kind in (None, c["kind"])]
        assert number(count) == len(ratios), name
        assert mean == f"{geometric_mean(ratios):.2f}" and lowest == f"{min(ratios):.2f}", name


def test_bounds_of_the_backward(model: dict[str, Any]) -> None:
    ours = model["backward"]["predictions"][0]
    demands = ours["demands_cycles_a_unit"]
    b200 = model["machines"]["B200"]
    rate = b200["sms"]["value"] * b200["clock"]["value"] / 1e12
    most = model["backward"]["a_block_and_cta"]["useful_flop"] * rate
    names = {"MMAs, each with its operands": "tensor core"}
    for bound, (clocks, tflops) in rows_under("concepts/performance-model.md", "bound").items():
        wanted = demands[names.get(bound, bound)]
        assert number(clocks) == round(wanted), bound
        assert number(tflops) == round(most / wanted), bound


def test_ways_out_of_the_backward(model: dict[str, Any]) -> None:
    backward = model["backward"]
    wanted = [
        *backward["predictions"],
        backward["with_bulk_reads_at_full_rate"],
        backward["with_dsmem_at_half_rate"],
    ]
    written = rows_under("concepts/performance-model.md", "dKV leaves by")
    assert [[number(cell) for cell in row] for row in written.values()] == [
        [round(one[key]) for key in ("cycles_a_unit", "cycles_of_the_ends_of_an_item", "tflops")]
        for one in wanted
    ]


def test_the_backwards_budget_old_against_new(model: dict[str, Any]) -> None:
    written = rows_under("concepts/performance-model.md", "resource | first")
    wanted = {
        line["resource"]: [f"{line[one]:,.0f}" for one in ("first", "now", "from_registers")]
        for line in model["backward_budget"]
    }
    assert written == wanted


def test_ranges_of_attention() -> None:
    written = rows_under("concepts/performance-model.md", "kernel")
    for topk in (512, 2048):
        for one in attention_ranges(QUERIES, topk, S_KV):
            row = written[f"{one.kernel.name}, topk {topk}"]
            wanted = [round(at.tflops) for at in (one.best, one.middle, one.worst)]
            assert [number(cell) for cell in row] == wanted


def test_a_block_of_the_backward(model: dict[str, Any]) -> None:
    block = model["backward"]["a_block_and_cta"]
    text = " ".join((DOCS / "concepts/performance-model.md").read_text().split())
    for name, words in (
        ("tensor_core_cycles", "{} clocks of the tensor core"),
        ("operand_bytes", "{} operand bytes"),
        ("other_shared_memory_bytes", "{} other bytes of shared memory"),
        ("bulk_read_bytes", "{} bytes read by bulk reductions"),
        ("dsmem_bytes", "{} over DSMEM"),
        ("gathered_bytes", "{} gathered"),
        ("reduced_bytes", "{} added"),
    ):
        assert words.format(f"{int(block[name]):,}") in text


def test_the_forwards_speeds_are_those_of_the_result() -> None:
    page = "kernels/sparse-mla-fwd-sm90.md"
    (name,) = set(re.findall(r"`(benchmarks/results/\S+\.json)`", (DOCS / page).read_text()))
    result = read_forward_result(DOCS.parent / name)
    wanted = {}
    for row in result.rows:
        ratios = (row.burst_ratio, row.hot_ratio)
        burst, hot = ("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        times = (f"{row.burst_ms:.2f}", burst, f"{row.hot_ms:.2f}", f"{row.hot_tflops:.0f}", hot)
        wanted[row.name] = list(times)
    assert rows_under(page, "case") == wanted


def test_errors_of_the_model(model: dict[str, Any]) -> None:
    by_group: dict[str, list[float]] = {}
    for one in model["comparisons"]:
        by_group.setdefault(one["group"], []).append(one["error"])
    written = rows_under("concepts/performance-model.md", "group")
    assert len(written) == len(by_group)
    for group, errors in by_group.items():
        (row,) = (cells for name, cells in written.items() if name.startswith(group))
        mean = sum(abs(error) for error in errors) / len(errors)
        worst = max(errors, key=abs)
        assert [number(cell) for cell in row[:3]] == [
            len(errors),
            round(100 * mean),
            round(100 * worst),
        ]


def test_the_errors_of_large_logits_are_those_of_the_page() -> None:
    written = "1.7e-3 with logits of standard deviation 1, and 5e-3 to 1.3e-2 with logits 10 to 100"
    assert written in " ".join((DOCS / "concepts" / "dsa.md").read_text().split())
    assert chain_error(1) == pytest.approx(1.7e-3, rel=0.1)
    for size in (10, 30, 100):
        assert 4e-3 < chain_error(size) < 1.5e-2


def chain_error(size: int) -> float:
    """Of dQ against float64 from the unrounded O, relative; logits have that standard deviation."""
    generator = torch.Generator().manual_seed(0)
    q = (size * torch.randn(2, 32, 576, generator=generator)).bfloat16()
    kv = torch.randn(1000, 576, generator=generator).bfloat16()
    dO = torch.randn(2, 32, 512, generator=generator).bfloat16()
    indices = torch.stack([torch.randperm(1000, generator=generator)[:512] for _ in range(2)]).int()
    O, lse = flashdsa.sparse_mla_fwd(q, kv, indices)
    dQ = flashdsa.mla_bwd(q, kv, dO, lse, O, indices)[0].double()
    exact = reference.mla_bwd(
        q,
        kv,
        dO,
        *reversed(reference.sparse_mla_fwd(q, kv, indices, d_v=512)),
        indices,
    )[0]
    return float((dQ - exact).norm() / exact.norm())


RESULTS = DOCS.parent / "benchmarks/results/mutation"
CAMPAIGNS = {
    "CUTLASS GEMM `sm_90a`, cluster 2x1": "cutlass-gemm-sm_90a",
    "quack 0.6.5 GEMM `sm_90a`, 4 launches": "quack-gemm-sm_90a",
    "CUTLASS FMHA `sm_90a`": "cutlass-fmha-sm_90a",
    "cuDNN DSA backward `sm_90a`": "cudnn-dsa-backward-sm_90a",
    "CUTLASS GEMM `sm_100a`, 1 CTA": "cutlass-gemm-1cta-sm_100a",
    "CUTLASS GEMM `sm_100a`, 2 CTAs": "cutlass-gemm-2cta-sm_100a",
    "quack 0.6.5 GEMM `sm_100a`, 2 launches": "quack-gemm-sm_100a",
    "cuDNN DSA backward `sm_100a`, H=64": "cudnn-dsa-backward-h64-sm_100a",
    "our `mla_bwd` `sm_100a`": "mla-bwd-sm_100a",
    "our `mla_bwd` `sm_100a`, 64 heads": "mla-bwd-groups-sm_100a",
    "our `mla_fwd` `sm_100a`": "mla-fwd-sm_100a",
    "our `mla_fwd` `sm_100a`, 64 heads": "mla-fwd-groups-sm_100a",
    "our `mla_fwd` `sm_90a`": "mla-fwd-sm_90a",
    "our decode `sm_90a`, bf16": "mla-decode-sm_90a",
    "our decode `sm_90a`, packed": "mla-decode-packed-sm_90a",
    "our decode `sm_90a`, 16 heads": "mla-decode-heads16-sm_90a",
    "our decode `sm_90a`, 32 heads": "mla-decode-heads32-sm_90a",
    "our fused backward `sm_90a`": "mla-bwd-fused-sm_90a",
    "our fused backward with slots `sm_90a`": "mla-bwd-slots-sm_90a",
    "our backward's scores `sm_90a`": "mla-bwd-scores-sm_90a",
    "our backward's dQ `sm_90a`": "mla-bwd-dq-sm_90a",
    "our backward's dKV `sm_90a`": "mla-bwd-dkv-sm_90a",
    "our backward's dKV in order `sm_90a`": "mla-bwd-dkv-ordered-sm_90a",
    "our backward's unions `sm_90a`": "mla-bwd-lists-sm_90a",
    "our fused indexer `sm_100a`": "indexer-sm_100a",
    "our fused indexer `sm_90a`": "indexer-sm_90a",
    "our fused indexer `sm_90a`, two rows together": "indexer-pairs-sm_90a",
    "our prefill indexer `sm_90a`": "prefill-sm_90a",
    "our prefill indexer `sm_90a`, bf16": "prefill-bf16-sm_90a",
    "our prefill indexer `sm_90a`, 16 heads": "prefill-heads16-sm_90a",
    "our prefill's order of lists `sm_90a`": "prefill-order-sm_90a",
    "our attention target `sm_90a`": "attention-target-sm_90a",
    "our index scores `sm_90a`": "indexer-scores-sm_90a",
    "our index backward `sm_90a`, groups of 2": "indexer-bwd-sm_90a",
    "our index backward `sm_90a`, groups of 4": "indexer-bwd-large-sm_90a",
    "our index backward in order `sm_90a`": "indexer-bwd-ordered-sm_90a",
    "our index backward's lists `sm_90a`": "indexer-bwd-lists-sm_90a",
}
"""Rows of the mutation table and the files that hold them."""


def test_the_mutation_table_is_that_of_the_results() -> None:
    written = rows_under("../ptxemu/benchmarks/results/NOTES.md", "kernel")
    assert set(written) == set(CAMPAIGNS)
    assert {path.stem for path in RESULTS.glob("mutation-*.json")} == {
        f"mutation-{name}" for name in CAMPAIGNS.values()
    }
    for row, name in CAMPAIGNS.items():
        document = read_table(RESULTS / f"mutation-{name}.json")
        counts = Counter(mutant["verdict"] for mutant in document["mutants"])
        caught, survived = counts["caught"], counts["survived"] + counts["noted"]
        wanted = [
            len(document["mutants"]),
            counts["not reached"],
            caught,
            counts["redundant"],
            counts["equivalent"],
            survived,
            round(100 * caught / (caught + survived + counts["equivalent"])),
            round(100 * caught / (caught + survived)),
        ]
        assert [number(cell) for cell in written[row]] == wanted, row


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("sparse-mla-fwd-sm90", ["mla-fwd-sm_90a"]),
        ("sparse-mla-fwd-sm100", ["mla-fwd-sm_100a", "mla-fwd-groups-sm_100a"]),
        (
            "mla-bwd-sm90",
            [
                "mla-bwd-fused-sm_90a",
                "mla-bwd-slots-sm_90a",
                "mla-bwd-scores-sm_90a",
                "mla-bwd-dq-sm_90a",
                "mla-bwd-dkv-sm_90a",
                "mla-bwd-dkv-ordered-sm_90a",
                "mla-bwd-lists-sm_90a",
            ],
        ),
        (
            "sparse-mla-decode-sm90",
            [
                "mla-decode-sm_90a",
                "mla-decode-packed-sm_90a",
                "mla-decode-heads16-sm_90a",
                "mla-decode-heads32-sm_90a",
            ],
        ),
        (
            "indexer-prefill-sm90",
            [
                "prefill-sm_90a",
                "prefill-bf16-sm_90a",
                "prefill-heads16-sm_90a",
                "prefill-order-sm_90a",
            ],
        ),
        (
            "indexer-training-sm90",
            [
                "attention-target-sm_90a",
                "indexer-scores-sm_90a",
                "indexer-bwd-sm_90a",
                "indexer-bwd-large-sm_90a",
                "indexer-bwd-ordered-sm_90a",
                "indexer-bwd-lists-sm_90a",
            ],
        ),
        (
            "indexer-sm90",
            [
                "indexer-sm_90a",
                "indexer-pairs-sm_90a",
            ],
        ),
        ("indexer-sm100", ["indexer-sm_100a"]),
    ],
)
def test_pages_have_the_mutants_of_their_kernels(page: str, names: list[str]) -> None:
    text = (DOCS / "kernels" / f"{page}.md").read_text().split("## Mutants")[1].split("## ")[0]
    written = {int(digits) for digits in re.findall(r"\b\d+\b", text)}
    for name in names:
        document = read_table(RESULTS / f"mutation-{name}.json")
        counts = Counter(mutant["verdict"] for mutant in document["mutants"])
        assert {len(document["mutants"]), *counts.values()} <= written


def test_the_choices_of_fail_on() -> None:
    written = rows_under("../ptxemu/docs/guides/check-a-kernel.md", "`--fail-on`")
    assert [re.findall("`(.*?)`", row)[0] for row in written] == list(FAIL_ON)


def test_the_indexers_clusters_on_an_h200() -> None:
    """Columns are "1, 2, 3", "up to 7", "8 to 15", ...: each number of rows that is named."""
    page = (DOCS / "kernels/indexer-sm90.md").read_text()
    table = page[page.index("| rows | 1, 2, 3 |") :].split("\n\n")[0].splitlines()
    heads, _, sizes, clusters = ([c.strip() for c in line.strip("|").split("|")] for line in table)
    for head, size, number in zip(heads[1:], sizes[1:], clusters[1:], strict=True):
        for place, rows in enumerate(int(digits) for digits in re.findall(r"\d+", head)):
            chosen = choose_clusters(H200.clusters, rows)
            each = [int(digits) for digits in re.findall(r"\d+", number)]
            assert chosen.size == int(size), rows
            if "for all" in number:
                assert chosen.number == each[0], rows
            else:
                assert chosen.num_splits == each[min(place, len(each) - 1)], rows


def test_pages_per_stage_of_the_blackwell_indexer() -> None:
    written = rows_under("kernels/indexer-sm100.md", "pages")
    assert len(written) == len(PAGES_PER_STAGE)
    for pages in PAGES_PER_STAGE:
        plan = IndexerPlan(pages_per_stage=pages)
        tokens, *_, columns, stages, warps = written[str(pages)]
        assert [int(cell) for cell in (tokens, columns, stages, warps)] == [
            pages * PAGE_SIZE,
            plan.tmem.allocated,
            plan.ring_stages,
            plan.load_warps,
        ]


def test_expected_times_of_the_blackwell_indexer(model: dict[str, Any]) -> None:
    by_shape: dict[str, dict[int, Any]] = {}
    for one in model["indexer"]:
        by_shape.setdefault(one["shape"], {})[one["pages_per_stage"]] = one
    written = rows_under("kernels/indexer-sm100.md", "rows/tokens")
    assert list(written) == list(by_shape)
    for shape, cells in written.items():
        found = by_shape[shape]
        times = ["{:.1f} to {:.1f}".format(*one["microseconds"]) for one in found.values()]
        assert list(found) == [1, 2, 4]
        assert cells == [str(found[2]["ctas_of_a_row"]), *times, found[2]["bound"]], shape


def test_efficiency_of_many_gpus_as_the_model_has_it() -> None:
    page = " ".join((DOCS / "concepts/performance-model.md").read_text().split())
    steps = sweep(Layer(seq_len=131072, heads=128, topk=2048), Rates())
    eight = next(step for step in steps if step.ranks == 8)
    below = falls_below(steps)
    assert below is not None
    assert (
        f"at 128K tokens and H = 128, efficiency is {100 * eight.efficiency:.0f} % at 8 GPUs "
        f"and falls below 80 % at {below.ranks};" in page
    )
    million = Layer(seq_len=2**20, heads=128, topk=2048, grad_wire="bf16")
    below = falls_below(sweep(million, Rates()))
    assert below is not None and f"at 1M tokens with bf16 on the wire at {below.ranks}." in page
