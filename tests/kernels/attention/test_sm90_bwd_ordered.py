"""The deterministic Hopper backward on ptxemu: the same bits in any order of CTAs and warps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd_memory
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import MOST_PART_GROUPS, PerItemPlan
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_backward, forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import unexpected

ONE_SM = Device(1, {1: 1})
DEVICES_AND_ORDERS = [
    (SMALL, Policy()),
    (SMALL, Policy(asynchronous="random", seed=3)),
    (ONE_SM, Policy(asynchronous="late", seed=5)),
]


def gradients_of(case: SparseMlaCase, *, deterministic: bool = True) -> list[tuple[Tensor, ...]]:
    """On each device in its order; all are within the contract, and ptxemu finds nothing: of the
    deterministic form no additions that come in any order either."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    every = []
    for device, policy in DEVICES_AND_ORDERS:
        with emulation(device, policy=policy) as emulator:
            gradients = flashdsa.mla_bwd(
                *operands,
                topk_length=inputs.topk_length,
                deterministic=deterministic,
                backend="emulate-sm90",
            )
        named = dict(zip(("dQ", "dKV"), gradients, strict=True))
        assert failures(judge_backward(inputs, O, lse, named, bf16_operands=True)) == []
        assert unexpected(emulator.findings, in_order=deterministic) == []
        every.append(gradients)
    return every


def are_equal(every: list[tuple[Tensor, ...]]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(a, b) for one in every[1:] for a, b in zip(one, every[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries"), [(16, 37), (128, 4)])
def test_bits_of_slots_do_not_depend_on_what_runs_first(
    heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 64 rows, and queries of two row blocks, in parts of four row blocks or fewer."""
    monkeypatch.setattr(mla_bwd_memory, "MOST_SLOT_BYTES", 4 * 128 * 864)
    monkeypatch.setattr(mla_bwd_memory, "WAVE", 4)
    mla_bwd_memory.sizes_of.cache_clear()
    case = SparseMlaCase("slots", queries, 90, heads, 24, topk_length=True, invalid=True)
    assert are_equal(gradients_of(case))
    mla_bwd_memory.sizes_of.cache_clear()


@pytest.mark.slow
def test_sums_of_further_heads_are_added() -> None:
    """More heads than a kernel takes: only the first launch finds dKV zero."""
    assert are_equal(gradients_of(SparseMlaCase("further heads", 3, 60, 136, 24))[:2])


@pytest.mark.slow
def test_without_it_they_do() -> None:
    """Or the test above would show nothing."""
    case = SparseMlaCase("ordered", 37, 90, 16, 24, topk_length=True, invalid=True)
    assert not are_equal(gradients_of(case, deterministic=False))


@pytest.mark.slow
@pytest.mark.timeout(900)  # 75 s alone, four times that beside other work
@pytest.mark.parametrize(("heads", "queries"), [(8, 40), (64, 9), (128, 6)])
def test_lists_with_rows_out_of_order(heads: int, queries: int) -> None:
    """With 8 heads they are so many that all slots of a group are its list."""
    case = SparseMlaCase("repeats", queries, 60, heads, 90, duplicates=True, empty_rows=True)
    assert are_equal(gradients_of(case))


@pytest.mark.parametrize(
    ("groups", "capacity", "blocks"),
    [
        (1, 64, 1),
        (397, 1024, 1),
        (4096, 2048, 1),
        (9000, 64, 1),
        (4096, 2048, 2),
        (1024, 8192, 1),
        (512, 16384, 1),
        (5, 1 << 22, 1),
    ],
)
def test_parts_of_the_groups_have_room(groups: int, capacity: int, blocks: int) -> None:
    """In as many parts as are launched, whatever the lengths of the lists; as the device splits."""
    room, unit_groups, parts = mla_bwd_memory.sizes_of(
        groups, capacity, blocks, PerItemPlan(slots=True).slot_words
    )
    assert room * blocks * 864 <= max(1 << 31, capacity * blocks * 864)
    least = -(-room // MOST_PART_GROUPS)
    units = [min(unit_groups, groups - first) for first in range(0, groups, unit_groups)]
    some, full = capacity // 3, capacity
    for lengths in ((0,), (some,), (full,), (0, full), (full, 0, 0), (full, full, some)):
        used, taken, most = 0, 1, 0
        in_part = 0
        for number, unit in enumerate(units):
            size = unit * max(lengths[number % len(lengths)], least)
            assert size <= room
            if used and used + size > room:
                taken, used, in_part = taken + 1, 0, 0
            used, in_part = used + size, in_part + unit
            most = max(most, in_part)
        assert taken <= parts
        assert most <= MOST_PART_GROUPS
    assert parts == 1 or groups * capacity > room or groups > MOST_PART_GROUPS


@pytest.mark.slow
def test_keys_of_few_and_of_many_rows_in_order() -> None:
    """Key k is named by k % 6 of five groups of two queries: by none, by few or by more."""
    inputs = make_sparse_mla_inputs(SparseMlaCase("few and many", 10, 12, 32, 12), 0, "cpu")
    query, key = torch.arange(10, dtype=torch.int32)[:, None], torch.arange(12, dtype=torch.int32)
    named = torch.where(query // 2 < key % 6, key, -1)
    inputs.indices.copy_(named.view_as(inputs.indices))
    with emulation(SMALL) as emulator:
        assert failures(check_backward(inputs, "emulate-sm90", deterministic=True)) == []
    assert unexpected(emulator.findings, in_order=True) == []
