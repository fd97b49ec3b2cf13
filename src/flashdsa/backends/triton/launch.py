"""Tiles of Triton's kernels by family of GPUs, and their launches: the table to edit for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from flashdsa.backends.runner import Runner


class Shape(NamedTuple):
    """A kernel's tile and its launch: heads, keys, warps, and stages of a loop."""

    heads: int
    keys: int
    warps: int
    stages: int = 2


FORWARD = {
    "hopper": Shape(64, 32, 8),
    "others": Shape(32, 32, 8),  # shared memory for 76 KB, which all have
}
FEW_HEADS = Shape(16, 32, 4)
BACKWARD = Shape(16, 16, 4)
SUMS = Shape(1, 8, 4)


def shape_of_forward(num_heads: int, capability: tuple[int, int]) -> Shape:
    """The forward's tile for a number of heads."""
    if num_heads <= FEW_HEADS.heads:
        return FEW_HEADS
    if capability[0] == 9 and num_heads > FORWARD["others"].heads:
        return with_fences(FORWARD["hopper"])
    return FORWARD["others"]


def with_fences(shape: Shape) -> Shape:
    """The shape for products by wgmma: 64 heads or more on Hopper.

    Before 3.7 Triton sets no fence between cp.async, which it copies by in a loop of more than one
    stage, and wgmma, which reads what was copied (ptxemu: missing-proxy-fence).
    """
    return shape if triton_version() >= (3, 7) else shape._replace(stages=1)


@cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of the Triton that is installed."""
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def launch(
    runner: Runner,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    shape: Shape,
    **constants: Any,
) -> None:
    """Launch a kernel with a tile's warps and stages."""
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    runner.launch_triton(kernel, grid, arguments, **constants, **options)
