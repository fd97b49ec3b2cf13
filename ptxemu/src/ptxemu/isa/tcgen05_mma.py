"""tcgen05.mma and tcgen05.mma.ws (PTX ISA, "TensorCore 5th Generation of MMA Instructions")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.descriptors import BLOCK_SCALED_KINDS, KINDS
from ptxemu.engines.forms import MmaOperands
from ptxemu.engines.mma_plan import SHAPES, MmaForm
from ptxemu.engines.tcgen05_mma import issue_mma
from ptxemu.errors import fault, illegal
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import LaneItem, address_in_lane, elements, in_lane
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Address, Instruction, IntImmediate, Operand, Vector

_DEFAULT_SCALE_COUNT = {"mxf8f6f4": 1, "mxf4": 2}
_SCALE_COUNTS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
_COLLECTOR_OPS = ("fill", "use", "lastuse", "discard")
_ZERO = in_lane(IntImmediate(0), "u64")


@visible("tcgen05.mma")
def tcgen05_mma(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + D by one thread; D in TMEM, A in TMEM or shared memory, B in shared memory."""
    form = _form(instruction, modifiers)
    read = _operand_reader(instruction, form)

    def step(warp: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(mask)
        if len(lanes) > 1:
            warp.cta.machine.complain(
                "warning",
                "tcgen05-issued-by-many",
                f"{len(lanes)} threads issue {instruction.opcode}; each starts a whole product",
                warp,
                instruction,
            )
        if form.ws and form.cta_group == 2:
            fault(instruction, f".ws with .cta_group::2 is invalid ({SHAPES})")
        for lane in lanes.tolist():
            issue_mma(warp, lane, instruction, form, read(warp, lane))

    return step


def _form(instruction: Instruction, modifiers: Modifiers) -> MmaForm:
    ws, sparse = modifiers.flag("ws"), modifiers.flag("sp")
    cta_group = int(modifiers.one_of("cta_group::1", "cta_group::2")[-1])
    kind = modifiers.one_of(*(f"kind::{kind}" for kind in KINDS)).removeprefix("kind::")
    is_scaled = modifiers.flag("block_scale") or kind in BLOCK_SCALED_KINDS
    if modifiers.flag("ashift"):
        unsupported(instruction, ".ashift is not emulated: the manual leaves its last row open")
    buffers = ("a",) if not ws else ("b0", "b1", "b2", "b3")
    hints = tuple(f"collector::{b}::{op}" for b in buffers for op in _COLLECTOR_OPS)
    modifiers.one_of(*hints, default="")
    scale_count = 0
    if is_scaled:
        if kind not in BLOCK_SCALED_KINDS:
            unsupported(instruction, f".kind::{kind} has no .block_scale")
        name = modifiers.one_of(*_SCALE_COUNTS, "block32", default="")
        if name == "" and kind not in _DEFAULT_SCALE_COUNT:
            unsupported(instruction, f".kind::{kind} needs .block16 or .block32")
        block32 = 1 if kind == "mxf8f6f4" else 2
        scale_count = _SCALE_COUNTS.get(name, block32)
    a = instruction.operands[1]
    return MmaForm(
        kind, cta_group, ws, scale_count, a_in_tmem=isinstance(a, Address), sparse=sparse
    )


def _operand_reader(instruction: Instruction, form: MmaForm) -> Callable[[Warp, int], MmaOperands]:
    """A function that gives the operands' values in one thread."""
    d, a, b, *rest = instruction.operands
    metadata = _ZERO
    if form.sparse and rest:
        metadata = address_in_lane(rest.pop(0))
    _expect(instruction, rest, 2, 5)
    idesc = rest.pop(0)
    read_d = address_in_lane(d)
    read_a = address_in_lane(a) if form.a_in_tmem else in_lane(a, "u64")
    read_b, read_idesc = in_lane(b, "u64"), in_lane(idesc, "u32")
    scale_a = scale_b = zero_mask = _ZERO
    scale_d = 0
    disabled: tuple[LaneItem, ...] = ()
    if form.scale_count:
        _expect(instruction, rest, 3, 3)
        scale_a, scale_b = (address_in_lane(operand) for operand in rest[:2])
        rest = rest[2:]
    elif rest and isinstance(rest[0], Vector):
        disabled = _disabled_lanes(instruction, form, rest.pop(0))
    _expect(instruction, rest, 1, 1 if form.scale_count else 2)
    enable = in_lane(rest[0], "pred")
    if len(rest) == 2 and form.ws:
        zero_mask = in_lane(rest[1], "u64")
    elif len(rest) == 2:
        scale_d = _scale_input_d(instruction, form, rest[1])

    def read(warp: Warp, lane: int) -> MmaOperands:
        bits = 0
        for index, word in enumerate(disabled):
            bits |= word(warp, lane) << 32 * index
        return MmaOperands(
            read_d(warp, lane),
            read_a(warp, lane),
            read_b(warp, lane),
            read_idesc(warp, lane),
            bool(enable(warp, lane)),
            scale_d,
            bits,
            scale_a(warp, lane),
            scale_b(warp, lane),
            zero_mask(warp, lane),
            metadata(warp, lane),
        )

    return read


def _disabled_lanes(
    instruction: Instruction, form: MmaForm, operand: Operand
) -> tuple[LaneItem, ...]:
    words = elements(operand)
    if form.ws or len(words) != 4 * form.cta_group:
        illegal(
            instruction,
            f"disable-output-lane has {len(words)} elements; expected "
            f'{"none with .ws" if form.ws else 4 * form.cta_group} (PTX ISA, "tcgen05.mma")',
        )
    return tuple(in_lane(word, "u32") for word in words)


def _scale_input_d(instruction: Instruction, form: MmaForm, operand: Operand) -> int:
    if form.kind not in ("f16", "tf32") or not isinstance(operand, IntImmediate):
        illegal(
            instruction,
            'scale-input-d is an immediate of .kind::f16 and .kind::tf32 (PTX ISA, "tcgen05.mma")',
        )
    if not 0 <= operand.value <= 15:
        message = f'scale-input-d must be 0 to 15; got {operand.value} (PTX ISA, "tcgen05.mma")'
        illegal(instruction, message)
    return operand.value


def _expect(instruction: Instruction, operands: list[Operand], low: int, high: int) -> None:
    if not low <= len(operands) <= high:
        illegal(instruction, f"it has {len(instruction.operands)} operands")
