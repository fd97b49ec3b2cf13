"""wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")."""

from __future__ import annotations

import re

from ptxemu.descriptors.matrix_layout import Major
from ptxemu.engines import wgmma as engine
from ptxemu.engines.forms import WgmmaForm
from ptxemu.errors import IllegalInstructionError, illegal
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import elements, uniform
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand, Register, Vector

_FLOAT_TYPES = ("f16", "bf16", "tf32", "e4m3", "e5m2")
_INTEGER_TYPES = ("s8", "u8")
_K_BY_TYPE = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_K_BY_TYPE |= {"b1": 256}
_RESULT_TYPES = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
    "s8": ("s32",),
    "u8": ("s32",),
    "b1": ("s32",),
}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@visible("wgmma.fence")
def wgmma_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Orders earlier register accesses before those of the wgmma.mma_async that follow."""
    modifiers.expect("sync", "aligned")
    return lambda warp, mask: engine.fence(warp, instruction)


@visible("wgmma.commit_group")
def wgmma_commit_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The wgmma.mma_async since the last commit become one group."""
    modifiers.expect("sync", "aligned")
    return lambda warp, mask: engine.commit(warp)


@visible("wgmma.wait_group")
def wgmma_wait_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Waits until at most N of the latest groups are pending."""
    modifiers.expect("sync", "aligned")
    keep = _immediate(instruction, instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> Blocked:
        left = engine.oldest_groups(warp, keep)
        count = len(left)

        def ready() -> bool:
            while left and engine.is_complete(left[-1]):
                left.pop()
            if left:  # nothing is over before this one is
                blocked.until = (left[-1].steps_taken, warp.cta.cluster.lanes_exited)
            return not left

        blocked = Blocked(
            ready=ready,
            reason=lambda: f"wgmma.wait_group {keep}: {count} products are under way",
            resume=lambda: engine.join(warp, keep),
        )
        return blocked

    return step


@visible("wgmma.mma_async")
def wgmma_mma_async(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + D, or D = A * B where scale-d is false; asynchronously."""
    return _product(instruction, modifiers, is_sparse=False)


