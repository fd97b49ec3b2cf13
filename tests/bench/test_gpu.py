"""The CUDA clock and every operation's quick cases, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flashdsa.bench import timer as timing
from flashdsa.bench.result import CEILING, OURS
from flashdsa.bench.runner import OPERATIONS, BenchOptions, run_bench
from flashdsa.bench.timer import CudaTimer, GpuHangError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("condition", CudaTimer.conditions)
def test_a_kernel_of_four_times_the_cycles_takes_longer(condition: str) -> None:
    calls = {str(n): partial(torch.cuda._sleep, n) for n in (100_000, 400_000)}
    times = CudaTimer().in_turns(calls, condition, 9)
    short, long = (times[name].median for name in calls)
    assert 20 < short < long


def test_a_call_that_cannot_be_captured_is_timed() -> None:
    one = torch.ones(1, device="cuda")
    calls = {"waits": one.item, "fine": one.clone}
    assert CudaTimer().in_turns(calls, "hot", 3).keys() == calls.keys()


def test_the_host_is_timed_without_the_gpu() -> None:
    taken = CudaTimer().host_us(partial(torch.cuda._sleep, 2_000_000))
    assert taken is not None and taken < 200


def test_a_kernel_that_takes_too_long_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "HANG_SECONDS", 0.02)
    torch.cuda._sleep(4_000_000_000)  # two seconds, also where other tests share the GPU
    with pytest.raises(GpuHangError, match="mine: the GPU did not end it"):
        CudaTimer().synchronize("mine")
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_timed_and_right(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    cases = [case.quick() for case in OPERATIONS[name].cases["cuda"]]
    options = BenchOptions([(OPERATIONS[name], cases)], backend="sm90", repeats=2)
    rows = run_bench(options, CudaTimer()).rows
    assert len(rows) == len(cases)
    for row in rows:
        assert not row.missing and not row.findings, row.case
        for times in row.times.values():
            assert {OURS, CEILING} <= times.keys()
