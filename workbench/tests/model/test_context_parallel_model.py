"""The model of context parallelism: what it counts, its limits, and the table of its design."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashdsa.distributed import SequenceLayout
from workbench.__main__ import cli
from workbench.model.context_parallel import (
    Layer,
    Rates,
    collective,
    falls_below,
    local_rows,
    rank_work,
    step,
    sweep,
)

# Links as the design assumed them: 80 % of NVLink's 450 GB/s and of cards of 50 GB/s, no latency.
DESIGN = Rates(link_gb=360, pair_link_gb=360, nic_gb=40, latency_us=0, hop_us=0, nic_hop_us=0)
MILLION = 1 << 20


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("seq_len", "ranks"), [(1000, 1), (1000, 3), (70_000, 8), (640, 16)])
def test_work_is_that_of_the_layout(layout: str, seq_len: int, ranks: int) -> None:
    layer = Layer(seq_len=seq_len, topk=100, layout=layout)
    for rank in range(ranks):
        lengths = getattr(SequenceLayout, layout)(seq_len, (rank, ranks)).seq_lens.long()
        found = rank_work(layer, ranks, rank)
        assert found.scored == int(lengths.sum())
        assert found.attended == int(lengths.clamp_max(100).sum())
        assert local_rows(layer, ranks) == len(lengths)


@pytest.mark.parametrize(
    ("seq_len", "ranks", "kv", "pages", "dkv", "forward", "backward", "indexer"),
    [
        (131072, 2, 0.21, 0.02, 0.42, 62, 189, 78),
        (131072, 8, 0.37, 0.04, 0.73, 15.6, 47, 19.5),
        (131072, 32, 0.41, 0.05, 0.81, 3.9, 11.8, 4.9),
        (131072, 128, 0.44, 0.05, 0.88, 1.0, 3.0, 1.2),
        (MILLION, 8, 2.9, 0.34, 5.9, 125, 378, 1251),
        (MILLION, 32, 3.3, 0.37, 6.5, 31, 95, 313),
        (MILLION, 128, 3.5, 0.41, 7.1, 7.8, 23.6, 78),
    ],
)
def test_the_designs_table(
    seq_len: int,
    ranks: int,
    kv: float,
    pages: float,
    dkv: float,
    forward: float,
    backward: float,
    indexer: float,
) -> None:
    found = step(Layer(seq_len=seq_len), ranks, DESIGN)
    for value, expected in (
        (found.gather_kv, kv),
        (found.scatter_dkv, dkv),
        (found.forward, forward),
        (found.backward, backward),
        (found.indexer, indexer),
    ):
        assert 1e3 * value == pytest.approx(expected, rel=0.03)
    assert 1e3 * found.gather_pages == pytest.approx(pages, abs=0.012)


@pytest.mark.parametrize(
    ("megabytes", "ranks", "measured_ms"),
    [
        (151, 4, 0.428),
        (1208, 4, 2.78),
        (151, 2, 0.340),
        (1208, 2, 2.24),
        (17.3, 4, 0.102),
        (138, 2, 0.313),
        (302, 4, 0.765),
        (2416, 2, 4.22),
    ],
)
def test_collectives_of_four_h200s(megabytes: float, ranks: int, measured_ms: float) -> None:
    """As measured with NCCL on one host, 2026-11-21; megabytes of all ranks together."""
    found = 1e3 * collective(megabytes * 1e6, ranks, Rates())
    assert found == pytest.approx(measured_ms, rel=0.3)


def test_one_rank_communicates_nothing() -> None:
    alone = step(Layer(), 1, Rates())
    assert alone.exposed == alone.gather_kv == alone.scatter_dkv == 0
    assert alone.efficiency == 1


def test_limits() -> None:
    layer = Layer(seq_len=MILLION)
    steps = sweep(layer, Rates())
    assert [one.ranks for one in steps] == [2**power for power in range(14)]
    assert all(one.exposed >= 0 and 0 < one.efficiency <= 1 for one in steps)
    assert all(later.efficiency <= sooner.efficiency for sooner, later in pairwise(steps))
    fast = sweep(layer, Rates(link_gb=680, pair_link_gb=570, nic_gb=80))
    half = sweep(replace(layer, grad_wire="bf16"), Rates())
    loose = sweep(replace(layer, overlap=False), Rates())
    late = sweep(layer, Rates(noise=0.02))
    for one, quicker, lighter, unhidden, noisy in zip(steps, fast, half, loose, late, strict=True):
        assert quicker.seconds <= one.seconds
        assert lighter.seconds <= one.seconds <= unhidden.seconds
        assert noisy.seconds >= one.seconds
    below = falls_below(steps)
    assert below is not None and below.efficiency < 0.8
    assert steps[steps.index(below) - 1].efficiency >= 0.8


def test_zigzag_balances_and_contiguous_does_not() -> None:
    zigzag, contiguous = (step(Layer(layout=name), 8, Rates()) for name in ("zigzag", "contiguous"))
    ideal = step(Layer(), 1, Rates()).indexer / 8
    assert zigzag.indexer == pytest.approx(ideal, rel=1e-3)
    assert contiguous.indexer == pytest.approx(1.875 * ideal, rel=1e-2)


def test_the_command(tmp_path: Path) -> None:
    chart, rates = tmp_path / "ranks.png", tmp_path / "rates.json"
    rates.write_text('{"indexer_tflops": 450, "gpus_per_node": 72}')
    chosen = ["model", "context-parallel", "--rates", str(rates)]
    run = CliRunner().invoke(cli, [*chosen, "--chart", str(chart)])
    assert run.exit_code == 0, run.output
    assert "Efficiency falls below 80 % at" in run.output and "8192" in run.output
    assert max(map(len, run.output.splitlines())) <= 100
    assert chart.stat().st_size > 10_000
    document = json.loads(CliRunner().invoke(cli, [*chosen, "--json"]).stdout)
    assert document["rates"]["gpus_per_node"] == 72
    assert document["steps"][0]["efficiency"] == 1
    assert f"at {document['below_80_percent_at']} ranks" in run.output
    rates.write_text('{"speed": 1}')
    wrong = CliRunner().invoke(cli, chosen)
    assert wrong.exit_code == 2 and "--rates: expected an object with names" in wrong.output
