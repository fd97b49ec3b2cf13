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

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.sparse_mla import bind_way, form_of
from flashdsa.backends.sm90.sparse_mla_ways import Way
from flashdsa.backends.sparse_mla_launches import UNION_BYTES, Launches, Write
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.assembled import assert_it_assembles_without_spills
from tests.kernels.features import EVERY_FEATURE
from tests.support.forward_operands import forward_operands

PAIR = Device(2, {1: 2})
LENGTHS = SparseMlaCase("lengths", 7, 90, 64, 300, topk_length=True, invalid=True, max_logits=True)
"""Lists of two steps, none, three, none, three, one and three."""
GROUPS = SparseMlaCase(
    "groups", 11, 90, 16, 100, topk_length=True, invalid=True, max_logits=True, poison=True
)
EVERYTHING = SparseMlaCase(
    "every feature", 5, 60, 70, 140, attn_sink="infinite", max_logits=True, **EVERY_FEATURE
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
def turns(case: SparseMlaCase, group: int) -> Results:
    """Results of CTAs that take items by turns, judged."""
    inputs = inputs_of(case)
    results = call(emulator_of(PAIR), inputs, by(FwdPlan(group)))
    assert failures(judge_forward(inputs, *results, backend="emulate-sm90")) == []
    return results


def assert_equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, also where nothing is written."""
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("case", "group"), [(GROUPS, 4), (EVERYTHING, 1)], ids=lambda x: getattr(x, "name", str(x))
)
def test_who_takes_an_item_does_not_change_its_bits(case: SparseMlaCase, group: int) -> None:
    results = call(emulator_of(PAIR), inputs_of(case), by(FwdPlan(group, drawn=True)))
    assert_equal(results, turns(case, group))


@pytest.mark.parametrize(("case", "drawn"), [(GROUPS, True), (EVERYTHING, False)])
def test_largest_logits_that_nobody_asked_for_change_no_bit(
    case: SparseMlaCase, drawn: bool
) -> None:
    group = 4 if case is GROUPS else 1
    inputs = inputs_of(replace(case, max_logits=False))
    results = call(emulator_of(PAIR), inputs, by(FwdPlan(group, drawn=drawn)))
    assert results.max_logits is None
    assert_equal(results[:2], turns(case, group)[:2])


def test_launches_with_counters_of_their_own_do_not_disturb_each_other() -> None:
    """Each stream has its workspace, whose counter a launch leaves at 0: of two CTAs, of three."""
    inputs, plan = inputs_of(EVERYTHING), by(FwdPlan(1, drawn=True))
    streams = [emulator_of(PAIR), emulator_of(Device(3, {1: 3}))]
    for emulator in (*streams, streams[0]):
        assert_equal(call(emulator, inputs, plan), turns(EVERYTHING, 1))
    counters = [emulator.workspaces[0][0] for emulator in streams]
    assert counters[0].data_ptr() != counters[1].data_ptr()


def test_groups_without_room_for_all_lists_are_launched_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = turns(GROUPS, 4)
    monkeypatch.setattr("flashdsa.backends.sparse_mla_launches.MOST_UNION_BYTES", 1)
    emulator = emulator_of(PAIR)
    assert_equal(call(emulator, inputs_of(GROUPS), by(FwdPlan(4, drawn=True))), expected)
    # Of each of three groups its union, the forward, and what mends O.
    assert len(emulator.setups) == 3 * 3


@pytest.mark.parametrize(("case", "taken"), [(ALIKE, FIRST), (APART, SECOND)], ids=["yes", "no"])
def test_groups_are_taken_if_their_queries_have_much_in_common(
    case: SparseMlaCase, taken: int
) -> None:
    """And the other form alone does nothing."""
    inputs, emulator = inputs_of(case), emulator_of(PAIR)
    expected = turns(case, 4 if taken == FIRST else 1)
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
    groups, queries = (call(emulator_of(PAIR), inputs, by(FwdPlan(group))) for group in (4, 1))
    for own, first, second in zip(results, groups, queries, strict=True):
        assert torch.equal(own[:8], first[:8]) and torch.equal(own[8:], second[8:])


@pytest.mark.parametrize(
    "plan",
    [
        FwdPlan(1, drawn=True),
        FwdPlan(4, drawn=True),
        pytest.param(FwdPlan(8, drawn=True), marks=pytest.mark.slow),
    ],
    ids=["1", "4", "8"],
)
def test_the_newest_assembler_takes_it_and_nothing_is_spilled(plan: FwdPlan) -> None:
    assert_it_assembles_without_spills(SPARSE_MLA_FWD, plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("when", ["eager", "late", "slow"])
def test_the_order_of_warps_does_not_matter(when: str) -> None:
    for seed in range(3):
        policy = Policy(asynchronous=when, warps="random", seed=seed)
        emulator = emulator_of(PAIR, policy)
        assert_equal(
            call(emulator, inputs_of(LENGTHS), by(FwdPlan(1, drawn=True))), turns(LENGTHS, 1)
        )
