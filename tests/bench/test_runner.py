"""A run of every target on tiny sizes: rows, units, work, memory."""

from __future__ import annotations

import pytest
import torch

from flashdsa.bench import cases, protocol
from flashdsa.bench.cases import OPERATIONS, Shape, attention_inputs, build_case
from flashdsa.bench.memory import MemoryProbeError, measure_memory
from flashdsa.bench.runner import BenchOptions, run_bench

TINY = Shape(s=2, s_kv=96, h=3, topk=128)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_case_runs_and_counts_its_work(op: str) -> None:
    case = build_case(op, TINY, "cpu")
    case.run()
    expected = {
        "sparse_mla_fwd": 2 * 2 * 3 * 128 * (576 + 512),
        "mla_bwd": 2 * 2 * 3 * 128 * (3 * 576 + 2 * 512),
        "indexer": 2 * 2 * 64 * 96 * 128,
        "topk": 2 * 96 * 4,
    }
    assert case.work == expected[op]
    assert case.unit == ("GB/s" if op == "topk" else "GFLOPS")


def test_the_ceiling_is_the_agreed_matmul() -> None:
    ceiling = cases.matmul_ceiling()
    product = ceiling.run()
    assert isinstance(product, torch.Tensor)
    assert product.shape == (128, 2048) and product.dtype == torch.float32
    assert ceiling.work == 2 * 128 * 576 * 2048


def test_indices_are_distinct_and_filled_up() -> None:
    inputs = attention_inputs(TINY)
    for row in inputs.indices:
        assert sorted(row[:96].tolist()) == list(range(96))
        assert set(row[96:].tolist()) == {-1}


def test_a_run_reports_progress_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)
    told: list[tuple[int, int]] = []
    options = BenchOptions("all", TINY, repeats=2, memory_queries=())
    result = run_bench(options, lambda done, total, _: told.append((done, total)))
    assert told[-1] == (8, 8)
    assert len(result.rows) == 4 and not result.memory
    for row in result.rows:
        assert row.seconds_p10 <= row.seconds_median <= row.seconds_p90
        assert row.ratio == pytest.approx(row.rate / row.ceiling_rate)
    assert result.threads == torch.get_num_threads()


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    row = measure_memory("mla_bwd", Shape(s=2, s_kv=4096, h=4, topk=64), "cpu")
    operands = 2 * 4 * (576 + 2 * 512) * 4 + 4096 * 576 * 4 + 2 * 4 * 4 + 2 * 64 * 4
    assert row.input_bytes == operands
    assert row.output_bytes == (2 * 4 + 4096) * 576 * 4
    assert row.extra_peak_bytes < 100 << 20


def test_a_failing_probe_says_why() -> None:
    with pytest.raises(MemoryProbeError, match="cannot serve this call"):
        measure_memory("sparse_mla_fwd", Shape(s=1, s_kv=64, h=1, topk=1), "sm100")
