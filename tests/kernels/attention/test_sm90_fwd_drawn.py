"""Items of the Hopper forward that CTAs draw: on ptxemu, more of them than CTAs, of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Int32, Uint16, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.sparse_mla import bind_way, form_of
from flashdsa.backends.sm90.sparse_mla_ways import Way
from flashdsa.backends.sparse_mla_launches import UNION_BYTES, Launches, Write
from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.sm90.fwd.context import locate
from flashdsa.kernels.attention.sm90.fwd.draws import class_of, order_of, sort_lists
from flashdsa.kernels.attention.sm90.fwd.gather import (
    Gatherer,
    count_of_lists,
    item_at,
    put_in_order,
)
from flashdsa.kernels.attention.sm90.fwd.plan import MOST_SORTED, THREAD_LISTS, FwdPlan
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.cutedsl import emulate
from tests.kernels.findings import EVERY_FEATURE
from tests.support.attention_launches import forward_operands

PAIR = Device(2, {1: 2})


GROUPS = SparseMlaCase(
    "groups", 11, 90, 16, 100, topk_length=True, invalid=True, max_logits=True, poison=True
)
EVERYTHING = SparseMlaCase(
    "every feature", 3, 60, 70, 140, attn_sink="infinite", max_logits=True, **EVERY_FEATURE
)
"""Two items a query."""
APART = SparseMlaCase("named by one query", 11, 900, 16, 70, max_logits=True)
ALIKE = SparseMlaCase("named by all queries", 11, 900, 16, 70, max_logits=True)
Bind = Callable[[Runner, SparseMlaOperands, float], Write]


class Results(NamedTuple):
    """Results of a call."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None


class Noting(Emulator):
    """Notes the small tensors that are allocated: counts and choices."""

    noted: list[Tensor]

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Of numbers; results are of other kinds."""
        made = super().allocator(*shape, dtype=dtype)
        return partial(self._note, made) if dtype is torch.int32 else made

    def _note(self, made: Callable[[], Tensor]) -> Tensor:
        self.noted = [*getattr(self, "noted", []), made()]
        return self.noted[-1]

    def allocated(self, *shape: int) -> list[Tensor]:
        """Those of this shape."""
        return [one for one in self.noted if one.shape == shape]


def inputs_of(case: SparseMlaCase) -> SparseMlaInputs:
    """On the CPU."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    if case is ALIKE:
        inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
    return inputs


def call(emulator: Emulator, inputs: SparseMlaInputs, bind: Bind) -> Results:
    """One call; nothing may be found, and every counter is 0 again."""
    case = inputs.case
    operands = forward_operands(emulator, inputs)
    with emulator.launching():
        bind(emulator, operands.inputs, case.d_qk**-0.5)(operands)
    assert [str(finding) for finding in emulator.findings] == []
    assert all(not kept[0].any() for kept in emulator.workspaces.values())
    return Results(*operands[3:6])


def by(plan: FwdPlan) -> Bind:
    """One plan's launches."""
    return lambda runner, operands, scale: bind_way(runner, Way(plan), operands, scale)


def by_either(runner: Runner, operands: SparseMlaOperands, scale: float) -> Write:
    """The launches of groups of four and of single queries, of which a sample chooses."""
    way = Way(FwdPlan(4, drawn=True), instead=FwdPlan(1, drawn=True))
    return bind_way(runner, way, operands, scale)


def told(plan: FwdPlan, taken: int) -> Bind:
    """A plan's launches, which are told a choice; groups sample for themselves."""

    def bind(runner: Runner, operands: SparseMlaOperands, scale: float) -> Write:
        form, choice = form_of(runner, plan, operands), torch.tensor([taken], dtype=torch.int32)
        told = form._replace(function=lambda *given: form.function(*given[:-1], choice))
        return Launches(runner, operands, scale, told)

    return bind


def emulator_of(device: Device, policy: Policy | None = None) -> Noting:
    """It collects what it finds."""
    return Noting(device, policy=policy, on_finding="collect")


@cache
def judged(case: SparseMlaCase, group: int) -> Results:
    """Results of CTAs that draw groups, or take single queries by turns; they are judged."""
    inputs = inputs_of(case)
    results = call(emulator_of(PAIR), inputs, by(FwdPlan(group, drawn=group > 1)))
    assert failures(judge_forward(inputs, *results, backend="emulate-sm90")) == []
    return results


