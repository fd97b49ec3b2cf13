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
SCORES = {
    "hopper": Shape(128, 128, 4, 2),
    "blackwell": Shape(128, 128, 4, 1),
    "others": Shape(128, 128, 8, 2),
}
"""Tiles of the indexer's scores, which have all heads."""
HEAD_SUMS = {
    "hopper": Shape(128, 64, 8, 3),
    "blackwell": Shape(128, 64, 8, 1),
    "others": Shape(128, 64, 8, 3),
}
INDEX_BACKWARD = {
    "hopper": Shape(64, 32, 8, 2),
    "blackwell": Shape(64, 32, 8, 1),
    "others": Shape(64, 64, 8, 2),
}
PREFILL_RUN = 32
"""Queries of a prompt that share a tile of keys."""
SCORES_BYTES = 2**25
"""Scores that are held at once; those of one run of queries may take more."""
MOST_SCORES = 16384
"""Scores among which a program chooses, at most: 4 times any topk."""
FP8_LEAST = (8, 9)
"""The oldest compute capability with products and conversions of e4m3."""


def has_fp8(runner: Runner) -> bool:
    """Whether the GPU has products and conversions of e4m3."""
    return runner.capability >= FP8_LEAST


def shape_of_forward(num_heads: int, capability: tuple[int, int]) -> Shape:
    """The forward's tile for a number of heads."""
    if num_heads <= FEW_HEADS.heads:
        return FEW_HEADS
    if capability[0] == 9 and num_heads > FORWARD["others"].heads:
        return with_fences(FORWARD["hopper"])
    return FORWARD["others"]


def with_fences(shape: Shape) -> Shape:
    """The shape for products by wgmma: of 64 rows or more on Hopper.

    Before 3.7 Triton sets no fence between cp.async, which it copies by in a loop of more than one
    stage, and wgmma, which reads what was copied (ptxemu: missing-proxy-fence).
    """
    return shape if triton_version() >= (3, 7) else shape._replace(stages=1)


@cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of the Triton that is installed."""
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def shape_of(table: dict[str, Shape], capability: tuple[int, int], num_heads: int) -> Shape:
    """A kernel's tile on a GPU, with no more heads than there are."""
    family = {9: "hopper", 10: "blackwell"}.get(capability[0], "others")
    shape = with_fences(table[family]) if family == "hopper" else table[family]
    heads = max(16, 1 << (num_heads - 1).bit_length())
    return shape._replace(heads=min(shape.heads, heads))


def shape_of_selection(scores: int) -> Shape:
    """The scores of a program that chooses among a row's, 16 or fewer a thread."""
    keys = min(max(256, 1 << (scores - 1).bit_length()), MOST_SCORES)
    return Shape(0, keys, max(4, keys // 512), 1)


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
