"""The launches that Hopper's backward chooses, and calls bound to their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.backends.sm90 import mla_bwd, mla_bwd_choice
from flashdsa.backends.sm90.mla_bwd_choice import Call, capacity_of, choose
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.catalog import variants_of
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from tests.backends.test_bound_calls import Pretended

IN_ORDER = {"deterministic": True}
LENGTHS = {"has_lengths": True}
JOINED = {"joined": True, **LENGTHS}
RANGES = {"ranges": True, **JOINED}
OF_2 = "groups of 2 (1.16, 3072 keys), else"
OF_4 = "groups of 4 (1.16, 3072 keys), else"
OF_SHORT = "groups of 4 (1.16, 768 keys), else"
OF_LONG = "groups of 2 (1.16, 6144 keys), else"
TABLE: list[tuple[int, int, int, int, dict[str, Any], list[str]]] = [
    # Neighbouring queries of 64 and 128 heads may share their lists.
    (4096, 128, 32_768, 2048, {}, [f"queries 0:4096, heads 0:128: {OF_2} additions by tickets"]),
    (4096, 64, 28_672, 2048, {}, [f"queries 0:4096, heads 0:64: {OF_4} additions"]),
    # Far rows: slots may pay, if lists are long enough.
    (4096, 64, 32_768, 2048, LENGTHS, [
        f"queries 0:4096, heads 0:64: {OF_4} additions or slots by tickets",
    ]),
    (2157, 64, 324_797, 512, {}, [
        f"queries 0:2157, heads 0:64: {OF_SHORT} additions or slots by tickets",
    ]),
    (1023, 128, 42_243, 2048, LENGTHS, [
        f"queries 0:1023, heads 0:128: {OF_2} additions by tickets",
    ]),
    (132, 64, 500_000, 2048, {}, ["queries 0:132, heads 0:64: additions"]),
    # A slot a row and fewer, one item of dKV a multiprocessor: any groups; else six items.
    (1052, 64, 526_000, 500, {}, [
        "queries 0:1052, heads 0:64: groups of 4 (4.0, 768 keys), else additions by tickets",
    ]),
    (1052, 64, 525_999, 500, {}, ["queries 0:1052, heads 0:64: additions by tickets"]),
    (1053, 64, 526_499, 500, {}, [
        f"queries 0:1053, heads 0:64: {OF_SHORT} additions by tickets",
    ]),
    (172, 64, 600_000, 500, {}, ["queries 0:172, heads 0:64: additions by tickets"]),
    # Few heads have no large groups; CTAs draw items of unlike lengths or over far rows.
    (4096, 16, 57_344, 1024, {}, ["queries 0:4096, heads 0:16: additions"]),
    (4096, 16, 57_345, 1024, {}, ["queries 0:4096, heads 0:16: additions by tickets"]),
    (4096, 32, 4096, 1024, LENGTHS, ["queries 0:4096, heads 0:32: additions by tickets"]),
    (100, 16, 4096, 64, {"tile": WITHOUT_ROPE}, [
        "queries 0:100, heads 0:16: additions by tickets",
    ]),
    # Heads are padded, to spread few queries over more groups, too.
    (528, 8, 4096, 256, {}, ["queries 0:528, heads 0:8 as 16: additions"]),
    (529, 8, 4096, 256, {}, ["queries 0:529, heads 0:8: additions"]),
    (264, 8, 4096, 255, {}, ["queries 0:264, heads 0:8: additions"]),
    (2, 8, 4096, 256, {}, ["queries 0:2, heads 0:8 as 64: additions"]),
    (1, 8, 4096, 256, {}, ["queries 0:1, heads 0:8: additions"]),
    (300, 300, 8192, 512, {}, [
        "queries 0:300, heads 0:128: additions",
        "queries 0:300, heads 128:256: additions",
        "queries 0:300, heads 256:300 as 64: additions",
    ]),
    # In order.
    (4096, 128, 32_768, 2048, IN_ORDER, ["queries 0:4096, heads 0:128: slots"]),
    (30, 24, 300, 64, {**IN_ORDER, **JOINED}, [
        "queries 0:30 of 0:30 joined, heads 0:24 as 32: slots",
    ]),
    # Lists have room for so many queries, joint ones for others.
    (30_000, 128, 32_768, 2048, {}, [
        f"queries 0:13106, heads 0:128: {OF_2} additions by tickets",
        f"queries 13106:26212, heads 0:128: {OF_2} additions by tickets",
        f"queries 26212:30000, heads 0:128: {OF_2} additions by tickets",
    ]),
    (50_000, 16, 5000, 2048, JOINED, [
        "queries 0:40260 of 0:40260 joined, heads 0:16: additions by tickets",
        "queries 40260:50000 of 40260:50000 joined, heads 0:16: additions by tickets",
    ]),
    (2000, 128, 100_000, 50_000, RANGES, [
        f"queries 0:536 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        f"queries 536:1072 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        f"queries 1072:1584 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        "queries 1584:2000 of 1584:2000 joined, heads 0:128: additions by tickets",
    ]),
    # Nothing to do.
    (0, 128, 9, 64, {}, []),
    (4, 128, 0, 64, {}, []),
]  # fmt: skip
"""Queries, heads, rows of keys, slots of a query, the rest; parts of the call."""


@pytest.mark.parametrize(("queries", "heads", "keys", "topk", "kind", "parts"), TABLE)
def test_launches_of_a_call_on_132_multiprocessors(
    queries: int, heads: int, keys: int, topk: int, kind: dict[str, Any], parts: list[str]
) -> None:
    found = choose(Call(queries, heads, keys, topk, 132, **kind))
    assert [*map(str, found)] == parts
    assert {plan.name for part in found for plan in part.plans} <= variants_of("sm90").keys()


KEYS, TOPK = 300, 64


class Noted(Pretended):
    """Launches have their kernels' names."""

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """Does nothing."""
        return lambda *arguments: self.launched.append((spec.name, arguments))


