"""The sinks' gradient on ptxemu, beside float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.catalog import MLA_BWD_SINK
from tests.kernels.assembled import assert_it_assembles_without_spills

INFINITE = float("inf")


def gradient(lse: torch.Tensor, sink: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """What the kernel writes; the check finds nothing."""
    emulator = Emulator()
    found = torch.full_like(sink, float("nan"))
    with emulator.launching():
        emulator.function(MLA_BWD_SINK, MLA_BWD_SINK.plan)(lse, sink, delta, found)
    return found


@pytest.mark.parametrize(("queries", "heads"), [(1100, 10), (129, 16), (1, 3)])
def test_every_query_counts_once(queries: int, heads: int) -> None:
    """Turns of a thread, rows of a turn, heads of a CTA: whole ones, and one of each in part."""
    generator = torch.Generator().manual_seed(0)
    lse, delta = (torch.randn(queries, heads, generator=generator) for _ in range(2))
    lse, sink = lse * 9, torch.randn(heads, generator=generator) * 9
    lse[queries // 2] = INFINITE
    delta[queries // 2] = 0.0
    _, expected = sink_backward(*(x.double() for x in (lse, sink, delta)))
    near = 2e-7 * delta.abs().sum(0) + 1e-6 * expected.abs()
    assert ((gradient(lse, sink, delta).double() - expected).abs() <= near).all()


def test_what_is_not_finite_stays_in_its_head_and_infinite_sinks_have_no_gradient() -> None:
    lse, delta = torch.zeros(5, 6), torch.ones(5, 6)
    sink = torch.tensor([INFINITE, -INFINITE, float("nan"), 0.0, 0.0, 0.0])
    delta[2, :2] = float("nan")  # a query's O that is not finite
    lse[1, 3], delta[3, 4] = float("nan"), INFINITE
    found = gradient(lse, sink, delta)
    assert (found[:2] == 0.0).all() and found[2:4].isnan().all()
    assert found[4] == -INFINITE and found[5] == -2.5


def test_it_needs_no_stack() -> None:
    assert_it_assembles_without_spills(MLA_BWD_SINK, MLA_BWD_SINK.plan)
