"""wgmma.fence: which registers were used by others since the last one (PTX ISA, "wgmma.fence").

It is needed before the first wgmma.mma_async of a warpgroup, and between any access to a register
by a thread and a wgmma.mma_async that has the register as accumulator or fragment of A; but not
between wgmma.mma_async of one shape on the same accumulator.

A register that `mov` sets to a constant, or to what another register holds, is that constant or
that value under another name: compilers make such copies wherever they like, and ptxas assigns
hardware registers to values. So a copy counts as what it copies, and a constant as no access.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ptxemu.machine.blocks import Block
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.program import Program, StepNode
from ptxemu.syntax.ast import FloatImmediate, Instruction, IntImmediate, Register, register_slots

_PRODUCT = ("wgmma", "mma_async")


@dataclass(frozen=True, slots=True)
class _Touch:
    """Use by an instruction of a register that products use."""

    slot: int
    instruction: Instruction
    verb: str
    """Read, written or copied; a copy gives `slot` the value of `source`, a constant if None."""
    source: int | None = None


@dataclass(slots=True)
class _WarpState:
    touched: dict[int, _Touch] = field(default_factory=dict)
    """Registers that others have used since the last fence."""
    has_fenced: bool = False
    products: set[int] = field(default_factory=set)
    """The products (pcs) that were started since the last fence."""


_ByPc: TypeAlias = dict[int, list[_Touch]]


class _Rules:
    """Uses of the products' registers by a kernel's instructions."""

    def __init__(self, program: Program) -> None:
        self.names = [register.name for register in program.function.registers]
        products = [i for i in program.function.instructions if i.modifiers[:2] == _PRODUCT]
        used = {slot for product in products for slot in register_slots(product.operands[:2])}
        self.other_shapes = _other_shapes(products)
        self._touches = _touches(program, used)
        self._pcs = sorted(self._touches)
        self._between: dict[tuple[int, int], tuple[_Touch, ...] | dict[int, _Touch]] = {}

    def between(self, first_pc: int, count: int) -> tuple[_Touch, ...] | dict[int, _Touch]:
        """Return, in order, the uses by the `count` instructions from `first_pc` on; if none of
        them is a copy, return only the last use of each register, by register."""
        key = first_pc, count
        found = self._between.get(key)
        if found is None:
            pcs = self._pcs
            at, end = bisect_left(pcs, first_pc), bisect_left(pcs, first_pc + count)
            found = tuple(touch for pc in pcs[at:end] for touch in self._touches[pc])
            if not any(touch.verb == "copied" for touch in found):
                found = {touch.slot: touch for touch in found}
            self._between[key] = found
        return found

    def registers(self, first_pc: int, count: int) -> Iterator[int]:
        """The registers of products that `count` instructions from `first_pc` on use."""
        for at in range(bisect_left(self._pcs, first_pc), bisect_left(self._pcs, first_pc + count)):
            yield from (touch.slot for touch in self._touches[self._pcs[at]])


_rules: WeakKeyDictionary[Program, _Rules] = WeakKeyDictionary()
"""Rules of the kernels that were launched."""


class WgmmaFences:
    """Follows the registers of one kernel's products in every warp."""

    def __init__(self, program: Program) -> None:
        rules = _rules.get(program)
        if rules is None:
            rules = _rules[program] = _Rules(program)
        self._rules = rules
        self._warps: dict[int, _WarpState] = {}

    @classmethod
    def of(cls, program: Any) -> WgmmaFences | None:
        """None for a kernel that has no products."""
        if not isinstance(program, Program) or not any(
            i.modifiers[:2] == _PRODUCT for i in program.function.instructions
        ):
            return None
        return cls(program)

    def executed(self, warp: int, first_pc: int, count: int = 1) -> None:
        """A warp has executed `count` instructions from `first_pc` on."""
        touches = self._rules.between(first_pc, count)
        if not touches:
            return
        touched = self._state(warp).touched
        if isinstance(touches, dict):
            touched.update(touches)
            return
        for touch in touches:
            if touch.verb != "copied":
                touched[touch.slot] = touch
            elif touch.source in touched:
                touched[touch.slot] = touched[touch.source]
            else:
                touched.pop(touch.slot, None)

    def registers_used(self, first_pc: int, count: int) -> Iterator[int]:
        """The registers of products that `count` instructions from `first_pc` on use."""
        return self._rules.registers(first_pc, count)

    def fenced(self, warp: int) -> None:
        """A warp has executed wgmma.fence."""
        state = self._state(warp)
        state.has_fenced = True
        state.touched.clear()
        state.products.clear()

    def started(self, warp: int, product: Instruction, registers: Collection[int]) -> str | None:
        """A warp starts a product; returns why a fence is missing in front of it."""
        state = self._state(warp)
        why = self._missing(state, product, registers)
        state.products.add(product.pc)
        if why is not None:
            state.has_fenced = True  # told once, as if it were there now
            state.touched = {s: t for s, t in state.touched.items() if s not in set(registers)}
        return why

    def _missing(
        self, state: _WarpState, product: Instruction, registers: Collection[int]
    ) -> str | None:
        if not state.has_fenced:
            return "no wgmma.fence was executed before it"
        if not state.touched.keys().isdisjoint(registers):
            for slot in registers:
                touch = state.touched.get(slot)
                if touch is not None:
                    return (
                        f"{self._rules.names[touch.slot]} was {touch.verb} (PTX line "
                        f"{touch.instruction.span.ptx_line}) after the last wgmma.fence"
                    )
        for pc, line in self._rules.other_shapes.get(product.pc, {}).items():
            if pc in state.products:
                return (
                    f"a product of another shape (PTX line {line}) has used the same accumulator "
                    "since the last wgmma.fence"
                )
        return None

    def _state(self, warp: int) -> _WarpState:
        state = self._warps.get(warp)
        if state is None:
            state = self._warps[warp] = _WarpState()
        return state