def operands_of(heads: int, queries: int, value: float) -> MlaBwdOperands:
    rows = torch.full((queries, heads, 576), value, dtype=torch.bfloat16)
    kv = torch.full((KEYS, 576), value, dtype=torch.bfloat16)
    lse, d_o = torch.full((queries, heads), value), rows[..., :512].contiguous()
    indices = torch.zeros(queries, TOPK, dtype=torch.int32)
    return MlaBwdOperands(rows, kv, d_o, lse, d_o.clone(), indices)


def noted_calls(heads: int, queries: int, deterministic: bool) -> tuple[Noted, list[Any]]:
    """Two calls that one binding serves, the operands filled with 1 and with 2."""
    runner, results = Noted(), []
    every = [operands_of(heads, queries, value) for value in (1.0, 2.0)]
    bound = mla_bwd.bind(
        runner,  # type: ignore[arg-type]
        every[0],
        sm_scale=1.0,
        deterministic=deterministic,
        dkv_dtype=torch.float32,
    )
    for operands in every:
        results.append(bound(operands))
    return runner, results


@pytest.mark.parametrize(
    ("heads", "deterministic", "kernels"), [(16, False, 1), (64, False, 4), (64, True, 1)]
)
def test_each_call_has_its_own_operands_and_memory(
    heads: int, deterministic: bool, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backward, "LEAST_ROUNDS", 1)
    runner, results = noted_calls(heads, 8, deterministic)
    assert len(runner.launched) == 2 * kernels
    calls = [runner.launched[:kernels], runner.launched[kernels:]]
    assert [name for name, _ in calls[0]] == [name for name, _ in calls[1]]
    for value, ((_, arguments), *_), (dq, dkv, none, d_sink) in zip(
        (1.0, 2.0), calls, results, strict=True
    ):
        q, kv, _, d_o, lse, out = arguments[:6]
        assert all(bool((x == value).all()) for x in (q, kv, d_o, lse, out))
        assert dq.data_ptr() in [x.data_ptr() for x in arguments if isinstance(x, Tensor)]
        assert dkv.shape == (KEYS, 576) and not dkv.any()
        assert none.shape == d_sink.shape == (0,)
    written = [
        {x.data_ptr() for x in arguments[8:] if isinstance(x, Tensor) and x.numel()}
        for ((_, arguments), *_) in calls
    ]
    assert not written[0] & written[1]


