"""Tiles of Triton's kernels by family of GPUs, and their launches: the table to edit for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from flashdsa.backends.runner import Runner


class Shape(NamedTuple):
    """A kernel's tile and its launch: heads, keys, warps, stages of a loop, products of a step (of
    parts of V's columns, or of queries), and the registers that a thread has at most."""

    heads: int
    keys: int
    warps: int
    stages: int = 2
    parts: int = 1
    registers: int | None = None


FAMILIES = {9: "hopper", 10: "blackwell"}
"""By the major compute capability; all others are "others", as is what has no tile of its own."""
TILES = {
    "forward": {"hopper": Shape(64, 64, 8, 3), "others": Shape(32, 32, 8)},
    "forward, few heads": {"hopper": Shape(16, 64, 4, 3), "others": Shape(16, 32, 4)},
    "packed": {"hopper": Shape(64, 64, 8, 1, parts=4), "others": Shape(32, 32, 8, parts=4)},
    "packed, few heads": {
        "hopper": Shape(64, 64, 8, 2, parts=4),  # mma.sync's operands would be decoded twice
        "others": Shape(16, 32, 4, parts=4),
    },
    "packed, few heads, fp32 scales": {
        "hopper": Shape(16, 32, 4, 3, parts=4),
        "others": Shape(16, 32, 4, parts=4),
    },
    "backward": {"hopper": Shape(64, 64, 8, 1), "others": Shape(16, 32, 8)},
    "backward of rows": {"hopper": Shape(64, 64, 8), "others": Shape(16, 32, 8)},
    "backward of ranges": {"hopper": Shape(32, 64, 8), "others": Shape(16, 32, 8)},
    "sum of rows": {"others": Shape(1, 8, 4)},
    "valid ids": {"others": Shape(1, 2048, 4, 1)},
    "products": {"others": Shape(1, 16, 4, 1)},
    "scores": {
        "hopper": Shape(128, 256, 4, 1, parts=4, registers=128),
        "blackwell": Shape(128, 128, 4, 1),
        "others": Shape(128, 128, 8, 2),
    },
    "scores of prompts": {
        "hopper": Shape(128, 256, 8, 3),
        "blackwell": Shape(128, 128, 4, 1),
        "others": Shape(128, 128, 8, 2),
    },
    "target": {
        "hopper": Shape(128, 128, 4, 3),
        "blackwell": Shape(128, 64, 8, 1),
        "others": Shape(128, 64, 8, 3),
    },
    "index scores": {
        "hopper": Shape(64, 128, 8, 3),
        "blackwell": Shape(64, 128, 8, 1),
        "others": Shape(64, 64, 8, 2),
    },
    "indexer's backward": {
        "hopper": Shape(64, 64, 4, 2),
        "blackwell": Shape(64, 64, 8, 1),
        "others": Shape(64, 32, 8, 2),
    },
}
"""Tiles by kernel and family of GPUs. "others" fit 99 KB of shared memory, which all GPUs have."""
FEW_HEADS = 16
PREFILL_RUN = 32
"""Queries of a prompt that share a tile of keys."""
SCORES_BYTES = 2**29
"""Scores that are held at once; those of one run of queries may take more."""
MANY_ROWS = 2
"""Rows for each SM from which all SMs are busy choosing, so that fewer threads a row pay."""
MOST_SCORES = {False: 16384, True: 32768}
"""Scores among which a program chooses, at most, 4 times any topk; True: of many rows."""
SHORT_ROWS = 4096, 8192, 16384
"""Scores of a row, at most, among which smaller programs choose, of many rows."""
FP8_LEAST = (8, 9)
"""The oldest compute capability with products and conversions of e4m3."""


def has_fp8(runner: Runner) -> bool:
    """Whether the GPU has products and conversions of e4m3."""
    return runner.capability >= FP8_LEAST


def fenced(runner: Runner) -> bool:
    """Whether kernels set fences between cp.async, by which Triton copies in a loop of more than
    one stage, and wgmma, which reads that. From 3.7 on Triton does (ptxemu: missing-proxy-fence).
    """
    return runner.capability[0] in FAMILIES and triton_version() < (3, 7)


@cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of the Triton that is installed."""
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def family_of(capability: tuple[int, int], kernel: str) -> str:
    """The row of a kernel's tiles that a GPU takes."""
    family = FAMILIES.get(capability[0], "others")
    return family if family in TILES[kernel] else "others"


def tile(kernel: str, capability: tuple[int, int], num_heads: int = 128) -> Shape:
    """A kernel's tile on a GPU, with no more heads than so many."""
    family = family_of(capability, kernel)
    shape = TILES[kernel][family]
    return shape._replace(heads=min(shape.heads, max(16, 1 << (num_heads - 1).bit_length())))


def for_lists(shape: Shape, constants: dict[str, Any]) -> Shape:
    """The tile of loops over these lists: one stage of a loop over ids is theirs, and that of a
    loop over a range would hold rows, too."""
    ranges = "range" in (constants["LIST"], constants["EXTRA_LIST"])
    return shape._replace(stages=max(1, shape.stages - 1)) if ranges else shape


def shape_of_selection(scores: int, many: bool) -> Shape:
    """The scores of a program that chooses among a row's: 16 or fewer a thread, of many rows 64, as
    each step of a bisection costs a warp as much again, whatever it holds."""
    keys = min(max(256, 1 << (scores - 1).bit_length()), MOST_SCORES[many])
    if not many:
        return Shape(0, keys, max(4, keys // 512), 1)
    return Shape(0, keys, max(4, keys // 2048), 1, registers=128 if keys > 8192 else None)


def has_many_rows(runner: Runner, rows: int) -> bool:
    """Whether so many rows keep all SMs busy choosing."""
    return rows >= MANY_ROWS * runner.num_sms


def short_rows(scores: int, many: bool) -> list[int]:
    """Scores of the rows, at most, that have smaller programs of their own."""
    return [short for short in SHORT_ROWS if many and short < scores]


def launch(
    runner: Runner,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    shape: Shape,
    **constants: Any,
) -> None:
    """Launch a kernel with a tile's warps, stages and registers, and with fused multiply-adds."""
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    options["enable_fp_fusion"] = (
        True  # a * b + c is rounded once; Triton's default changes in 3.10
    )
    if shape.registers:  # of which AMD's compiler knows nothing
        options["maxnreg"] = shape.registers
    runner.launch_triton(kernel, grid, arguments, **constants, **options)
