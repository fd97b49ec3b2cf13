"""Synchronisation sites of a kernel, by category, and mutants: one removed or weakened.

Left alone: griddepcontrol (it orders grids, and one grid runs here), barrier.red (its result would
have to be invented), and bar.warp.sync unless it is asked for (without `Policy.lanes_apart` the
lanes of a warp run in step here).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ptxemu.syntax.ast import Function, Instruction, IntImmediate, Module, Operand, Register

CATEGORIES = {
    "proxy-fence": "fence.proxy.*",
    "init-fence": "fence.mbarrier_init",
    "memory-fence": "fence and membar at a scope",
    "tcgen05-fence": "tcgen05.fence::before_thread_sync and ::after_thread_sync",
    "wgmma-fence": "wgmma.fence",
    "mbarrier-wait": "mbarrier.try_wait and test_wait",
    "group-wait": "wait_group and wait_all of cp.async, bulk copies and wgmma",
    "tcgen05-wait": "tcgen05.wait::ld and ::st",
    "commit": "commit_group and tcgen05.commit",
    "barrier": "bar and barrier of a CTA",
    "cluster-barrier": "barrier.cluster.arrive and wait",
    "arrive": "arrivals on mbarriers",
    "expect-tx": "byte counts of expect_tx",
    "order": ".acquire, .release and .acq_rel of accesses, arrivals and waits",
}
"""The categories of mutants, with what each is about."""
WARP_SYNC = "warp-sync"
"""bar.warp.sync; a category of its own, for kernels whose warps' lanes are run apart."""
ORDERS = ("acquire", "release", "acq_rel")


@dataclass(frozen=True, slots=True)
class Site:
    """One synchronisation instruction of a kernel."""

    category: str
    instruction: Instruction
    number: int
    """Number among those of its category, from 1: unlike lines it stays when other code changes."""

    @property
    def name(self) -> str:
        """Name for lists of equivalent mutants: "barrier#3"."""
        return f"{self.category}#{self.number}"

    @property
    def line(self) -> int:
        """Its PTX line."""
        return self.instruction.span.ptx_line


def find_sites(function: Function, *, warp_syncs: bool = False) -> list[Site]:
    """The sites of a kernel in program order; an arrive.expect_tx is a site of two categories.

    `warp_syncs`: WARP_SYNC, too.
    """
    sites: list[Site] = []
    counts: Counter[str] = Counter()
    for instruction in function.instructions:
        categories = categories_of(instruction)
        if warp_syncs and instruction.modifiers[:2] in (("bar", "warp"), ("barrier", "warp")):
            categories = [WARP_SYNC]
        for category in categories:
            counts[category] += 1
            sites.append(Site(category, instruction, counts[category]))
    return sites


def categories_of(instruction: Instruction) -> list[str]:
    """The categories that an instruction belongs to."""
    name, *modifiers = instruction.modifiers
    found = [_category(name, modifiers)]
    if name == "mbarrier" and "expect_tx" in modifiers:
        found.append("expect-tx")
    if name not in ("fence", "membar") and any(order in modifiers for order in ORDERS):
        found.append("order")
    return [category for category in found if category is not None]


def _category(name: str, modifiers: list[str]) -> str | None:
    first = modifiers[0] if modifiers else ""
    if name in ("fence", "membar"):
        named = {"proxy": "proxy-fence", "mbarrier_init": "init-fence"}
        return named.get(first, "memory-fence")
    if name == "tcgen05":
        kind = first.split("::")[0]
        return {"fence": "tcgen05-fence", "wait": "tcgen05-wait", "commit": "commit"}.get(kind)
    if name == "wgmma":
        named = {"fence": "wgmma-fence", "commit_group": "commit", "wait_group": "group-wait"}
        return named.get(first)
    if name == "cp":
        if "commit_group" in modifiers:
            return "commit"
        if "wait_group" in modifiers or "wait_all" in modifiers:
            return "group-wait"
        return "arrive" if "mbarrier" in modifiers else None
    if name == "mbarrier":
        named = {"try_wait": "mbarrier-wait", "test_wait": "mbarrier-wait"}
        named |= {"arrive": "arrive", "arrive_drop": "arrive"}
        return named.get(first)
    return _barrier_category(name, modifiers)


def _barrier_category(name: str, modifiers: list[str]) -> str | None:
    if name not in ("bar", "barrier") or "warp" in modifiers or "red" in modifiers:
        return None
    return "cluster-barrier" if "cluster" in modifiers else "barrier"


# Mutants of a kernel: one synchronisation instruction removed or weakened, in the syntax tree.

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
