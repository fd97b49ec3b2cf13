"""`bench sparse_mla_fwd` on a GPU, run on the CPU with a pretended clock: rows, judge, peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.bench.gpu.beside_flash_mla import FLASH_MLA, OURS
from flashdsa.bench.gpu.bursts import BurstTimes
from flashdsa.bench.gpu.forward import read_forward_result, run_forward_bench
from flashdsa.bench.gpu.forward_cases import (
    FORWARD_CASES,
    RANDOM,
    ForwardCase,
    make_forward_inputs,
)
from flashdsa.cli.bench_forward import print_forward_result

SMALL = ForwardCase("small", 4, RANDOM, queries=5, topk=16, lengths=True, invalid=True, sink=True)


class Clock:
    """Calls everything once; ours takes 2 and 4 ms, FlashMLA 3 and 5."""

    def in_turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, BurstTimes]:
        """Fixed times."""
        for call in calls.values():
            call()
        known = {OURS: BurstTimes(2.0, 4.0), FLASH_MLA: BurstTimes(3.0, 5.0)}
        return {name: known[name] for name in calls}


def flash_mla(q: Tensor, kv: Tensor, indices: Tensor, scale: float, **options: Any) -> Any:
    """Stands for the peer's function, which takes multiples of 64 heads."""
    assert q.shape[1] == 64 and kv.dim() == indices.dim() == 3
    assert options.pop("use_legacy") and options["attn_sink"].shape == (64,)
    return flashdsa.sparse_mla_fwd(q, kv, indices, sm_scale=scale, **options)


def run(case: ForwardCase, peer: Any, backend: str = "cpu") -> Any:
    return run_forward_bench([case], Clock(), peer, device="cpu", backend=backend)


def test_a_row_has_both_times_and_counts_valid_slots_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(SMALL, flash_mla)
    (row,) = result.rows
    assert (row.burst_ratio, row.hot_ratio, row.findings) == (1.5, 1.25, [])
    inputs = make_forward_inputs(SMALL, "cpu")
    assert inputs.topk_length is not None
    pairs = zip(inputs.indices.tolist(), inputs.topk_length.tolist(), strict=True)
    valid = sum(id >= 0 for ids, length in pairs for id in ids[:length])
    assert row.hot_tflops == pytest.approx(2 * valid * 4 * 1088 / 4e-3 / 1e12)
    path = tmp_path / "forward.json"
    path.write_text(result.to_json())
    assert read_forward_result(path) == result
    print_forward_result(result)
    assert "1.50x" in capsys.readouterr().out


def test_a_peer_that_is_missing_or_refuses_costs_nothing_else() -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("topk % 128")

    for peer, reason in (("not installed", "not installed"), (refuses, "RuntimeError: topk % 128")):
        (row,) = run(SMALL, peer).rows
        assert (row.peer, row.peer_missing, row.findings) == (None, reason, [])


def test_a_wrong_result_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashdsa.sparse_mla_fwd
    monkeypatch.setattr(
        "flashdsa.bench.gpu.beside_flash_mla.flashdsa.sparse_mla_fwd",
        lambda *x, **options: (1.01 * right(*x, **options)[0],),
    )
    (row,) = run(replace(SMALL, sink=False), "none").rows
    assert row.findings and "O is off by" in row.findings[0]


def test_correlated_lists_share_what_they_should() -> None:
    case = replace(SMALL, ids="correlated", topk=400, invalid=False, lengths=False)
    ids = make_forward_inputs(case, "cpu").indices
    shared = [torch.isin(a, b).float().mean() for a, b in pairwise(ids)]
    assert all(0.94 < one < 1 for one in shared)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in FORWARD_CASES]
    assert len(set(names)) == len(names)
