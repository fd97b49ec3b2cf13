"""How far a case is on the emulator: a share from smaller cases, clusters, instructions."""

from __future__ import annotations

import pytest

from flashdsa.verify.check import MOST, CaseProgress, run_checks

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import torch

import flashdsa


def launch_keys(rows: int) -> None:
    """Quantise keys on the emulator: a launch whose instructions follow the rows."""
    flashdsa.quantize_index_k(torch.zeros(rows, 128).bfloat16(), backend="emulate-sm90")


def test_the_share_is_estimated_from_a_smaller_case_and_grows() -> None:
    told: list[tuple[float, str]] = []
    progress = CaseProgress(lambda share, text: told.append((share, text)))
    with progress.watch("emulate-sm90", "quantize_index_k", 500):
        launch_keys(500)
    assert told and {share for share, _ in told} == {0.0}
    assert all(text.startswith("launch 1: ") for _, text in told)
    told.clear()
    with progress.watch("emulate-sm90", "quantize_index_k", 4000):
        launch_keys(2000)
        half = told[-1][0]
        launch_keys(2000)
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[0] < 0.2
    assert half == pytest.approx(0.5, abs=0.05)
    assert shares[-1] == pytest.approx(MOST, abs=0.05)
    assert told[-1][1].startswith("launch 2: ")


def test_a_backend_that_is_not_emulated_says_nothing() -> None:
    progress = CaseProgress(lambda share, text: pytest.fail(text))
    with progress.watch("cpu", "quantize_index_k", 1):
        flashdsa.quantize_index_k(torch.zeros(10, 128).bfloat16(), backend="cpu")


def test_check_hands_it_on() -> None:
    told: list[tuple[float, str]] = []
    run_checks(
        "emulate-sm90",
        ["quantize_index_k"],
        on_progress=lambda done, total, what: told.append((done / total, what)),
        quick=True,
    )
    shown = [what for _, what in told[1:-1]]
    assert shown and all(
        what.startswith("quantize_index_k: 1000 keys (launch 1: ") for what in shown
    )
    assert [done for done, _ in told] == sorted(done for done, _ in told)
