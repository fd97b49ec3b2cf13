"""Calls of the Hopper backward bound to their sizes; launches are only noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.backends.sm90 import mla_bwd, mla_bwd_choice
from flashdsa.backends.sm90.mla_bwd_choice import capacity_of
from flashdsa.heuristics.h200 import Backward
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from tests.backends.test_bound_calls import Pretended

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
