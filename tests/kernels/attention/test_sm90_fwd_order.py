"""The order in which the Hopper forward draws lists, on ptxemu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Int32, Uint16, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.fwd.draws import class_of, sort_lists
from flashdsa.kernels.attention.sm90.fwd.plan import MOST_SORTED, THREAD_LISTS
from ptxemu.cutedsl import emulate

STEP_KEYS = 128
"""Slots of a step."""


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
