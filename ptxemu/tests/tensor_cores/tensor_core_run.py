"""Small programs on tensor cores: shared memory and TMEM are set from outside, then read back.

How matrices are laid out here is written down a second time, from the way TMA fills shared memory:
boxes of one swizzle span, rows behind each other, then the swizzle. The emulator's own layout
functions are not used.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.kernel_run import Recorder

from ptxemu import api
from ptxemu.machine.state import Cta
from ptxemu.numerics.minifloat import FORMATS
from ptxemu.sched.policy import Policy

HEADER = (
    ".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
)
DATA = 0x800
"""CTA-relative address of `smem`: behind 1 KiB of reserved bytes and the static variables."""
DATA_BYTES = 128 * 1024

SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_atom_32B": 128}


def launch(
    text: str,
    *,
    args: tuple[Any, ...] = (),
    target: str = "sm_100a",
    warps: int = 1,
    cluster: int = 1,
    fill: Callable[[Cta], None] = lambda cta: None,
    policy: Policy | None = None,
) -> Recorder:
    """Run the only kernel of `text` on one cluster."""
    recorder = Recorder(fill=fill)
    module = api.load(HEADER.format(target=target) + text)
    module.launch(
        module.kernels[0], cluster, 32 * warps, cluster=cluster, smem=DATA_BYTES, args=args,
        observer=recorder, policy=replace(policy or Policy(), fill=0),
    )  # fmt: skip
    return recorder


def swizzle(offset: NDArray[np.int64], mode: str) -> NDArray[np.int64]:
    """The address of byte `offset` of what TMA writes (CUtensorMapSwizzle)."""
    if mode == "128B_atom_32B":
        return offset ^ (offset >> 7 & 3) << 5
    rows = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[mode]
    return offset ^ (offset >> 7 & rows) << 4


@dataclass
class Placed:
    """A matrix in shared memory: what its descriptor says."""

    start: int
    leading: int
    stride: int
    mode: str
    end: int


def place(
    shared: NDArray[np.uint8], matrix: NDArray[Any], at: int, mode: str, major: str
) -> Placed:
    """Write `matrix` (mn, k) of a whole-byte type at `at`, a multiple of 1024.

    K-major: boxes of one swizzle span along K and all rows. MN-major: boxes of one span along MN
    and all of K. Without swizzling the unit is a core matrix of 8 rows of 16 bytes.
    """
    size = matrix.dtype.itemsize
    span = SPANS[mode]
    along = matrix if major == "K" else np.ascontiguousarray(matrix.T)
    lines, length = along.shape
    raw = np.ascontiguousarray(along).view(np.uint8).reshape(lines, length * size)
    boxes = length * size // span if length * size >= span else 1
    width = min(span, length * size)
    line = np.arange(lines)[:, None]
    byte = np.arange(width)[None, :]
    for box in range(boxes):
        offset = box * lines * span + line * span + byte
        shared[at + swizzle(offset + at % 1024, mode) - at % 1024] = raw[
            :, box * span : box * span + width
        ]
    box_bytes = lines * span
    group = 4 if mode == "128B_atom_32B" and major == "MN" else 8
    leading, stride = box_bytes, group * span
    if mode == "none" and major == "MN":
        leading, stride = stride, leading
    return Placed(at, leading, stride, mode, at + boxes * box_bytes)


def k_step(placed: Placed, step_bytes: int, lines: int, major: str, rows_per_step: int) -> Placed:
    """The descriptor's fields for a step along K: `step_bytes` of a K-major row, or
    `rows_per_step` lines of an MN-major matrix."""
    if major == "MN":
        advance = rows_per_step * SPANS[placed.mode]
    else:
        span = SPANS[placed.mode]
        advance = step_bytes // span * lines * span + step_bytes % span
    return Placed(placed.start + advance, placed.leading, placed.stride, placed.mode, placed.end)


def bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Numbers that bf16 holds exactly, as bf16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Random normal numbers, truncated to bf16."""
    return bf16(rng.standard_normal(shape))


def from_bf16(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """bf16 as numbers."""
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def integers(rng: np.random.Generator, shape: tuple[int, ...], bound: int = 4) -> NDArray[Any]:
    """Small random integers: sums of their products are exact in every accumulator."""
    return rng.integers(-bound, bound + 1, shape)


def codes(values: NDArray[Any], type_: str) -> NDArray[Any]:
    """Small integers as elements of a type."""
    if type_ == "bf16":
        return bf16(values)
    if type_ == "f16":
        return values.astype(np.float16).view(np.uint16)
    if type_ == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if type_ in FORMATS:
        return FORMATS[type_].encode(values.astype(np.float64), "rn").astype(np.uint8)
    return values.astype(np.int8).view(np.uint8)
