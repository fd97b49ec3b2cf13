"""`run_checks` reports what it ran, says when it is wrong, and tells its progress."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa.errors import UnsupportedError
from flashdsa.verify.check import MOST, OPERATIONS, CaseProgress, run_checks

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")


FAST = ["topk_indices", "quantize_index_k", "read_index_k_cache"]


def test_a_right_backend_passes_and_progress_counts_up():
    told = []
    rows = run_checks("cpu", FAST, seed=3, on_progress=lambda *event: told.append(event))
    assert {row.operation for row in rows} == set(FAST)
    assert all(row.passed and row.error <= row.limit for row in rows)
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert {total for _, total, _ in told} == {len(told) - 1}
    assert told[0][2].partition(":")[0] in FAST and told[-1][2] == "done"


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_public_function_is_called_and_within_the_contract(quick, monkeypatch, seed):
    """Larger cases are slow here; tests of each operation judge the CPU by them."""
    called = set()

    def counted(name):
        right = getattr(flashdsa, name)

        def call(*args, **options):
            called.add(name)
            return right(*args, **options)

        return call

    computing = set(flashdsa.__all__) - {"explain", "warm_up"}
    for name in computing:
        monkeypatch.setattr(flashdsa, name, counted(name), raising=False)
    rows = run_checks("cpu", seed=seed, quick=quick)
    assert called == computing
    assert {row.operation for row in rows} == set(OPERATIONS)
    assert [row.message for row in rows if not row.passed] == []


def test_a_wrong_backend_is_reported_not_raised(monkeypatch):
    right = flashdsa.topk_indices

    def off_by_one(*args, **options):
        return right(*args, **options) + 1

    monkeypatch.setattr(flashdsa, "topk_indices", off_by_one, raising=False)
    rows = run_checks("cpu", ["topk_indices"])
    assert rows and not any(row.passed for row in rows)
    assert all(row.error > row.limit for row in rows)


def test_a_nan_is_reported_as_a_failure(monkeypatch):
    right = flashdsa.indexer_logits

    def all_nan(*args, **options):
        return torch.full_like(right(*args, **options), torch.nan)

    monkeypatch.setattr(flashdsa, "indexer_logits", all_nan, raising=False)
    rows = run_checks("cpu", ["indexer_logits"], quick=True)
    assert rows and not any(row.passed for row in rows)


def test_the_seed_decides_the_inputs():
    errors = [
        [row.error for row in run_checks("cpu", ["attention_target"], seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert errors[0] == errors[1] != errors[2]


def test_an_unknown_operation_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no sparse_mlaa; expected some of sparse_mla_fwd"):
        run_checks("cpu", ["sparse_mlaa"])


def test_cases_that_a_kernel_backend_does_not_take_are_left_out_with_a_warning(monkeypatch, caplog):
    select = flashdsa.topk_indices

    def only_plain(*args, sorted=False, **options):
        if sorted:
            raise UnsupportedError("topk_indices: sorted: not supported")
        return select(*args, sorted=sorted, backend="cpu")

    monkeypatch.setattr(flashdsa, "topk_indices", only_plain, raising=False)
    rows = run_checks("emulate-sm90", ["topk_indices"])
    assert rows and all(row.passed and "sorted" not in row.case for row in rows)
    assert "not checked: topk_indices, ties and NaN, sorted" in caplog.text
    with pytest.raises(UnsupportedError):
        run_checks("emulate-sm100", ["topk_indices"])


def test_quick_runs_the_smallest_case_of_each_operation():
    wanted = ["topk_indices", "attention_target"]
    every = run_checks("cpu", wanted, seed=1)
    quick = run_checks("cpu", wanted, seed=1, quick=True)
    assert [row.operation for row in quick] == wanted
    assert [row.case for row in quick] == [
        next(row.case for row in every if row.operation == operation) for operation in wanted
    ]


def test_operations_that_a_backend_lacks_are_named_once(caplog, monkeypatch):
    scores = flashdsa.indexer_logits
    monkeypatch.setattr(
        flashdsa,
        "indexer_logits",
        lambda *args, **options: scores(*args, **options | {"backend": "cpu"}),
        raising=False,
    )
    rows = run_checks("emulate-sm100", ["topk_indices", "indexer_logits"], quick=True)
    assert {row.operation for row in rows} == {"indexer_logits"}
    assert [record.getMessage() for record in caplog.records].count(
        "not checked, as emulate-sm100 has no implementation: topk_indices"
    ) == 1


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
    assert shares == sorted(shares) and shares[0] < 0.4
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
