"""Padded operands of the backward on ptxemu: every element of every tensor."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.catalog import MLA_BWD_PADDED_HEADS
from tests.kernels.assembled import assert_it_assembles_without_spills


@pytest.mark.parametrize(
    ("queries", "heads", "first", "count", "padded", "d_qk"),
    [
        (3, 8, 0, 8, 16, 576),
        (5, 24, 0, 24, 32, 512),
        (2, 136, 128, 8, 8, 576),
        (1, 3, 0, 3, 8, 512),
    ],
)
def test_heads_are_copied_and_padding_adds_nothing(
    queries: int, heads: int, first: int, count: int, padded: int, d_qk: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    rows = queries, heads
    given = [torch.randn(*rows, d, generator=generator).bfloat16() for d in (d_qk, 512, 512)]
    given.append(torch.randn(*rows, generator=generator))
    given[0][0, first, 0] = float("nan")
    found = [torch.full_like(x[:, :1], -7.0).repeat_interleave(padded, 1) for x in given]
    emulator = Emulator()
    with emulator.launching():
        pad = emulator.function(MLA_BWD_PADDED_HEADS, MLA_BWD_PADDED_HEADS.plan)
        pad(*given, *found, first, count)
    for x, empty, to in zip(given, (0.0, 0.0, 0.0, float("inf")), found, strict=True):
        own = x[:, first : first + count]
        assert torch.equal(to[:, :count].nan_to_num(9.0), own.nan_to_num(9.0))
        assert (to[:, count:] == empty).all()


def test_it_needs_no_stack() -> None:
    assert_it_assembles_without_spills(MLA_BWD_PADDED_HEADS, MLA_BWD_PADDED_HEADS.plan)
