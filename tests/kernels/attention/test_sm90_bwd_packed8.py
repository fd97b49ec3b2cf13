"""Eight fp32 of dKV in twelve bytes, on ptxemu: how far off, and what is not finite or tiny."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Float32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.kernels.attention.sm90.bwd_per_item.slot_sums import (
    NOTHING,
    NUMBERS,
    WORDS,
    add_packed,
    pack_eight,
)
from ptxemu.cutedsl import emulate

THREADS = 64
NAN, INF = float("nan"), float("inf")
TINY = 2.0**-126


@cute.kernel
def round_trip_kernel(source: cute.Tensor, total: cute.Tensor, packed: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    words = pack_eight([source[thread, i] for i in range(NUMBERS)])
    for i in cutlass.range_constexpr(WORDS):
        packed[thread, i] = words[i]
    sums = add_packed([Float32(total[thread, i]) for i in range(NUMBERS)], words)
    for i in cutlass.range_constexpr(NUMBERS):
        total[thread, i] = sums[i]


@cute.jit
def round_trip(source: cute.Tensor, total: cute.Tensor, packed: cute.Tensor):
    """total += source, by way of packed."""
    round_trip_kernel(source, total, packed).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def inputs() -> torch.Tensor:
    """Rows of eight: of all sizes, near a power of two, zeros, the smallest, and not finite."""
    torch.manual_seed(0)
    x = torch.randn(THREADS, NUMBERS) * 2.0 ** torch.randint(-90, 90, (THREADS, 1))
    x[1] *= 2.0 ** torch.arange(0, -NUMBERS, -1)
    x[2] = 2.0 - 2.0 ** -torch.arange(1.0, 1 + 3 * NUMBERS, 3)
    x[3] = -x[2]
    x[4] = 0.0
    x[5] = 2.0**-118 * torch.arange(NUMBERS)
    x[6] = TINY
    x[7, 3], x[8, 0], x[9, 7] = NAN, INF, -INF
    return x


def test_it_is_off_by_a_2_to_the_10th_of_the_largest_at_most() -> None:
    x = inputs()
    total, packed = torch.zeros(THREADS, NUMBERS), torch.zeros(THREADS, WORDS, dtype=torch.int32)
    with emulate():
        round_trip(*(from_dlpack(t) for t in (x, total, packed)))
    bad = ~x.isfinite().all(1)
    assert bad.sum() == 3 and total[bad].isnan().all()
    kept, got = x[~bad].double(), total[~bad].double()
    largest = kept.abs().amax(1, keepdim=True)
    # A row of the smallest numbers has steps of its own.
    assert bool(((got - kept).abs() <= (largest * 2.0**-10).clamp_min(2.0**-127)).all())
    assert packed[4].tolist() == list(NOTHING)


def test_it_is_added_and_rounded_once() -> None:
    torch.manual_seed(1)
    x, first = torch.randn(THREADS, NUMBERS), torch.randn(THREADS, NUMBERS)
    packed = torch.zeros(THREADS, WORDS, dtype=torch.int32)
    alone, total = torch.zeros_like(x), first.clone()
    with emulate():
        round_trip(*(from_dlpack(t) for t in (x, alone, packed)))
        round_trip(*(from_dlpack(t) for t in (x, total, packed)))
    assert torch.equal(total, first + alone)