@visible("wgmma.mma_async.sp")
def wgmma_mma_async_sparse(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The same, half of A's elements being zeros that are not stored."""
    return _product(instruction, modifiers, is_sparse=True)


def _product(instruction: Instruction, modifiers: Modifiers, *, is_sparse: bool) -> Step:
    form, descriptors = _form(instruction, modifiers, is_sparse)
    a_desc = None if form.a else uniform(descriptors[0], "u64")
    b_desc = uniform(descriptors[-1], "u64")
    scale_d = uniform(instruction.operands[5 if is_sparse else 3], "pred")

    def step(warp: Warp, mask: Mask) -> None:
        a = None if a_desc is None else a_desc(warp, mask)
        engine.issue(warp, instruction, form, a, b_desc(warp, mask), bool(scale_d(warp, mask)))

    return step


def _form(
    instruction: Instruction, modifiers: Modifiers, is_sparse: bool
) -> tuple[WgmmaForm, tuple[Operand, ...]]:
    """The form, and the operands that are descriptors."""
    modifiers.expect("sync", "aligned")
    shape = next((_SHAPE.fullmatch(m) for m in instruction.modifiers if _SHAPE.fullmatch(m)), None)
    if shape is None:
        unsupported(instruction, "expected a shape m64nNkK")
    modifiers.flag(shape.group(0))
    saturate = modifiers.flag("satfinite")
    if not is_sparse and modifiers.flag("and"):
        modifiers.one_of("popc")
    btype, atype, dtype = modifiers.type(), modifiers.type(), modifiers.type()
    is_integer = atype in (*_INTEGER_TYPES, "b1")
    n, k = int(shape.group(1)), int(shape.group(2))
    _check_types(instruction, dtype, atype, btype)
    if saturate and (atype == "b1" or not is_integer):
        unsupported(instruction, ".satfinite is for integers")
    _check_shape(instruction, n, k // 2 if is_sparse else k, atype)
    d, a, b, *rest = instruction.operands
    metadata, givers = _metadata(instruction, atype) if is_sparse else (None, (0, 4))
    immediates = rest[3 if is_sparse else 1 :]
    is_a_in_registers = isinstance(a, Vector)
    values = [_immediate(instruction, operand) for operand in immediates]
    scales = values[: 0 if is_integer else 2]
    transposes = values[len(scales) :]
    expected = 0 if atype not in ("f16", "bf16") else 1 if is_a_in_registers else 2
    if len(scales) != (0 if is_integer else 2) or len(transposes) != expected:
        illegal(instruction, f"it has {len(values)} immediates")
    if any(scale not in (-1, 1) for scale in scales):
        raise IllegalInstructionError("imm-scale: expected -1 or 1", instruction.span)
    majors = [Major.MN if flag else Major.K for flag in transposes]
    registers_of_d = n // 4 if dtype == "f16" else n // 2
    form = WgmmaForm(
        n,
        k,
        dtype,
        atype,
        btype,
        _slots(instruction, d, registers_of_d),
        _slots(instruction, a, 4) if is_a_in_registers else (),
        negate_a=bool(scales) and scales[0] == -1,
        negate_b=bool(scales) and scales[1] == -1,
        a_major=majors[0] if len(majors) == 2 else Major.K,
        b_major=majors[-1] if majors else Major.K,
        saturate=saturate,
        metadata=metadata,
        givers=givers,
    )
    return form, (b,) if is_a_in_registers else (a, b)


def _metadata(instruction: Instruction, atype: str) -> tuple[int, tuple[int, int]]:
    """The slot of the metadata's register, and which lanes of every four give it (PTX ISA, "Sparse
    matrix storage": the selector of 8-bit types, to which all lanes contribute, must be 0)."""
    metadata, selector = instruction.operands[3:5]
    (slot,) = _slots(instruction, metadata, 1)
    value = _immediate(instruction, selector)
    givers = 4 if _K_BY_TYPE[atype] == 32 else 2
    if not 0 <= value < 4 // givers:
        unsupported(instruction, f"sparsity selector {value} is not 0 to {4 // givers - 1}")
    return slot, (givers * value, givers * (value + 1))


def _check_types(instruction: Instruction, dtype: str, atype: str, btype: str) -> None:
    if atype not in _K_BY_TYPE or btype not in _K_BY_TYPE:
        known = ", ".join(_FLOAT_TYPES + _INTEGER_TYPES)
        unsupported(instruction, f"types .{atype}.{btype}: expected two of {known}")
    same_family = (
        atype == btype
        or {atype, btype} <= {"e4m3", "e5m2"}
        or {atype, btype} <= set(_INTEGER_TYPES)
    )
    if not same_family or dtype not in _RESULT_TYPES[atype]:
        illegal(
            instruction,
            f'wgmma has no .{dtype}.{atype}.{btype} (PTX ISA, "wgmma.mma_async", "Data-types")',
        )


def _check_shape(instruction: Instruction, n: int, k: int, atype: str) -> None:
    """PTX ISA, "Matrix Shape": N in steps of 8; for integers 8, 16, 24 and then steps of 16."""
    allowed = n % 8 == 0 and 8 <= n <= 256
    if atype in (*_INTEGER_TYPES, "b1") and n > 24:
        allowed = allowed and n % 16 == 0
    if not allowed or k != _K_BY_TYPE[atype]:
        message = f'wgmma has no shape m64n{n}k{k} for .{atype} (PTX ISA, "wgmma", "Matrix Shape")'
        illegal(instruction, message)


def _slots(instruction: Instruction, operand: Operand, count: int) -> tuple[int, ...]:
    registers = elements(operand)
    if len(registers) != count or not all(isinstance(r, Register) for r in registers):
        illegal(instruction, f"expected {count} registers; got {len(registers)}")
    return tuple(register.slot for register in registers)


def _immediate(instruction: Instruction, operand: Operand) -> int:
    if not isinstance(operand, IntImmediate):
        illegal(instruction, f"expected an immediate; got {operand}")
    return operand.value
