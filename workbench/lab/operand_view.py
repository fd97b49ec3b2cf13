"""Operands as the tensor core sees them beside their logical tiles, for each k-step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptxemu.descriptors import Swizzle, Tcgen05Descriptor, WgmmaDescriptor, decode, gather_operand
from ptxemu.numerics import dot
from workbench.lab.kernels.majorness.plan import CUTS, NUM_PARTS, MajornessPlan
from workbench.lab.runs import Inputs

MatrixDescriptor = WgmmaDescriptor | Tcgen05Descriptor
CORNER = 4
"""Rows and columns of an operand that are shown."""
_SWIZZLE_NAMES = {
    Swizzle.NONE: "none",
    Swizzle.B32: "32B",
    Swizzle.B64: "64B",
    Swizzle.B128: "128B",
}


@dataclass(frozen=True)
class Recording:
    """The outputs of a kernel, in NumPy."""

    descriptors: NDArray[np.uint64]
    """(2 cuts, 2 parts, steps, 2: A and B)"""
    instruction: int
    image_address: int
    image: NDArray[np.uint8]
    accumulators: NDArray[np.float32]
    """(2 parts, m, n); NaN after part 0 where it was not read back."""

    @classmethod
    def of(cls, plan: MajornessPlan, tensors: list[torch.Tensor]) -> Recording:
        """Take them from the kernel's arguments after the run."""
        arrays = [tensor.numpy() for tensor in tensors[2:]]
        rows = [plan.row_of_d(row) for row in range(plan.m)]
        return cls(
            arrays[0].view(np.uint64),
            int(arrays[1][0]) & 0xFFFFFFFF,
            int(arrays[1][1]),
            arrays[2].view(np.uint8),
            arrays[3][:, rows],
        )

    @property
    def cuts_identical(self) -> bool:
        """Whether both cuts gave the same descriptors, bit for bit."""
        return bool((self.descriptors[0] == self.descriptors[1]).all())


@dataclass(frozen=True)
class StepView:
    """One operand of one MMA.

    Attributes:
        bits, fields: of the descriptor.
        seen, logical: the first CORNER rows and columns: as gathered, as they should be.
        difference: None, or the first element that differs, in words.
    """

    operand: str
    part: int
    step: int
    major: str
    bits: str
    fields: dict[str, Any]
    seen: list[list[float]]
    logical: list[list[float]]
    difference: str | None


def decode_matrix(arch: str, bits: int) -> MatrixDescriptor:
    """Decode a shared memory descriptor of the architecture's MMA."""
    found = decode(bits, "wgmma" if arch == "sm_90a" else "tcgen05")
    assert isinstance(found, MatrixDescriptor)
    return found


def _fields(descriptor: MatrixDescriptor) -> dict[str, Any]:
    """Name the fields as the reference kernel's debugging output does."""
    return {
        "start_address": descriptor.start_address,
        "leading_byte_offset": descriptor.leading_dimension_byte_offset,
        "stride_byte_offset": descriptor.stride_dimension_byte_offset,
        "base_offset": descriptor.base_offset,
        "swizzle": _SWIZZLE_NAMES[descriptor.swizzle],
    }


def step_views(
    arch: str, plan: MajornessPlan, inputs: Inputs, recording: Recording
) -> list[StepView]:
    """View A and B of every part and k-step through the descriptors that the MMAs used."""
    s, do = (x.numpy() for x in inputs.bits())
    operands = (("A", s, plan.a_major), ("B", do, plan.b_major))
    views = []
    for part, step in np.ndindex(NUM_PARTS, plan.steps):
        first = part * plan.part_k + step * plan.step_k
        for number, (operand, source, major) in enumerate(operands):
            logical = np.ascontiguousarray(source[first : first + plan.step_k].T)
            rows, columns = logical.shape
            bits = int(recording.descriptors[CUTS.index(plan.cut), part, step, number])
            descriptor = decode_matrix(arch, bits)
            found: NDArray[np.uint8] | str
            try:
                found = gather_operand(
                    recording.image,
                    descriptor,
                    major=major.upper(),
                    shape=(rows, columns),
                    element_bytes=plan.element_bytes,
                    image_address=recording.image_address,
                ).reshape(rows, -1)
            except ValueError as error:  # the descriptor points out of the operands
                found = str(error)
            shown = major, f"0x{bits:016x}", _fields(descriptor)
            views.append(_view(plan, operand, (part, step), shown, found, logical))
    return views


def _view(
    plan: MajornessPlan,
    operand: str,
    number: tuple[int, int],
    shown: tuple[str, str, dict[str, Any]],
    seen: NDArray[np.uint8] | str,
    logical: NDArray[Any],
) -> StepView:
    expected = np.ascontiguousarray(logical).view(np.uint8).reshape(logical.shape[0], -1)
    difference = seen if isinstance(seen, str) else None
    if isinstance(seen, str):
        seen = np.zeros_like(expected)
    numbers = dot.numbers(np.ascontiguousarray(seen), plan.dtype)
    right = dot.numbers(expected, plan.dtype)
    wrong = np.argwhere((seen != expected).reshape(*logical.shape, -1).any(axis=2))
    if difference is None and len(wrong):
        row, k = (int(x) for x in wrong[0])
        difference = (
            f"{len(wrong)} of {logical.size} differ, first ({'m' if operand == 'A' else 'n'} "
            f"{row}, k {k}): seen {numbers[row, k]:g}, logical {right[row, k]:g}"
        )
    corners = [x[:CORNER, :CORNER].tolist() for x in (numbers, right)]
    part, step = number
    return StepView(operand, part, step, *shown, corners[0], corners[1], difference)