def _touches(program: Program, used: set[int]) -> _ByPc:
    """Return the uses, by every instruction except the products, of the registers `used` and of
    those that are copied into them."""
    pure: list[tuple[Instruction, PureOp]] = []
    steps: list[Instruction] = []
    for node in program.nodes:
        if isinstance(node, Block):
            pure += node.code
        elif isinstance(node, StepNode) and node.instruction.modifiers[0] != "wgmma":
            steps.append(node.instruction)
    copies = {i.pc: pair for i, _ in pure if (pair := _copy(i)) is not None}
    followed = set(used)
    while True:
        sources = {s for d, s in copies.values() if d in followed and s is not None} - followed
        if not sources:
            break
        followed |= sources
    found: _ByPc = {}
    for instruction, op in pure:
        copy = copies.get(instruction.pc)
        if copy is not None:
            touches = [_Touch(copy[0], instruction, "copied", copy[1])]
        else:
            touches = [
                _Touch(s, instruction, "read") for s in register_slots(op.sources) if s in used
            ]
            touches += [_Touch(s, instruction, "written") for s in register_slots(op.destinations)]
        touches = [touch for touch in touches if touch.slot in followed]
        if touches:
            found[instruction.pc] = touches
    for instruction in steps:
        touches = [
            _Touch(slot, instruction, "used")
            for slot in register_slots(instruction.operands)
            if slot in followed
        ]
        if touches:
            found[instruction.pc] = touches
    return found


def _copy(instruction: Instruction) -> tuple[int, int | None] | None:
    """Destination and source of a mov between registers, or of a constant; else None."""
    if instruction.modifiers[0] != "mov" or instruction.guard is not None:
        return None
    destination, source = instruction.operands
    if not isinstance(destination, Register):
        return None
    if isinstance(source, Register):
        return destination.slot, source.slot
    if isinstance(source, IntImmediate | FloatImmediate):
        return destination.slot, None
    return None


def _other_shapes(products: list[Instruction]) -> dict[int, dict[int, int]]:
    """Return, by a product's pc, those (pc and line) with another shape and its accumulator."""
    found: dict[int, dict[int, int]] = {}
    by_form: dict[tuple[str, frozenset[int]], list[Instruction]] = {}
    for product in products:
        shape = next(m for m in product.modifiers if m.startswith("m64n"))
        by_form.setdefault((shape, frozenset(register_slots(product.operands[:1]))), []).append(
            product
        )
    for (shape, slots), group in by_form.items():
        others = {
            other.pc: other.span.ptx_line
            for (other_shape, other_slots), rest in by_form.items()
            if other_shape != shape and not slots.isdisjoint(other_slots)
            for other in rest
        }
        if others:
            found.update((product.pc, others) for product in group)
    return found
