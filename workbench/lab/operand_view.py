"""Operands as the tensor core sees them, beside what they should be, for each k-step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptxemu.descriptors import (
    Swizzle,
    Tcgen05Descriptor,
    WgmmaDescriptor,
    decode,
    gather_operand,
)
from ptxemu.numerics import dot
from workbench.lab.inputs import Inputs
from workbench.lab.kernels.majorness.plan import CUTS, NUM_PARTS, MajornessPlan

MatrixDescriptor = WgmmaDescriptor | Tcgen05Descriptor
CORNER = 4
"""Rows and columns of an operand that are shown."""
_SWIZZLE_NAMES = {
    Swizzle.NONE: "none",
    Swizzle.B32: "32B",
    Swizzle.B64: "64B",
    Swizzle.B128: "128B",
    Swizzle.B128_ATOM_32B: "128B, 32B atoms",
}
_FAMILY = {"sm_90a": "wgmma", "sm_100a": "tcgen05"}


@dataclass(frozen=True)
class Recording:
    """What a kernel wrote out, in NumPy."""

    descriptors: NDArray[np.uint64]
    """(2 cuts, 2 parts, steps, 2: A and B)"""
    instruction: int
    image_address: int
    image: NDArray[np.uint8]
    a_words: NDArray[np.uint32]
    accumulators: NDArray[np.float32]
    """(2 parts, m, n); NaN after part 0 where it was not read back."""

    @classmethod
    def of(cls, plan: MajornessPlan, tensors: list[torch.Tensor]) -> Recording:
        """From the kernel's arguments after the run."""
        arrays = [tensor.numpy() for tensor in tensors[2:]]
        rows = [plan.row_of_d(row) for row in range(plan.m)]
        return cls(
            arrays[0].view(np.uint64),
            int(arrays[1][0]) & 0xFFFFFFFF,
            int(arrays[1][1]),
            arrays[2].view(np.uint8),
            arrays[3],
            arrays[4][:, rows],
        )

    @property
    def cuts_identical(self) -> bool:
        """Whether both cuts gave the same descriptors, bit for bit."""
        return bool((self.descriptors[0] == self.descriptors[1]).all())


@dataclass(frozen=True)
class StepView:
    """One operand of one MMA.

    Attributes:
        bits, fields: of the descriptor; None where the operand is not in shared memory.
        seen, logical: the first CORNER rows and columns: as gathered, as they should be.
        difference: None, or the first element that differs, in words.
    """

    operand: str
    part: int
    step: int
    major: str
    bits: str | None
    fields: dict[str, Any] | None
    shape: tuple[int, int]
    seen: list[list[float]]
    logical: list[list[float]]
    difference: str | None


def descriptor_fields(descriptor: MatrixDescriptor) -> dict[str, Any]:
    """The fields by the names of the reference kernel's debugging output."""
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
    """A and B of every part and k-step, through the descriptors that the MMAs used."""
    cut = CUTS.index(plan.cut)
    s, do = (x.numpy() for x in inputs.bits())
    views = []
    for part in range(NUM_PARTS):
        for step in range(plan.steps):
            first = part * plan.part_k + step * plan.step_k
            heads = slice(first, first + plan.step_k)
            for number, (operand, source, major) in enumerate(
                (("A", s, plan.a_major), ("B", do, plan.b_major))
            ):
                logical = np.ascontiguousarray(source[heads].T)
                bits = int(recording.descriptors[cut, part, step, number])
                fields = None
                seen: NDArray[np.uint8] | str
                if operand == "A" and plan.a_source != "smem":
                    seen = _a_elsewhere(plan, recording, part * plan.steps + step)
                else:
                    descriptor = decode(bits, _FAMILY[arch])
                    assert isinstance(descriptor, WgmmaDescriptor | Tcgen05Descriptor)
                    fields = descriptor_fields(descriptor)
                    try:
                        seen = gather_operand(
                            recording.image,
                            descriptor,
                            major=major.upper(),
                            shape=(logical.shape[0], logical.shape[1]),
                            element_bytes=plan.element_bytes,
                            image_address=recording.image_address,
                        ).reshape(logical.shape[0], -1)
                    except ValueError as error:  # the descriptor points out of the operands
                        seen = str(error)
                views.append(_view(plan, operand, (part, step), major, bits, fields, seen, logical))
    return views


def _a_elsewhere(plan: MajornessPlan, recording: Recording, number: int) -> NDArray[np.uint8]:
    """The bytes (m, 32) of A of a k-step, from TMEM or from the registers of wgmma's fragment."""
    if plan.a_source == "tmem":
        lanes = [plan.row_of_d(row) for row in range(plan.m)]
        words = recording.a_words[lanes, 8 * number : 8 * number + 8]
        return np.ascontiguousarray(words).view(np.uint8)
    words = recording.a_words[:, 4 * number : 4 * number + 4]
    found = np.zeros((plan.m, 8), dtype=np.uint32)
    for thread in range(words.shape[0]):
        warp, lane = divmod(thread, 32)
        for r in range(4):
            found[16 * warp + lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)] = words[thread, r]
    return found.view(np.uint8)


def _view(
    plan: MajornessPlan,
    operand: str,
    place: tuple[int, int],
    major: str,
    bits: int,
    fields: dict[str, Any] | None,
    seen: NDArray[np.uint8] | str,
    logical: NDArray[Any],
) -> StepView:
    expected = np.ascontiguousarray(logical).view(np.uint8).reshape(logical.shape[0], -1)
    unseen = seen if isinstance(seen, str) else None
    if isinstance(seen, str):
        seen = np.zeros_like(expected)
    numbers = dot.numbers(np.ascontiguousarray(seen), plan.dtype)
    right = dot.numbers(expected, plan.dtype)
    wrong = np.argwhere((seen != expected).reshape(*logical.shape, -1).any(axis=2))
    difference = unseen
    if unseen is None and len(wrong):
        row, k = (int(x) for x in wrong[0])
        difference = (
            f"{len(wrong)} of {logical.size} differ, first ({'m' if operand == 'A' else 'n'} "
            f"{row}, k {k}): seen {numbers[row, k]:g}, logical {right[row, k]:g}"
        )
    return StepView(
        operand,
        *place,
        major if fields is not None else "k",
        None if fields is None else f"0x{bits:016x}",
        fields,
        (logical.shape[0], logical.shape[1]),
        numbers[:CORNER, :CORNER].tolist(),
        right[:CORNER, :CORNER].tolist(),
        difference,
    )
