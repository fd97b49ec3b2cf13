"""The timing protocol: turns, sample lengths, statistics."""

from __future__ import annotations

import time

import pytest

from flashdsa.bench import protocol
from flashdsa.bench.protocol import Times, time_in_turns


def test_statistics_interpolate() -> None:
    times = Times.of([3.0, 1.0, 2.0, 5.0, 4.0])
    assert times.median == 3.0
    assert times.p10 == pytest.approx(1.4)
    assert times.p90 == pytest.approx(4.6)
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0)


def test_both_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)
    calls: list[str] = []
    ticks: list[int] = []
    time_in_turns(
        lambda: calls.append("a"), lambda: calls.append("b"), 3, lambda: ticks.append(len(calls))
    )
    assert "".join(calls) == "aabb" + "ababab"
    assert len(ticks) == 3


def test_short_calls_are_repeated_and_divided() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        time.sleep(0.002)

    times, _ = time_in_turns(call, lambda: time.sleep(0.05), 2)
    assert count > 10
    assert 0.002 <= times.median < 0.02
