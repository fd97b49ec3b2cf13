"""The deterministic Hopper backward on ptxemu: the same bits in any order of CTAs and warps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd_grouped, mla_bwd_slots
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import MOST_PART_GROUPS, PerItemPlan
from flashdsa.kernels.attention.sm90.core.tile import Tile
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


@pytest.fixture(autouse=True)
def groups_of_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large groups in order are considered in small calls, too."""
    monkeypatch.setattr(mla_bwd_grouped, "ORDERED_ROUNDS", 1)


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
@pytest.mark.parametrize("buffers", [1, 2])
def test_bits_do_not_depend_on_what_runs_first(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of two queries with the same keys, in one chain and in two."""
    monkeypatch.setattr(mla_bwd_grouped, "MOST_BUFFERS", buffers)
    monkeypatch.setattr(mla_bwd_grouped, "RATIO", {128: 8.0})
    monkeypatch.setattr(mla_bwd_grouped, "MOST_LENGTH", 4.0)
    case = SparseMlaCase("ordered", 4, 90, 128, 24, topk_length=True, invalid=True)
    assert are_equal(gradients_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries"), [(16, 37), (128, 4)])
def test_bits_of_slots_do_not_depend_on_what_runs_first(
    heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 64 rows, and queries of two row blocks, in parts of four row blocks or fewer."""
    monkeypatch.setattr(mla_bwd_slots, "MOST_SLOT_BYTES", 4 * 128 * 864)
    monkeypatch.setattr(mla_bwd_slots, "WAVE", 4)
    mla_bwd_slots.sizes_of.cache_clear()
    case = SparseMlaCase("slots", queries, 90, heads, 24, topk_length=True, invalid=True)
    assert are_equal(gradients_of(case))
    mla_bwd_slots.sizes_of.cache_clear()


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
@pytest.mark.parametrize(("heads", "queries", "ratio"), [(8, 40, 1.0), (64, 9, 1.0), (128, 6, 8.0)])
def test_lists_with_rows_out_of_order(
    heads: int, queries: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 heads they are so many that all slots of a group are its list. A ratio of 8 takes the
    kernels with a workspace."""
    monkeypatch.setattr(mla_bwd_grouped, "MOST_BUFFERS", 2)
    monkeypatch.setattr(mla_bwd_grouped, "RATIO", {128: ratio, 64: ratio})
    monkeypatch.setattr(mla_bwd_grouped, "ORDERED_RATIO", ratio)
    monkeypatch.setattr(mla_bwd_grouped, "MOST_LENGTH", 4.0)
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
    room, unit_groups, parts = mla_bwd_slots.sizes_of(
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
@pytest.mark.parametrize("part_bytes", [1, 1 << 30])
def test_chains_go_on_in_the_next_part_of_the_groups(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five groups of two queries with the same keys, one a launch or all, in three dKVs."""
    monkeypatch.setattr(mla_bwd_grouped, "MOST_WORKSPACE_BYTES", part_bytes)
    inputs = make_sparse_mla_inputs(SparseMlaCase("alike", 10, 90, 128, 70), 0, "cpu")
    inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
    with emulation(SMALL) as emulator:
        assert failures(check_backward(inputs, "emulate-sm90", deterministic=True)) == []
    assert unexpected(emulator.findings, in_order=True) == []


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


@pytest.mark.parametrize(
    ("num_keys", "topk", "buffers"),
    [
        (0, 2048, 3),
        (8192, 2048, 3),
        (32_768, 1024, 4),
        (32_768, 512, 7),
        (32_768, 256, 12),
        (155_344, 2048, 3),
        (155_345, 256, 2),
        (1 << 20, 256, 1),
    ],
)
def test_chains_are_as_many_as_short_lists_need_and_memory_has_room_for(
    num_keys: int, topk: int, buffers: int
) -> None:
    """Of 4,096 queries of 128 heads."""
    assert mla_bwd_grouped.buffers_for(num_keys, 576, 2048, topk) == buffers


@pytest.mark.parametrize(
    ("num_keys", "topk", "pay"),
    [
        (8192, 64, True),
        (32_768, 256, True),
        (262_144, 2048, True),
        (32_768, 64, False),
        (262_144, 1024, False),
        (1 << 20, 256, False),
    ],
)
def test_slots_replace_chains_that_would_wait(num_keys: int, topk: int, pay: bool) -> None:
    """4,096 queries of 128 heads: one dKV of many rows is one chain, whose groups wait for each
    other if lists are short."""
    assert mla_bwd_grouped.chains_pay(num_keys, 576, 2048, topk) is pay
    for deterministic in (False, True):
        found = mla_bwd_grouped.grouping_for(
            4096, 128, topk, 132, num_keys=num_keys, deterministic=deterministic, tile=Tile()
        )
        assert (found is not None) is (pay or not deterministic)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "ratio"),
    [
        (1200, 600_000, 4.0),
        (1200, 599_999, mla_bwd_grouped.RATIO[64]),
        (1053, 526_499, mla_bwd_grouped.RATIO[64]),
        (1052, 526_000, 4.0),
        (1052, 525_999, None),
        (172, 600_000, None),
    ],
)
def test_groups_need_nothing_in_common_where_few_rows_are_named(
    num_queries: int, num_keys: int, ratio: float | None
) -> None:
    """Six items of dKV a multiprocessor, else one: 264 groups of four queries, else 44."""
    found = mla_bwd_grouped.grouping_for(
        num_queries, 64, 500, 132, num_keys=num_keys, deterministic=False, tile=Tile()
    )
    assert (found and found.ratio) == ratio
