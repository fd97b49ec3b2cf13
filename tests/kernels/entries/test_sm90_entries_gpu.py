"""The Hopper kernels of compressed entries on a GPU: padded batches in memory of any contents."""

from __future__ import annotations

import pytest

from flashdsa.verify.compare import failures
from flashdsa.verify.entries_cases import ENTRIES_CASES, EntriesCase, make_entries_inputs
from flashdsa.verify.judge_entries import check_backward, check_forward
from tests.support.hopper_gpu import HOPPER_GPU, poison_freed_memory

pytestmark = HOPPER_GPU
PADDED = [case for case in ENTRIES_CASES if case.padding]
MANY = [
    EntriesCase("CSA, more padding than CTAs", (9, 30), 4, overlap=True, padding=9000),
    EntriesCase("HCA, more padding than CTAs", (300,), 128, padding=20_000),
]


@pytest.mark.parametrize("case", [*PADDED, *MANY], ids=lambda case: case.name)
def test_entries_and_gradients_of_padding_are_written(case: EntriesCase, seed: int) -> None:
    x = make_entries_inputs(case, seed, "cuda")
    for check in (check_forward, check_backward):
        poison_freed_memory()
        assert failures(check(x, "sm90")) == []