def assert_equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, also where nothing is written."""
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("case", "group"),
    [pytest.param(GROUPS, 4, marks=pytest.mark.slow), (EVERYTHING, 1)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_who_takes_an_item_does_not_change_its_bits(case: SparseMlaCase, group: int) -> None:
    """The other way gives the same."""
    results = call(emulator_of(PAIR), inputs_of(case), by(FwdPlan(group, drawn=group == 1)))
    assert_equal(results, judged(case, group))


@pytest.mark.parametrize(("case", "drawn"), [(GROUPS, True), (EVERYTHING, False)])
def test_largest_logits_that_nobody_asked_for_change_no_bit(
    case: SparseMlaCase, drawn: bool
) -> None:
    group = 4 if case is GROUPS else 1
    inputs = inputs_of(replace(case, max_logits=False))
    results = call(emulator_of(PAIR), inputs, by(FwdPlan(group, drawn=drawn)))
    assert results.max_logits is None
    assert_equal(results[:2], judged(case, group)[:2])


def test_launches_with_counters_of_their_own_do_not_disturb_each_other() -> None:
    """Each stream has its workspace, whose counter a launch leaves at 0: of two CTAs, of three."""
    inputs, plan = inputs_of(EVERYTHING), by(FwdPlan(1, drawn=True))
    streams = [emulator_of(PAIR), emulator_of(Device(3, {1: 3}))]
    for emulator in (*streams, streams[0]):
        assert_equal(call(emulator, inputs, plan), judged(EVERYTHING, 1))
    counters = [emulator.workspaces[0][0] for emulator in streams]
    assert counters[0].data_ptr() != counters[1].data_ptr()


def test_groups_without_room_for_all_lists_are_launched_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = judged(GROUPS, 4)
    monkeypatch.setattr("flashdsa.backends.sparse_mla_launches.MOST_UNION_BYTES", 1)
    emulator = emulator_of(PAIR)
    assert_equal(call(emulator, inputs_of(GROUPS), by(FwdPlan(4, drawn=True))), expected)
    # Of each of three groups its union, the forward, and what mends O.
    assert len(emulator.setups) == 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("case", "taken"), [(ALIKE, FIRST), (APART, SECOND)], ids=["yes", "no"])
def test_groups_are_taken_if_their_queries_have_much_in_common(
    case: SparseMlaCase, taken: int
) -> None:
    """And the other form alone does nothing."""
    inputs, emulator = inputs_of(case), emulator_of(PAIR)
    expected = judged(case, 4 if taken == FIRST else 1)
    assert_equal(call(emulator, inputs, by_either), expected)
    assert [choice.tolist() for choice in emulator.allocated(1)] == [[taken]]
    nothing = Results(*(emulator.empty(*x.shape, dtype=x.dtype) for x in expected))
    other = FwdPlan(1 if taken == FIRST else 4, drawn=True)
    assert_equal(call(emulator, inputs, told(other, taken)), nothing)


def test_parts_of_a_call_choose_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups each, the first ones alike."""
    inputs = inputs_of(APART)
    inputs.indices[:8] = inputs.indices[:1]
    lists = 8 * APART.topk * UNION_BYTES
    monkeypatch.setattr("flashdsa.backends.sparse_mla_launches.MOST_UNION_BYTES", lists)
    results = call(emulator_of(PAIR), inputs, by_either)
    assert failures(judge_forward(inputs, *results, backend="emulate-sm90")) == []
    plans = FwdPlan(4, drawn=True), FwdPlan(1)
    groups, queries = (call(emulator_of(PAIR), inputs, by(plan)) for plan in plans)
    for own, first, second in zip(results, groups, queries, strict=True):
        assert torch.equal(own[:8], first[:8]) and torch.equal(own[8:], second[8:])


STEP_KEYS = 128
"""Slots of a step."""
PLAN = FwdPlan(drawn=True)


