"""What tests on a Hopper GPU share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import pytest
import torch
from torch import Tensor

from flashdsa.backends.gpu.runner import Gpu

HOPPER_GPU: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
"""Marks of a module of such tests."""
GUARD: Final = 4096
"""Elements in front of a buffer and behind it."""
POISON: Final = 0x7F
"""Of a guard's bytes: large numbers, NaN, indices far outside."""

_Results = TypeVar("_Results")


def poison_freed_memory() -> None:
    """Fill memory that small and large tensors of a GPU get next: torch hands it out as it is."""
    blocks = [torch.full((2**19,), POISON, dtype=torch.uint8, device="cuda") for _ in range(32)]
    blocks.append(torch.full((2**26,), POISON, dtype=torch.uint8, device="cuda"))


def capture(call: Callable[[], _Results]) -> tuple[torch.cuda.CUDAGraph, _Results]:
    """The call's graph, and the results that it writes; one call precedes it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def by_turns_on_streams(
    calls: Sequence[Callable[[], _Results]], rounds: int
) -> list[list[_Results]]:
    """What each call gave in each round, every call on a stream of its own; they have ended."""
    streams = [torch.cuda.Stream() for _ in calls]
    together: list[list[_Results]] = [[] for _ in calls]
    torch.cuda.synchronize()
    for _ in range(rounds):
        for call, stream, results in zip(calls, streams, together, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    return together


class Guarded(Gpu):
    """Every tensor that it gives lies between guards."""

    def __init__(self) -> None:
        super().__init__(0)
        self.rooms: list[tuple[Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Of poison, as its guards."""
        return self.guarded(super().empty(*shape, dtype=dtype))

    def guarded(self, like: Tensor) -> Tensor:
        """A copy of `like` between guards."""
        room = torch.empty(2 * GUARD + like.numel(), dtype=like.dtype, device="cuda")
        room.view(torch.uint8).fill_(POISON)
        self.rooms.append((room, like.numel()))
        return room[GUARD : GUARD + like.numel()].view(like.shape).copy_(like)

    def touched(self) -> list[int]:
        """Numbers of the tensors whose guards were written."""
        return [
            number
            for number, (room, size) in enumerate(self.rooms)
            for guard in (room[:GUARD], room[GUARD + size :])
            if not bool((guard.view(torch.uint8) == POISON).all())
        ]
