"""The table of small calls: every kernel has one, and each reaches the kernel that it is of."""

from __future__ import annotations

from collections import Counter

import pytest

from flashdsa.backends.recorder import Recorder
from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import KernelSpec
from tests.verify.test_reach import zeros_for_draws  # noqa: F401 - what it does suffices here, too
from workbench.small_calls.call import HOPPER, Small, device_of
from workbench.small_calls.table import TABLE, rows_of

UNCALLED = {("indexer_logits", "sm100"), ("indexer_order", "sm100")}
"""Not called on Blackwell: the first half of the fused kernel; Hopper's code."""


class AnyPlan(Recorder):
    """A recorder of kernels whose plans may be none of the catalog's."""

    def __init__(self, call: Small) -> None:
        super().__init__(device_of(call))
        self.kernels: list[KernelSpec] = []

    def function(self, spec, plan):
        self.kernels.append(spec)
        return lambda *_: None


@pytest.mark.parametrize("name", TABLE)
def test_calls_reach_their_kernel(name: str) -> None:
    row = TABLE[name]
    for call in row.calls:
        if getattr(call, "settings", None):
            pytest.importorskip("cutlass", reason="what is set is in a kernel's sources")
        runner = AnyPlan(call)
        call.launch(runner)
        assert row.spec in runner.kernels, call.name


def test_names_of_calls_are_different() -> None:
    for name, row in TABLE.items():
        assert max(Counter(call.name for call in row.calls).values()) == 1, name


def test_every_kernel_has_a_call_and_on_hopper_one_for_gpus() -> None:
    every = {(spec.name, spec.backend) for spec in KERNELS} - UNCALLED
    assert {(row.kernel, row.spec.backend) for row in TABLE.values()} == every
    on_gpus = {row.kernel for row in TABLE.values() if any(not c.emulated_only for c in row.calls)}
    assert on_gpus >= {spec.name for spec in KERNELS if spec.backend == HOPPER}


def test_rows_are_chosen_by_their_name_or_their_kernel_s() -> None:
    assert list(rows_of(["mla-fwd-sm_90a"])) == ["mla-fwd-sm_90a"]
    assert len(rows_of(["mla_fwd"])) == 5
    assert rows_of([]) == TABLE
    with pytest.raises(ArgumentValueError, match="nothing: no such kernel; there are mla-bwd"):
        rows_of(["nothing"])