@cute.kernel
def order_kernel(slots: cute.Tensor, classes: cute.Tensor, order: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    pointer = SmemAllocator().allocate_array(Uint16, MOST_SORTED)
    words = cute.make_tensor(pointer, cute.make_layout(MOST_SORTED))
    own = []
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        own.append(class_of(Int32(slots[turn * WARPGROUP_SIZE + thread]), STEP_KEYS))
        classes[turn * WARPGROUP_SIZE + thread] = own[turn]
    sort_lists(words, own, thread)
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        order[turn * WARPGROUP_SIZE + thread] = Int32(words[turn * WARPGROUP_SIZE + thread])


@cute.jit
def launch(slots: cute.Tensor, classes: cute.Tensor, order: cute.Tensor):
    """Write the class of each list, and the order of all."""
    order_kernel(slots, classes, order).launch(grid=(1, 1, 1), block=(WARPGROUP_SIZE, 1, 1))


def found(slots: Tensor) -> tuple[list[int], list[int]]:
    """Classes and order of lists of so many slots."""
    classes, order = (torch.full_like(slots, -1) for _ in range(2))
    with emulate():
        launch(*(from_dlpack(x) for x in (slots, classes, order)))
    return classes.tolist(), order.tolist()


def test_longest_first_and_as_they_come() -> None:
    """Lists of 0 to 17 steps are told apart by their steps; many have as many."""
    generator = torch.Generator().manual_seed(0)
    for most in (0, 1, 300, 2_048):
        slots = torch.randint(most + 1, (MOST_SORTED,), generator=generator, dtype=torch.int32)
        slots[-30:] = 0
        steps = ((slots + STEP_KEYS - 1) // STEP_KEYS).tolist()
        expected = sorted(range(MOST_SORTED), key=lambda one: -steps[one])
        assert found(slots) == (steps, expected), most


def test_long_lists_share_classes_of_a_quarter_of_an_octave() -> None:
    slots = torch.arange(MOST_SORTED, dtype=torch.int32) * STEP_KEYS
    slots[-1] = 2**31 - STEP_KEYS
    classes, order = found(slots)
    assert classes == sorted(classes) and max(classes) == 31
    assert order == sorted(range(MOST_SORTED), key=lambda one: -classes[one])
    first = [classes.index(one) for one in range(32)]
    assert first == [*range(16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16),
                     *range(128, 256, 32)]  # fmt: skip


@cute.kernel
def places_kernel(
    lse: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor, items: cute.Tensor
):
    place, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctx = locate(lse, Memory.allocate(PLAN))
    role = Gatherer(ctx, None, indices, indices, topk_length, None, None, None, None)
    order = order_of(ctx)
    put_in_order(ctx, order, count_of_lists(role, order))
    if place < ctx.num_items:
        drawn = item_at(role, order, place)
        items[cta, place, 0], items[cta, place, 1] = drawn.item, drawn.slots


@cute.jit
def launch_places(
    lse: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor, items: cute.Tensor
):
    """Write each CTA's item at each place, and its slots."""
    places_kernel(lse, indices, topk_length, items).launch(
        grid=(items.shape[0], 1, 1), block=(WARPGROUP_SIZE, 1, 1)
    )


@pytest.mark.parametrize(("heads", "ctas"), [(8, 2), (70, 2), (70, 3)])
@pytest.mark.parametrize("lengths", [True, False])
def test_the_last_queries_come_longest_first(heads: int, ctas: int, lengths: bool) -> None:
    """CTAs sort the last three lists a CTA, but those of the first items; queries of as many steps
    keep their order, and every CTA has the same."""
    queries, topk, blocks = 10, 300, -(-heads // 64)
    given = torch.tensor([9, -1, 200, 0, 300, 128, 129, 900, 1, 257]).int()
    given = given if lengths else given[:0]
    lse, indices = torch.zeros(queries, heads), torch.zeros(queries, topk, dtype=torch.int32)
    items = torch.full((ctas, queries * blocks, 2), -1, dtype=torch.int32)
    with emulate():
        launch_places(*(from_dlpack(x) for x in (lse, indices, given, items)))
    slots = given.clamp(0, topk).tolist() if lengths else [topk] * queries
    own = -(-ctas // blocks)
    first = queries - min(3 * ctas // blocks, queries - own)
    last = sorted(
        range(first, queries), key=lambda query: -((slots[query] + STEP_KEYS - 1) // STEP_KEYS)
    )
    order = [*range(first), *last]
    expected = [[q * blocks + block, slots[q]] for q in order for block in range(blocks)]
    assert items.tolist() == [expected] * ctas
