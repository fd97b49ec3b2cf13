"""What one program of the suite is: PTX, a launch, its arguments, and how results are compared."""

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Array:
    """A device buffer. Its bytes after the launch are the result where `recorded` is set."""

    data: Bytes
    recorded: bool = False


@dataclass(frozen=True)
class TensorMap:
    """cuTensorMapEncodeTiled's arguments; the map is over argument number `array`."""

    array: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    oob_fill: int = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides, 1 where none are given."""
        return self.element_strides or (1,) * len(self.dims)


@dataclass(frozen=True)
class Im2colMap(TensorMap):
    """cuTensorMapEncodeIm2col's arguments; `box` is empty.

    Attributes:
        lower, upper: pixelBoxLowerCorner and pixelBoxUpperCorner.
        channels, pixels: channelsPerPixel and pixelsPerColumn.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0


@dataclass(frozen=True)
class Check:
    """How ptxemu's results must agree with the recorded ones.

    With no bound at all: bit-identical. Otherwise element by element of `dtype` (f16, bf16, f32
    or f64): a NaN must be the same one, infinities and zeros match themselves, and the difference
    of numbers may reach the largest of the given bounds.
    """

    dtype: str = ""
    ulp: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether results must be bit-identical."""
        return not (self.ulp or self.absolute or self.relative)


EXACT = Check()


@dataclass(frozen=True, eq=False)
class Program:
    """One launch of the kernel `k`."""

    name: str
    ptx: str
    args: tuple[Array | TensorMap | int, ...]
    block: int = 32
    grid: int = 1
    cluster: int = 1
    smem: int = 0
    check: Check = EXACT
    note: str = field(default="", compare=False)

    @property
    def outputs(self) -> list[int]:
        """Indices of the recorded arguments."""
        return [i for i, a in enumerate(self.args) if isinstance(a, Array) and a.recorded]

    def digest(self) -> str:
        """A hash of all that determines the result: a recording of another hash is stale."""
        sha = hashlib.sha256(" ".join(self.ptx.split()).encode())
        sha.update(struct.pack("<4q", self.block, self.grid, self.cluster, self.smem))
        for arg in self.args:
            if isinstance(arg, Array):
                sha.update(bytes([arg.recorded]))
                sha.update(arg.data.tobytes())
            else:
                sha.update(repr(arg).encode())
        return sha.hexdigest()[:16]


DIGEST_FROM = 256
"""Exact results of more bytes are recorded as a SHA-256 and a sample of 32-bit words."""
SAMPLES = 32


def condense(result: Bytes, check: Check) -> bytes:
    """What is recorded of one result array."""
    if not check.exact or len(result) <= DIGEST_FROM:
        return result.tobytes()
    step = max(len(result) // 4 // SAMPLES, 1)
    sample = result[: len(result) // 4 * 4].view(np.uint32)[::step][:SAMPLES]
    return hashlib.sha256(result.tobytes()).digest() + sample.tobytes()
