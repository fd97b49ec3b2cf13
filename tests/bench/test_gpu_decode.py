"""`bench sparse_mla_decode` on a GPU, run on the CPU with a pretended clock: rows, judge, peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.bench.gpu.beside_flash_mla import FLASH_MLA, OURS
from flashdsa.bench.gpu.decode import (
    DecodeTimes,
    read_decode_result,
    run_decode_bench,
)
from flashdsa.bench.gpu.decode_cases import (
    SHORT,
    DecodeCase,
    DecodeInputs,
    decode_cases,
    make_cache,
    make_decode_inputs,
)
from flashdsa.cli.bench_decode import print_decode_result

PACKED = DecodeCase(4, 3, next_n=2)
ROWS = {True: 128, False: 64}


class Clock:
    """Calls everything once; ours takes 20 and 40 us, FlashMLA 30 and 50."""

    def in_turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, DecodeTimes]:
        """Fixed times."""
        for call in calls.values():
            call()
        known = {OURS: DecodeTimes(20.0, 40.0), FLASH_MLA: DecodeTimes(30.0, 50.0)}
        return {name: known[name] for name in calls}


def run(cases: list[DecodeCase], peer: Any) -> Any:
    return run_decode_bench(
        cases, Clock(), peer, device="cpu", backend="cpu", num_rows=ROWS, topk=300
    )


def test_a_row_has_both_times_and_counts_valid_slots_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[DecodeInputs] = []

    def peer(inputs: DecodeInputs) -> Callable[[], object]:
        asked.append(inputs)
        return lambda: None

    ragged, bf16 = DecodeCase(4, 3, ragged=True), DecodeCase(4, 3, packed=False)
    result = run([bf16, PACKED, ragged], peer)
    rows = {row.name: row for row in result.rows}
    assert list(rows) == ["H=4, 3 x 2", "H=4, 3, ragged", "H=4, 3, bf16"]
    assert [inputs.case for inputs in asked] == [PACKED, ragged]
    row, short, plain = rows.values()
    assert (row.hot_ratio, row.cold_ratio, row.findings) == (1.5, 1.25, [])
    assert row.hot_tflops == pytest.approx(2 * 6 * 300 * 4 * 1088 / 20e-6 / 1e12)
    assert row.hot_gbps == pytest.approx(6 * 300 * 656 / 20e-6 / 1e9)
    assert short.hot_tflops == pytest.approx(row.hot_tflops * (2 * SHORT + 300) / (6 * 300))
    assert (plain.peer, plain.peer_missing) == (None, "takes packed rows only")
    path = tmp_path / "decode.json"
    path.write_text(result.to_json())
    assert read_decode_result(path) == result
    print_decode_result(result)
    assert "1.50x" in capsys.readouterr().out


def test_a_peer_that_is_missing_or_refuses_costs_nothing_else() -> None:
    def refuses(_: DecodeInputs) -> Any:
        raise RuntimeError("another torch")

    for peer, reason in (
        ("not installed", "not installed"),
        (refuses, "RuntimeError: another torch"),
    ):
        (row,) = run([PACKED], peer).rows
        assert (row.peer, row.peer_missing, row.findings) == (None, reason, [])


def test_a_wrong_result_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashdsa.sparse_mla_fwd
    monkeypatch.setattr(
        "flashdsa.bench.gpu.beside_flash_mla.flashdsa.sparse_mla_fwd",
        lambda *x, **options: (1.01 * right(*x, **options)[0],),
    )
    (row,) = run([PACKED], "none").rows
    assert row.findings and "O is off by" in row.findings[0]


def test_the_cache_repeats_a_block_and_ids_go_everywhere() -> None:
    cache = make_cache(True, 2**15, "cpu")
    assert cache.shape == (2**15, 656) and torch.equal(cache[: 2**14], cache[2**14 :])
    ids = make_decode_inputs(PACKED, cache).indices
    assert ids.min() < 2**10 and ids.max() >= 2**15 - 2**10


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in decode_cases()]
    assert len(set(names)) == len(names) == 23
    assert len(decode_cases(quick=True)) == 3
