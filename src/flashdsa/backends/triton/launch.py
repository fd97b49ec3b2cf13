"""Launches of Triton's kernels: on the tensors' GPU, or compiled for one and run by ptxemu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """A kernel's tile and its launch: heads, slots, warps, and stages of a loop."""

    heads: int
    slots: int
    warps: int
    stages: int = 2


Launch = Callable[..., None]
"""Of a kernel, its grid, its arguments without constants, a `Shape`, and the constants."""
FORWARD = {
    "hopper": Shape(64, 32, 8),
    "large": Shape(32, 32, 8),  # shared memory for 76 KB, all since sm_80
}
FEW_HEADS = Shape(16, 32, 4)
BACKWARD = Shape(16, 16, 4)


def on_gpu(device: torch.device) -> Launch:
    """Launch on a CUDA device, whose kernels Triton compiles and keeps."""

    def launch(
        kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], shape: Shape, **constants: Any
    ) -> None:
        with torch.cuda.device(device):
            options = {"num_warps": shape.warps, "num_stages": shape.stages}
            kernel[grid](*arguments, **constants, **options)

    return launch


def shape_of_forward(num_heads: int, capability: tuple[int, int]) -> Shape:
    """The forward's tile for a number of heads."""
    if num_heads <= FEW_HEADS.heads:
        return FEW_HEADS
    return FORWARD["hopper" if capability[0] == 9 and num_heads > 32 else "large"]
