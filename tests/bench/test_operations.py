"""What is timed: cases are valid for their operation, work is counted, judges see what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.bench import attention, entries, indexer, training
from flashdsa.bench.attention import draw_ids, make_backward, make_forward
from flashdsa.bench.cases import Case, judge_errors, products_ceiling
from flashdsa.bench.indexer import IndexerInputs, make_indexer, make_topk, ragged_case
from flashdsa.bench.memory import MemoryProbeError, measure_memory
from flashdsa.bench.runner import OPERATIONS
from flashdsa.bench.training import make_training

TINY = Case(s=3, s_kv=96, h=3, topk=128, dtype="float32")


def different_cases(name: str) -> Iterator[Case]:
    """The quick form of the first case with each set of options."""
    seen = []
    for device in ("cpu", "cuda"):
        for case in OPERATIONS[name].cases[device]:
            if case.options.keys() not in seen or name in ("indexer_training", "entries"):
                seen.append(case.options.keys())
                yield case.quick()


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_kind_of_case_is_right_on_the_cpu(name: str) -> None:
    for case in different_cases(name):
        task = OPERATIONS[name].make(case, "cpu", 1, "cpu")
        verdict = task.judge(task.call())
        assert not verdict.findings, case.label
        assert task.work > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_cases_have_names_of_their_own(name: str) -> None:
    for cases in OPERATIONS[name].cases.values():
        assert len({case.label for case in cases}) == len(cases) > 0


def test_quick_never_enlarges() -> None:
    small = Case(s=2, s_kv=8, h=1, topk=4).quick()
    assert (small.s, small.s_kv, small.h, small.topk) == (2, 8, 1, 4)
    ragged = ragged_case("x", (5, 4000, 1, 2, 3)).quick()
    assert ragged.problem["lengths"] == [5, 1024, 1, 2]


def test_work_counts_valid_slots() -> None:
    slots = 3 * 96  # of 128 slots 96 name a row
    assert make_forward(TINY, "cpu", 0, "cpu").work == 2 * slots * 3 * (576 + 512)
    assert make_backward(TINY, "cpu", 0, "cpu").work == 2 * slots * 3 * (3 * 576 + 2 * 512)
    packed = replace(TINY, dtype="bfloat16", options={"decode": True, "packed": True})
    assert make_forward(packed, "cpu", 0, "cpu").work == slots * 656
    assert make_indexer(replace(TINY, h=64), "cpu", 0, "cpu").work == 2 * 3 * 64 * 96 * 128
    assert make_topk(TINY, "cpu", 0, "cpu").work == 3 * 96 * 4


def test_the_ceiling_of_a_cpu_is_the_forwards_own_tile() -> None:
    ceiling = products_ceiling("cpu")
    product = ceiling.call()
    assert isinstance(product, Tensor) and product.dtype == torch.float32
    assert product.shape == (128, 2048) and ceiling.work == 2 * 128 * 576 * 2048


def test_ids_are_distinct_and_filled_up() -> None:
    for row in draw_ids(TINY, torch.Generator().manual_seed(0)):
        assert sorted(row[:96].tolist()) == list(range(96))
        assert set(row[96:].tolist()) == {-1}


def test_correlated_lists_share_what_they_should() -> None:
    case = Case(20, 4096, 1, 400, options={"ids": "correlated"})
    ids = draw_ids(case, torch.Generator().manual_seed(0))
    shared = [float(torch.isin(a, b).float().mean()) for a, b in pairwise(ids)]
    assert all(0.94 < one < 1 for one in shared)


def test_an_error_that_is_no_number_is_over_any_limit() -> None:
    verdict = judge_errors({"O": (float("nan"), 1.0), "lse": (0.5, 1.0)})
    assert verdict.errors == {"lse": 0.5} and len(verdict.findings) == 1


def test_the_forwards_judge_sees_one_query_that_is_off() -> None:
    task = make_forward(replace(TINY, dtype="bfloat16"), "cpu", 0, "cpu")
    out, lse = task.call()  # type: ignore[misc]
    out[1] *= 1.01
    assert "O is off" in task.judge((out, lse)).findings[0]
    out[1] = torch.nan
    assert task.judge((out, lse)).findings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backwards_judge_knows_the_reference_and_sees_what_is_off(dtype: str) -> None:
    case = replace(TINY, topk=32, dtype=dtype, options={"ids": "correlated"})
    task = make_backward(case, "cpu", 0, "cpu")
    x = task.inputs
    q, kv, indices = x.forward[:3]
    dq, dkv, _ = reference.mla_bwd(q, kv, x.d_out, x.lse, x.out, indices)
    exact = task.judge((dq, dkv))
    assert not exact.findings and max(exact.errors.values()) < 1e-9
    wrong_q, wrong_kv = dq.clone(), dkv.clone()
    wrong_q[0] *= 1.02
    wrong_kv[int(indices[0, 0])] *= 1.02
    assert [line[:3] for line in task.judge((wrong_q, wrong_kv)).findings] == ["dQ ", "dKV"]


def test_right_ids_pass_and_each_kind_of_wrong_one_is_found() -> None:
    case = ragged_case("x", (2500, 5, 0, 2048, 2100))
    task = make_indexer(case, "cpu", 0, "cpu")
    x: IndexerInputs = task.inputs
    right: Any = task.call()
    assert task.judge(right).findings == []

    def finding(row: int, column: int, value: int) -> str:
        wrong = right.clone()
        wrong[row, column] = value
        (line,) = task.judge(wrong).findings
        return line

    assert finding(1, 5, 7) == "row 1: not -1 after the last id"
    assert finding(3, 9, -1) == "row 3: an id outside the cache"
    assert finding(0, 9, int(right[4, 0])) == "row 0: an id of another row's page"
    assert finding(0, 9, int(right[0, 8])) == "row 0: a token twice"
    scores, _ = indexer.float64_scores(x, 0)
    worst = int(scores.argmin())
    left_out = int(x.block_table[0, worst // 64]) * 64 + worst % 64
    assert "left out a score better by" in finding(0, 0, left_out)


def test_queries_of_a_request_share_its_pages() -> None:
    case = indexer.requests_case("x", (2500, 100), 2)
    task = make_indexer(case, "cpu", 0, "cpu")
    x: IndexerInputs = task.inputs
    assert x.lengths == (2499, 2500, 99, 100) and x.tokens == 2600 and len(x.block_table) == 2
    ids: Any = task.call()
    assert not task.judge(ids).findings
    ids[1, 0] = ids[1, 1]
    assert task.judge(ids).findings == ["row 1: a token twice"]


def test_top_ks_judge_sees_a_worse_score_and_one_twice() -> None:
    task = make_topk(Case(2, 64, 1, 8), "cpu", 0, "cpu")
    ids: Any = task.call()
    assert not task.judge(ids).findings
    for wrong in (int(task.inputs[0].argmin()), int(ids[0, 1])):
        changed = ids.clone()
        changed[0, 0] = wrong
        assert task.judge(changed).findings


@pytest.mark.parametrize("what", ["target", "scores", "divergence", "gradient", "backward", "all"])
def test_the_trainings_judge_sees_what_is_off(what: str) -> None:
    case = Case(4, 256, 16, 64, options={"what": what})
    task = make_training(case, "cpu", 0, "cpu")
    found: Any = task.call()
    assert not task.judge(found).findings
    many = isinstance(found, tuple)
    for at in range(len(found) if many else 1):
        wrong = [one.clone() for one in found] if many else [found.clone()]
        wrong[at] *= float("nan") if what == "all" else 1.1
        assert task.judge(tuple(wrong) if many else wrong[0]).findings, at


@pytest.mark.parametrize("form", ["CSA", "pools of 4"])
def test_the_judge_of_entries_sees_what_is_off(form: str) -> None:
    case = Case(1, 64, options={"form": form, "what": "both"})
    task = entries.make_entries(case, "cpu", 0, "cpu")
    found: Any = task.call()
    assert not task.judge(found).findings
    for at in range(3):
        wrong = [x * 1.1 if n == at else x for n, x in enumerate(found)]
        assert task.judge(tuple(wrong)).findings, at


def test_tables_are_those_of_the_modules() -> None:
    every = [one.name for x in (attention, indexer, training, entries) for one in x.OPERATIONS]
    assert every == list(OPERATIONS)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    row = measure_memory("mla_bwd", Case(2, 4096, 4, 64, "float32"), "cpu")
    operands = 2 * 4 * (576 + 2 * 512) * 4 + 4096 * 576 * 4 + 2 * 4 * 4 + 2 * 64 * 4
    assert row.input_bytes == operands
    assert row.output_bytes == (2 * 4 + 4096) * 576 * 4
    assert row.extra_peak_bytes < 100 << 20


def test_a_failing_probe_says_why() -> None:
    with pytest.raises(MemoryProbeError, match="cannot serve this call"):
        measure_memory("sparse_mla_fwd", Case(1, 64, 1, 1), "sm100")
