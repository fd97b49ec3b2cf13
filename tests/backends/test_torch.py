"""The torch backend: right as the CPU's, without reading a value; chosen where nothing else is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.cpu import topk
from flashdsa.backends.cpu.gather import GatheredRows
from flashdsa.backends.cpu.sparse_mla import add_rows
from flashdsa.backends.cpu.tiling import DEVICE
from flashdsa.problem import Problem
from flashdsa.verify.check import OPERATIONS, CheckRow, device_of, run_checks
from flashdsa.verify.check_list import COMPOSED, checks_of
from flashdsa.verify.compare import failures
from tests.ops.test_no_waits import HostReads
from workbench.public_calls import public_calls

OWN = ("dsa_topk_indexer", "topk_indices", "dsa_topk_prefill", "prefill_logits",
       "write_index_k_cache")  # fmt: skip
"""Operations that work on rows together on a device, and one that writes by a mask there."""


def wrong(rows: list[CheckRow]) -> list[CheckRow]:
    return [row for row in rows if not row.passed]


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one not in (*OWN, *COMPOSED)])
def test_the_smallest_case_is_right(operation: str) -> None:
    assert wrong(run_checks("torch", [operation], None, quick=True, device="cpu")) == []


@pytest.mark.parametrize("operation", OWN)
def test_cases_are_right_where_rows_are_worked_on_together(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time; all cases but those of many tokens, each of which takes seconds."""
    monkeypatch.setattr(topk, "BYTES_OF_SCORE", 1 << 15)
    of_operation = [x for x in checks_of(0, "torch", "cpu") if x.operation == operation]
    for check in (one for one in of_operation if one.work < 20_000):
        assert failures(check.judge()) == [], check.case


@pytest.mark.parametrize("name", public_calls("cpu"))
def test_no_value_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_reads("torch", name, monkeypatch) == []


def test_a_value_that_is_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sparse_mla_fwd", "mla_bwd", "dsa_topk_indexer"):
        assert host_reads("cpu", name, monkeypatch)


def host_reads(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations that read a value, within the backend's functions that a public call reaches."""
    reads = HostReads()

    def watched(function: Any, operands: Any, **parameters: Any) -> Any:
        def serve(given: Any) -> Any:
            with reads:
                return function(type(operands)(*given), **parameters)

        return serve

    monkeypatch.setenv("FLASHDSA_BACKEND", backend)
    monkeypatch.setattr("flashdsa.dispatch.checks.are_values_read", lambda tensor: False)
    monkeypatch.setattr("flashdsa.backends.registry._bind_nothing", watched)
    registry.on_change()  # forget bound functions
    public_calls("cpu")[name]()
    registry.on_change()
    return reads.found


def test_sums_of_a_row_have_one_order_if_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU index_put_ sorts, and index_add_ has no order. On a CPU see below."""
    called: list[bool] = []
    put = torch.Tensor.index_put_

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        called.append(True)
        return put(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "index_put_", counted)
    total, rows = torch.zeros(6, 8, device="meta"), torch.zeros(4, 5, 8, device="meta")
    gathered = GatheredRows(rows, torch.zeros(4, 5, dtype=torch.int64, device="meta"), None)
    for one in (False, True):
        add_rows(total, gathered, rows, DEVICE, one)
    assert called == [True]


def test_values_are_checked_if_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDSA_BACKEND", "torch")
    scores, lengths = torch.zeros(1, 4), torch.tensor([9], dtype=torch.int32)
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    key, slot = torch.zeros(1, 128).bfloat16(), torch.tensor([64])
    q, keys = torch.zeros(1, 2, 128), torch.zeros(3, 128)
    fp8, table = q.to(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.int32)
    calls: dict[str, Callable[[], Any]] = {
        "lengths": lambda: flashdsa.topk_indices(scores, lengths, 4),
        "slots": lambda: flashdsa.write_index_k_cache(key, slot, cache),
        "ends": lambda: flashdsa.prefill_logits(q, keys, torch.ones(1, 2), None, lengths),
        "max_len": lambda: flashdsa.indexer_logits(fp8, cache, torch.ones(1, 2), lengths, table, 5),
    }
    for call in calls.values():
        call()
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            call()


def attention(device: str, capability: tuple[int, int] | None, dtype: str = "bfloat16") -> Problem:
    return Problem(
        "sparse_mla_fwd", device, dtype, dtype, 576, num_heads=64, d_qk=576, d_v=512, topk=2048,
        capability=capability,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (attention("cpu", None), "cpu"),
        (attention("cuda", (7, 5)), "torch"),
        (attention("cuda", (0, 0)), "torch"),
        (attention("cuda", (8, 0)), "triton"),
        (attention("cuda", (12, 0)), "triton"),
        (attention("cuda", (9, 0)), "sm90"),
        (attention("cuda", (9, 0), "float16"), "triton"),
        (attention("cuda", (9, 0), "float32"), "torch"),
        (attention("xpu", None), "torch"),
    ],
)
def test_auto_takes_it_last(
    problem: Problem, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry._announced.clear()
    with caplog.at_level(logging.WARNING, "flashdsa.dispatch"):
        for _ in range(2):
            registry._selected.clear()
            assert registry.select(problem).backend == expected
    said = [record.getMessage() for record in caplog.records]
    if expected != "torch":
        assert said == []
        return
    (line,) = said
    assert line.startswith(f"sparse_mla_fwd: auto chose backend 'torch' for {problem.device} ")
    assert "sm90 passed over" in line


def test_tensors_are_on_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, expected in ((None, "cpu"), (torch.device("xpu", 0), "xpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda here=here: here)
        assert device_of("torch") == expected
        assert (device_of("sm90"), device_of("emulate-sm90")) == ("cuda", "cpu")


@pytest.mark.parametrize("operation", ["mla_bwd", "indexer_bwd"])
def test_deterministic_gradients_do_not_depend_on_threads(operation: str) -> None:
    """Many queries add to few rows; index_put_ would add them in the order of its threads."""
    torch.manual_seed(0)
    ids = torch.randint(50, (8, 300), dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        runs = []
        for _ in range(20):
            torch.manual_seed(1)
            if operation == "mla_bwd":
                q, kv = torch.randn(8, 4, 512), torch.randn(50, 512)
                O, lse = flashdsa.sparse_mla_fwd(q, kv, ids, backend="torch")
                given: tuple[Any, ...] = q, kv, torch.randn_like(O), lse, O, ids
                found = flashdsa.mla_bwd(*given, deterministic=True, backend="torch")[1]
            else:
                q, k = torch.randn(8, 16, 128).bfloat16(), torch.randn(50, 128).bfloat16()
                given = q, k, torch.randn(8, 16), ids, torch.randn(8, 300)
                found = flashdsa.indexer_bwd(*given, deterministic=True, backend="torch")[1]
            runs.append(found)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(run, runs[0]) for run in runs)
