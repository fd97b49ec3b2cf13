"""Calls on a pretended GPU: what the host launches, how many Python frames it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workbench import host
from workbench.host import calls_on, main
from workbench.pretended_gpu import PretendedGpu, pretended_gpu
from workbench.public_calls import PRETENDED

FUSED = {"mla_bwd_fused": 1}
"""Large groups and what serves where they do not pay."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        pretended.counts = True
        yield pretended


@pytest.fixture(scope="module")
def calls(gpu: PretendedGpu) -> dict[str, Callable[[], object]]:
    return calls_on("cpu", PRETENDED)


def frames(call: Callable[[], object]) -> int:
    """Python functions that a call calls."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "launches", "most_frames"),
    [
        ("sparse_mla_fwd", {"mla_fwd": 1}, 28),
        ("mla_bwd, rows", FUSED, 30),
        ("mla_bwd", {**FUSED, "mla_bwd_sink": 1}, 31),
        ("mla_bwd, deterministic", {**FUSED, "mla_bwd_sink": 1}, 32),
        ("sparse_mla, gradients", {"mla_fwd": 1, **FUSED, "mla_bwd_sink": 1}, 90),
    ],
)
def test_a_call_that_comes_back_launches_little_and_calls_few_functions(
    name: str,
    launches: dict[str, int],
    most_frames: int,
    gpu: PretendedGpu,
    calls: dict[str, Callable[[], object]],
) -> None:
    calls[name]()
    gpu.launches.clear()
    calls[name]()
    assert gpu.launches == launches
    assert frames(calls[name]) - sum(launches.values()) <= most_frames  # the counting itself


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_times_of_two_trees_are_printed(
    measured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To measure takes a process and seconds."""
    times = {"x.add_(1)": (1.0, 2.0), "lse_to_base2": (3.0, 4.0)}
    if not measured:
        monkeypatch.setattr(host, "measure_in_process", lambda *_: times)
    command = ["host", "--pretended", "--only", "lse_to_base2", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [*times]