def test_queries_that_have_no_room_for_lists_are_bound_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 19 queries 8, 8 and 3: their rows of Q, and groups of 4 with room for lists."""
    capacity = capacity_of(4, TOPK)
    monkeypatch.setattr(mla_bwd_choice, "MOST_LIST_BYTES", 2 * 2 * 5 * capacity)
    monkeypatch.setattr(Backward, "LEAST_ROUNDS", 1)
    runner, _ = noted_calls(64, 19, False)
    fused = [arguments for name, arguments in runner.launched if name == "mla_bwd_fused"]
    assert [x[0].shape[0] for x in fused] == [8, 8, 3] * 2
    assert [x[-10].shape for x in fused[:3]] == [(2, capacity), (2, capacity), (1, capacity)]


def test_two_sources_are_one_whose_lists_are_joined_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 9 queries 7 and 2: their rows of Q and their lists; all rows, once, and all gradients."""
    most_slots = TOPK * 2 + 20
    monkeypatch.setattr(mla_bwd_choice, "MOST_JOINT_BYTES", 7 * 13 * most_slots)
    given = operands_of(16, 9, 1.0)
    extra_kv = torch.full((20, 576), 2.0, dtype=torch.bfloat16)
    starts, ends = torch.arange(9, dtype=torch.int32)[:, None], torch.full((9,), 20).int()
    given = given._replace(extra_kv=extra_kv, extra_indices=starts, extra_ends=ends)
    runner = Noted()
    bound = mla_bwd.bind(
        runner,  # type: ignore[arg-type]
        given,
        sm_scale=1.0,
        deterministic=False,
        dkv_dtype=torch.float32,
        index_block=2,
    )
    _, dkv, dextra_kv, _ = bound(given)
    assert dkv.shape == (KEYS, 576) and dextra_kv.shape == (20, 576)
    assert dextra_kv.untyped_storage().data_ptr() != dkv.untyped_storage().data_ptr()
    names = [name for name, _ in runner.launched]
    assert names == ["mla_bwd_join", "mla_bwd_fused"] * 2
    for (_, joins), (_, fused), queries in zip(
        runner.launched[::2], runner.launched[1::2], (slice(0, 7), slice(7, 9)), strict=True
    ):
        count = queries.stop - queries.start
        assert [len(joins[0]), len(joins[4])] == [KEYS, 20]
        assert torch.equal(joins[5], starts[queries]) and torch.equal(joins[7], ends[queries])
        assert joins[8] == 1 and joins[9].shape == (count, most_slots)
        assert fused[0].shape == (count, 16, 576)
        assert torch.equal(fused[1], torch.cat([given.kv, extra_kv]))
        assert fused[6] is joins[9] and fused[7] is joins[10]


def test_without_keys_a_plain_tuple_is_served() -> None:
    """As torch's dispatcher hands operands over."""
    given = operands_of(8, 2, 1.0)._replace(kv=torch.empty(0, 576, dtype=torch.bfloat16))
    bound = mla_bwd.bind(
        Noted(),  # type: ignore[arg-type]
        given,
        sm_scale=1.0,
        deterministic=False,
        dkv_dtype=torch.float32,
    )
    dq, dkv, none, d_sink = bound(tuple(given))  # type: ignore[arg-type]
    assert not dq.any() and dq.shape == given.q.shape
    assert dkv.shape == (0, 576) and none.shape == d_sink.shape == (0,)
