"""A call like one that was served is not checked again; one that differs in anything is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.errors import FlashDsaError
from flashdsa.ops import registration
from flashdsa.ops.spec import OpSpec
from flashdsa.problem import Operation
from tests.ops import inputs


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operations that were checked."""
    checked: list[str] = []
    check = OpSpec.check

    def noted(spec: OpSpec, *arguments: object) -> object:
        checked.append(spec.operation.value)
        return check(spec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OpSpec, "check", noted)
    monkeypatch.setattr(registration, "_served", {})
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
    shifted = torch.cat([x.kv.flatten()[:1], x.kv.flatten()])[1:].view_as(x.kv)
    calls = [
        {},
        {"q": x.q.bfloat16(), "kv": x.kv.bfloat16()},
        {"q": x.q[:-1], "indices": x.indices[:-1]},
        {"q": x.q.transpose(0, 1).contiguous().transpose(0, 1)},
        {"kv": shifted},
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


def test_a_wrong_call_is_wrong_each_time() -> None:
    x = inputs.attention(torch.float32)
    flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    for _ in range(2):
        with pytest.raises(FlashDsaError, match="kv: expected dtype float32"):
            flashdsa.sparse_mla_fwd(x.q, x.kv.bfloat16(), x.indices, d_v=x.d_v)


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


def refuse(*_: object, **__: object) -> None:
    """An implementation that can be told from others."""
    raise RuntimeError("the better one")


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "MOST_SERVED", 3)
    x = inputs.attention(torch.float32)
    for queries in range(1, 6):
        flashdsa.sparse_mla_fwd(x.q[:queries], x.kv, x.indices[:queries], d_v=x.d_v)
        assert len(registration._served) <= 3
