"""A call like one that was served is not checked again; one that differs in anything is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.errors import FlashDsaError
from flashdsa.ops import registration, table
from flashdsa.ops.spec import OpSpec
from flashdsa.problem import Operation
from tests.ops import inputs


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Iterator[list[str]]:
    """The operations that were checked."""
    checked: list[str] = []
    check = OpSpec.check

    def noted(spec: OpSpec, *arguments: object) -> object:
        checked.append(spec.operation.value)
        return check(spec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OpSpec, "check", noted)
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    yield checked


def test_only_the_first_of_calls_alike_is_checked(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    first = flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    again = flashdsa.sparse_mla_fwd(x.q + 1, x.kv.clone(), x.indices, d_v=x.d_v)
    assert checks == ["sparse_mla_fwd"]
    assert torch.equal(flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)[0], first[0])
    assert not torch.equal(again[0], first[0])


def test_whatever_the_checks_read_makes_a_call_a_new_one(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs.attention(torch.float32)
    calls = [
        {},
        {"q": x.q.bfloat16(), "kv": x.kv.bfloat16()},
        {"q": x.q[:-1], "indices": x.indices[:-1]},
        {"q": x.q.transpose(0, 1).contiguous().transpose(0, 1)},
        {"q": x.q.half(), "kv": x.kv.half()},
        {"sm_scale": 0.5},
        {"d_v": x.d_v - 1},
        {"topk_length": torch.full((len(x.q),), 2, dtype=torch.int32)},
        {"backend": "cpu"},
    ]
    for number, changed in enumerate(calls, 1):
        call = {"q": x.q, "kv": x.kv, "indices": x.indices, "d_v": x.d_v, **changed}
        for _ in range(2):
            flashdsa.sparse_mla_fwd(**call)  # type: ignore[arg-type]
        assert len(checks) == number, changed
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    assert len(checks) == len(calls) + 1


def test_a_tensor_may_begin_anywhere_in_its_storage(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    shifted = torch.cat([x.kv.flatten()[:1], x.kv.flatten()])[1:].view_as(x.kv)
    results = [flashdsa.sparse_mla_fwd(x.q, kv, x.indices, d_v=x.d_v) for kv in (x.kv, shifted)]
    assert torch.equal(*(out for out, _ in results))
    assert checks == ["sparse_mla_fwd"]


def test_what_reads_addresses_remembers_no_call() -> None:
    assert table.READ_INDEX_K_CACHE.memory is None
    assert table.DSA_TOPK_INDEXER.memory is None
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    slots = torch.zeros(1, dtype=torch.int32)
    flashdsa.read_index_k_cache(cache, slots)
    behind = torch.zeros(cache.numel() + 1, dtype=torch.uint8)[1:].view_as(cache)
    for _ in range(2):
        with pytest.raises(FlashDsaError, match="expected pages aligned to 4 bytes"):
            flashdsa.read_index_k_cache(behind, slots)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv": "bfloat16"}, "kv: expected dtype float32"),
        ({"kv": [[1.0]]}, "kv: expected a torch.Tensor; got list"),
        ({"d_v": 8.0}, "d_v: expected an integer; got float"),
        ({"backend": ["cpu"]}, "backend: expected one of"),
        ({"topk_length": 3}, "topk_length: expected a torch.Tensor; got int"),
    ],
    ids=["dtype", "no tensor", "no integer", "no name", "no optional tensor"],
)
def test_a_wrong_call_is_wrong_each_time(changed: dict[str, Any], message: str) -> None:
    x = inputs.attention(torch.float32)
    call: dict[str, Any] = {"q": x.q, "kv": x.kv, "indices": x.indices, "d_v": 8}
    flashdsa.sparse_mla_fwd(**call)
    if changed.get("kv") == "bfloat16":
        changed = {"kv": x.kv.bfloat16()}
    for _ in range(2):
        with pytest.raises(FlashDsaError, match=message):
            flashdsa.sparse_mla_fwd(**{**call, **changed})


def test_missing_operands_are_told_from_given_ones(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    plain, limited = {"d_v": x.d_v}, {"d_v": x.d_v, "topk_length": x.topk_length}
    expected = [flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, **o)[0] for o in (plain, limited)]
    for options, out in ((plain, expected[0]), (limited, expected[1])) * 2:
        assert torch.equal(flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, **options)[0], out)
    assert len(checks) == 2


def test_a_call_is_remembered_without_gradients_only(checks: list[str]) -> None:
    scores, target = torch.rand(2, 3), torch.rand(2, 3)
    flashdsa.indexer_kl(scores, target)
    leaf = scores.clone().requires_grad_()
    for _ in range(2):
        flashdsa.indexer_kl(leaf, target).sum().backward()
    with torch.no_grad():
        flashdsa.indexer_kl(leaf, target)
    assert flashdsa.indexer_kl(leaf, target).requires_grad
    assert leaf.grad is not None
    # The same tensor twice is no matter of the guards.
    for _ in range(2):
        assert (flashdsa.indexer_kl(target, target) > 0).all()


def test_an_implementation_that_is_registered_later_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = inputs.attention(torch.float32)
    flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    known = registry.implementations()
    (cpu,) = (i for i in known if (i.operation, i.backend) == (Operation.SPARSE_MLA_FWD, "cpu"))
    better = dataclasses.replace(cpu, entry="tests.ops.test_served_again:refuse", priority=9)
    monkeypatch.setattr(registry, "_implementations", [*known])
    registry.register(better)
    with pytest.raises(RuntimeError, match="the better one"):
        flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    registry._selected.clear()


def _vmapped(x: inputs.Attention) -> None:
    torch.vmap(lambda q: flashdsa.sparse_mla_fwd(q, x.kv, x.indices, d_v=x.d_v))(x.q[None])


def _plain(x: inputs.Attention, **changed: torch.Tensor) -> None:
    tensors = {"q": x.q, "kv": x.kv, "indices": x.indices, **changed}
    flashdsa.sparse_mla_fwd(**tensors, d_v=x.d_v)


def _on_meta(x: inputs.Attention) -> None:
    _plain(x, q=x.q.to("meta"), kv=x.kv.to("meta"), indices=x.indices.to("meta"))


class _Watch(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(context: object) -> Callable[[inputs.Attention], None]:
    def call(x: inputs.Attention) -> None:
        with context:  # type: ignore[attr-defined]
            _plain(x)

    return call


@pytest.mark.parametrize(
    ("call", "dispatched"),
    [
        (_plain, False),
        (_under(torch.inference_mode()), False),
        (lambda x: _plain(x, q=x.q.clone().requires_grad_()), True),
        (lambda x: _plain(x, q=torch.nn.Parameter(x.q)), True),
        (_vmapped, True),
        (_under(torch.autocast("cpu", torch.bfloat16)), True),
        (_under(_Watch()), True),
        (_under(torch.profiler.profile()), True),
        (_on_meta, True),
    ],
    ids=[
        "plain",
        "inference",
        "gradient",
        "parameter",
        "vmap",
        "autocast",
        "mode",
        "profiler",
        "meta",
    ],
)
def test_the_dispatcher_is_asked_where_it_has_something_to_do(
    call: Callable[[inputs.Attention], None], dispatched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OpSpec] = []
    custom_op = registration.custom_op

    def noted(spec: OpSpec) -> object:
        asked.append(spec)
        return custom_op(spec)

    monkeypatch.setattr(registration, "custom_op", noted)
    _plain(inputs.attention(torch.float32))  # remembered
    call(inputs.attention(torch.float32))
    assert bool(asked) == dispatched


def refuse(*_: object, **__: object) -> None:
    """An implementation that can be told from others."""
    raise RuntimeError("the better one")


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "MOST_SERVED", 3)
    x = inputs.attention(torch.float32)
    for queries in range(1, 6):
        flashdsa.sparse_mla_fwd(x.q[:queries], x.kv, x.indices[:queries], d_v=x.d_v)
        assert len(registration._served) <= 3


BOUND: list[tuple[int, ...]] = []
"""Sizes of the scores that `bind_kl` was asked to serve."""


def bind_kl(operands: Any) -> Callable[[Any], torch.Tensor]:
    """The sum of the scores, in the divergence's place."""
    BOUND.append(tuple(operands.scores.shape))
    return lambda operands: operands[0].sum(1)


def test_what_binds_is_bound_once_for_calls_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        dataclasses.replace(row, bind=f"{__name__}:bind_kl")
        if (row.operation, row.backend) == (Operation.INDEXER_KL, "cpu")
        else row
        for row in registry.implementations()
    ]
    monkeypatch.setattr(registry, "_implementations", rows)
    monkeypatch.setattr(registry, "_selected", {})
    BOUND.clear()
    for size in (3, 3, 4):
        scores = torch.rand(2, size)
        assert torch.equal(flashdsa.indexer_kl(scores, torch.rand(2, size)), scores.sum(1))
    assert BOUND == [(2, 3), (2, 4)]
