"""Copies do what an H200 did with the same programs (see `record_copies.py`)."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engines.copy_cases import Case, all_cases
from tests.engines.copy_runner import run_case

from ptxemu import machine_code
from ptxemu.engines.cp_async import ThreadCopies
from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

UNDEFINED = {
    "warp_load_expects_2": "more bytes arrive than were expected: the phase flips or not",
    "odd_size_8": "a size of 8 moves nothing on hardware; here it is an error",
    "odd_size_24": "a size of 24 moves 16 bytes on hardware; here it is an error",
    "place_reduce_own_barrier": "the manual wants the mbarrier in the destination's CTA",
    "place_copy_own_barrier": "the manual wants the mbarrier in the destination's CTA",
    "place_load_own_barrier": "the manual wants the mbarrier in the destination's CTA",
}
"""Cases that the manual leaves undefined, where hardware does not stop."""
CASES = [case for case in all_cases() if case.name not in UNDEFINED]
THREADS = {case.name for case in CASES if case.name.startswith("thread_")}


def _recorded() -> dict[str, NDArray[np.uint8]]:
    with np.load(Path(__file__).parent / "h200_copies.npz") as file:
        ends = np.cumsum(file["lengths"])
        parts = np.split(file["data"], ends[:-1])
        return dict(zip(file["names"].tolist(), parts, strict=True))


RECORDED = _recorded()


def _families(cases: list[Case]) -> dict[str, list[Case]]:
    """Sort cases by the first word of their names."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.name.partition("_")[0], []).append(case)
    return families


FAMILIES = _families(CASES)


def _wrong(case: Case) -> str:
    """Say how a result differs from the recording; empty where it does not."""
    before = [array.copy() for array in case.arrays]
    is_error = f"{case.name}/error" in RECORDED
    try:
        run_case(case)
    except DeadlockError as error:
        return f"deadlock: {error}"
    except ExecutionError as error:
        return "" if is_error else str(error)
    if is_error:
        return "hardware stopped, ptxemu did not"
    differing = [
        number
        for number, array in enumerate(case.arrays)
        if not np.array_equal(array, RECORDED.get(f"{case.name}/{number}", before[number]))
    ]
    return f"arrays {differing}" if differing else ""


def _all_wrong(cases: list[Case]) -> dict[str, str]:
    return {case.name: how for case in cases if (how := _wrong(case))}


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_bit_identical(family: str) -> None:
    assert _all_wrong(FAMILIES[family]) == {}


def test_copies_of_threads_in_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    by_numpy: list[int] = []
    read = ThreadCopies._read
    monkeypatch.setattr(machine_code, "NUMPY_COPIES", -1)
    monkeypatch.setattr(ThreadCopies, "_read", lambda self: (by_numpy.append(1), read(self))[1])
    assert _all_wrong([case for case in all_cases() if case.name in THREADS]) == {}
    assert not by_numpy


@pytest.mark.parametrize("asynchronous", ["eager", "late"])
@pytest.mark.parametrize("family", ["step_1_2", "step_3_2", "fill_1", "tensor", "thread_16"])
def test_result_does_not_depend_on_the_schedule(family: str, asynchronous: str) -> None:
    chosen = [c for c in all_cases() if c.name.startswith(family) and "misaligned" not in c.name]
    for case in chosen:
        run_case(case, policy=Policy(asynchronous, "round_robin"))
        for number, array in enumerate(case.arrays):
            recorded = RECORDED.get(f"{case.name}/{number}")
            assert recorded is None or np.array_equal(array, recorded)
    assert chosen


def test_recording_has_every_case() -> None:
    names = {name.rpartition("/")[0] for name in RECORDED}
    assert {
        case.name for case in CASES if case.name.startswith(("step", "fill", "thread"))
    } <= names
    assert names <= {case.name for case in all_cases()}
