"""An index key that is not finite reaches the gradients of queries that name it, and no other's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.support.hopper_gpu import HOPPER_GPU

NAMED, BY = 7, 1
"""The key, and the query that names it."""


def operands(heads: int, queries: int, value: float) -> tuple[Tensor, ...]:
    """q, k, weights, indices and the scores' gradient; a query names six of 12 keys."""
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(queries, heads, 128, generator=generator).bfloat16()
    k = torch.randn(12, 128, generator=generator).bfloat16()
    k[NAMED, 5] = value
    weights = torch.randn(queries, heads, generator=generator)
    rows = torch.tensor([row for row in range(12) if row != NAMED])
    indices = rows[torch.rand(queries, 11, generator=generator).argsort(1)[:, :6]].int()
    indices[BY, 0] = NAMED
    indices[2] = -1
    return q, k, weights, indices, torch.randn(queries, 6, generator=generator)


def judge(backend: str, heads: int, queries: int, value: float, deterministic: bool) -> None:
    """dQ and dW of all but one query, and dK of all other keys, are those of the CPU."""
    given = operands(heads, queries, value)
    wanted = flashdsa.indexer_bwd(*given, backend="cpu")
    if backend == "sm90":
        given = tuple(x.cuda() for x in given)
    got = flashdsa.indexer_bwd(*given, deterministic=deterministic, backend=backend)
    others = torch.arange(queries) != BY
    assert not got[2][BY].isfinite().any()
    keys = torch.arange(12) != NAMED
    for mine, expected, rows in zip(got, wanted, (others, keys, others), strict=True):
        mine, expected = mine.cpu()[rows].double(), expected[rows].double()
        assert expected.isfinite().all()
        error = (mine - expected).flatten(1).norm(dim=1)
        assert bool((error <= 0.01 * expected.flatten(1).norm(dim=1) + 1e-6).all())


def on(backend: str) -> AbstractContextManager[Any]:
    """Two emulated SMs, or none."""
    if not backend.startswith("emulate"):
        return nullcontext()
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    from flashdsa.backends.emulated.devices import Device
    from flashdsa.backends.emulated.runner import emulation

    return emulation(Device(2, {1: 2}))


CASES = [
    ("cpu", 64, 5, float("nan"), False),
    ("emulate-sm90", 64, 5, float("nan"), False),
    ("emulate-sm90", 16, 9, float("inf"), True),
]


@pytest.mark.parametrize(("backend", "heads", "queries", "value", "deterministic"), CASES)
def test_neighbours_are_as_without(
    backend: str, heads: int, queries: int, value: float, deterministic: bool
) -> None:
    with on(backend):
        judge(backend, heads, queries, value, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("heads", "queries"), [(16, 40), (32, 40), (64, 9), (64, 600)])
class TestOnHopper:
    """The same on the GPU."""

    pytestmark = HOPPER_GPU

    def test_neighbours_are_as_without(
        self, heads: int, queries: int, value: float, deterministic: bool
    ) -> None:
        judge("sm90", heads, queries, value, deterministic)
