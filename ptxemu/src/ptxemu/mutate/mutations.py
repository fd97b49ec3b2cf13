"""Mutants of a kernel: one synchronisation instruction removed or weakened, in the syntax tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ptxemu.mutate.sites import ORDERS, Site, find_sites
from ptxemu.syntax.ast import Function, Instruction, IntImmediate, Module, Operand, Register

TX_STEP = 16
"""Bytes that expect_tx is wrong by."""
REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one instruction."""

    site: Site
    name: str
    """removed, true at once, one group more, .read, relaxed, +16 bytes, -16 bytes."""
    replacement: tuple[Instruction, ...]
    new_register: Register | None = None
    """A register that `replacement` uses and the kernel lacks."""

    def apply(self, module: Module, kernel: str) -> Module:
        """The module with the mutant instead of `kernel`."""
        function = module.functions[kernel]
        pc = self.site.instruction.pc
        mutant = _spliced(function, pc, self.replacement)
        if self.new_register is not None:
            mutant.registers = (*function.registers, self.new_register)
        return replace(module, functions={**module.functions, kernel: mutant})


def mutations_of(function: Function, *, warp_syncs: bool = False) -> list[Mutation]:
    """All mutants of a kernel, in program order; `warp_syncs`: those of bar.warp.sync, too."""
    sites, new_slot = find_sites(function, warp_syncs=warp_syncs), len(function.registers)
    return [mutation for site in sites for mutation in _of_site(site, new_slot)]


def _of_site(site: Site, new_slot: int) -> Iterator[Mutation]:
    instruction = site.instruction
    if site.category == "expect-tx":
        yield from _wrong_bytes(site, new_slot)
    elif site.category == "order":
        order = next(m for m in instruction.modifiers if m in ORDERS)
        if instruction.modifiers[:3] != ("barrier", "cluster", "wait"):  # has no .relaxed
            yield Mutation(site, "relaxed", (_with_modifier(instruction, order, "relaxed"),))
    elif site.category == "mbarrier-wait":
        yield Mutation(site, "true at once", (_true(instruction),))
    else:
        yield Mutation(site, REMOVED, ())
        if site.category == "group-wait":
            yield from _weaker_group_waits(site)
        elif instruction.modifiers[:3] == ("barrier", "cluster", "arrive") and not any(
            order in instruction.modifiers for order in (*ORDERS, "relaxed")
        ):
            opcode = (*instruction.modifiers[:3], "relaxed", *instruction.modifiers[3:])
            yield Mutation(site, "relaxed", (_with_opcode(instruction, opcode),))


def _weaker_group_waits(site: Site) -> Iterator[Mutation]:
    instruction = site.instruction
    for count in instruction.operands:
        if isinstance(count, IntImmediate):
            more = _with_operands(instruction, (IntImmediate(count.value + 1),))
            yield Mutation(site, "one group more", (more,))
    modifiers = instruction.modifiers
    if "bulk" in modifiers and "read" not in modifiers:
        yield Mutation(site, ".read", (_with_opcode(instruction, (*modifiers, "read")),))


def _wrong_bytes(site: Site, new_slot: int) -> Iterator[Mutation]:
    instruction = site.instruction
    *others, count = instruction.operands
    for step in (TX_STEP, -TX_STEP):
        name = f"{step:+d} bytes"
        if isinstance(count, IntImmediate):
            wrong = IntImmediate(max(count.value + step, 0))
            yield Mutation(site, name, (_with_operands(instruction, (*others, wrong)),))
        elif isinstance(count, Register):
            register = Register("%mutant", new_slot, count.type)
            add = _made("add.s32", (register, count, IntImmediate(step)), instruction)
            yield Mutation(
                site, name, (add, _with_operands(instruction, (*others, register))), register
            )


def _true(instruction: Instruction) -> Instruction:
    """The wait's predicate is set without a wait."""
    return _made("mov.pred", (instruction.operands[0], IntImmediate(1)), instruction)


def _with_modifier(instruction: Instruction, old: str, new: str) -> Instruction:
    return _with_opcode(instruction, tuple(new if m == old else m for m in instruction.modifiers))


def _with_opcode(instruction: Instruction, modifiers: Sequence[str]) -> Instruction:
    opcode = ".".join(modifiers)
    text = instruction.text.replace(instruction.opcode, opcode, 1)
    return replace(instruction, opcode=opcode, modifiers=tuple(modifiers), text=text)


def _with_operands(instruction: Instruction, operands: tuple[Operand, ...]) -> Instruction:
    return replace(instruction, operands=operands, text=f"{instruction.text} // mutant")


def _made(opcode: str, operands: tuple[Operand, ...], place: Instruction) -> Instruction:
    """A new instruction under the guard and at the position of another one."""
    return replace(
        place,
        opcode=opcode,
        modifiers=tuple(opcode.split(".")),
        operands=operands,
        text=f"{opcode} // mutant of: {place.text}",
    )


def _spliced(function: Function, pc: int, new: Sequence[Instruction]) -> Function:
    """The function with `new` instead of the instruction at `pc`; labels follow."""
    shift = len(new) - 1
    code = [*function.instructions[:pc], *new, *function.instructions[pc + 1 :]]
    renumbered = tuple(
        one if one.pc == number else replace(one, pc=number) for number, one in enumerate(code)
    )
    labels = {name: at if at <= pc else at + shift for name, at in function.labels.items()}
    return replace(function, instructions=renumbered, labels=labels)
