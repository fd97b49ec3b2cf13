"""A kernel's register report: what the cubin says, what each role holds, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from flashdsa.hw import MAX_REGISTERS, REGISTER_STEP
from flashdsa.plan.kernel_spec import Variant
from workbench.analysis import flow
from workbench.analysis.cubin import CTA_REGISTERS, KernelRecord, registers_by_threads
from workbench.analysis.role_functions import planned_roles
from workbench.analysis.roles import WHOLE, CodeRegion, find_regions, instruction_mix
from workbench.analysis.sass import PTX_TEXT, Code, Instruction

TIGHT_SHARE = 0.9
"""Share of the budget: if more registers are live, one more variable may spill."""
LARGEST_BUDGET = MAX_REGISTERS // REGISTER_STEP * REGISTER_STEP
"""The largest setmaxnreg: a multiple of `REGISTER_STEP`."""
SPARE_STEPS = 3
"""Register steps that a role may leave unused before the report offers them to others."""


class Grade(StrEnum):
    """Grades from good to bad."""

    OK = "ok"
    TIGHT = "tight"
    SPILLS = "spills"


def grade_of(live: int, budget: int, local_accesses: int) -> Grade:
    """The risk of a role."""
    if local_accesses:
        return Grade.SPILLS
    return Grade.TIGHT if live > TIGHT_SHARE * budget else Grade.OK


class Option(NamedTuple):
    """A change, and about how many registers of a thread it frees or adds."""

    registers: int
    change: str


class Room(NamedTuple):
    """Registers of the CTA that a role could have.

    Attributes:
        free: that no role has. spare: role -> registers of a thread that it does not need, of as
            many threads. threads: of the role. by_setmaxnreg: whether its budget is.
    """

    free: int | None
    spare: Mapping[str, int]
    threads: int | None
    by_setmaxnreg: bool

    def more(self, budget: int) -> int:
        """Registers of a thread by which the budget can grow, as no role has them."""
        if not self.by_setmaxnreg or not self.threads:
            return 0
        free = (self.free or 0) // (self.threads * REGISTER_STEP) * REGISTER_STEP
        return max(0, min(free, LARGEST_BUDGET - budget))

    def options(self, budget: int) -> Iterator[Option]:
        if not self.by_setmaxnreg or not self.threads:
            return
        if more := self.more(budget):
            yield Option(more, f"raise setmaxnreg to {budget + more}, which the CTA has free")
        for role, spare in self.spare.items():
            given = min(spare // REGISTER_STEP * REGISTER_STEP, LARGEST_BUDGET - budget)
            if given > 0:
                yield Option(given, f"take {given} registers from {role}, which has {spare} left")


def advise(
    grade: Grade,
    live: int,
    budget: int,
    *,
    stack_bytes: int,
    holders: Sequence[tuple[str, str, int]],
    room: Room,
) -> str:
    """Say what to change; where a role spills, each change that helps, the most effective first.

    Args:
        holders: ("made" or "needed", line, registers of the peak), the most first; a line is known.
    """
    verbs = {"made": "makes", "needed": "needs"}
    line = "".join(
        f"; {place} {verbs[how]} {count} of the {live}" for how, place, count in holders[:1]
    )
    if grade is Grade.SPILLS:
        slots = -(-stack_bytes // 4)
        need = (
            f"{slots} values of a thread lie in local memory" if slots else "local memory is used"
        )
        options = sorted((*room.options(budget), *_fewer_values(holders)), reverse=True)
        if not options:
            return f"{need}: hold less at once (smaller tile, fewer values loaded together)"
        listed = "; ".join(f"{option.change} (about {option.registers})" for option in options)
        return f"{need}; what helps, by its effect: {listed}"
    if grade is Grade.TIGHT:
        if more := room.more(budget):
            return f"{budget - live} left: setmaxnreg could be {budget + more}{line}"
        return f"{budget - live} left: nothing to change now, but add no variable{line}"
    spare = (budget - live) // REGISTER_STEP
    if room.by_setmaxnreg and spare > SPARE_STEPS:
        return (
            f"{budget - live} left: setmaxnreg {least_budget(live)} would do, "
            "the rest could go to other roles"
        )
    return f"{budget - live} left: nothing to change"


def least_budget(live: int) -> int:
    """The smallest setmaxnreg with which a role that holds `live` is not tight."""
    return max(24, -(-round(live / TIGHT_SHARE) // REGISTER_STEP) * REGISTER_STEP)


def _fewer_values(holders: Sequence[tuple[str, str, int]]) -> Iterator[Option]:
    """Changes of the lines that hold most: a smaller tile, shorter lives."""
    for how, place, count in holders:
        if how == "made" and count > 1:
            yield Option(count // 2, f"a tile half as large at {place}, which makes {count}")
            break
    for how, place, count in holders:
        if how == "needed":
            yield Option(count, f"make the {count} values that {place} needs just before it")
            break


MOST_HOLDERS = 6
"""Lines of a role's peak that a report lists."""


@dataclass(frozen=True)
class Holder:
    """A line that made values which the peak holds.

    Attributes:
        how: "made", or "needed": what made the values has no line, and this is what reads them.
        file: "" where the cubin has no lines. registers: of the peak's. opcodes: what wrote them.
    """

    how: str
    file: str
    line: int
    registers: int
    opcodes: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The instruction at which a role holds the most."""

    address: int
    sass: str
    file: str
    line: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class RoleReport:
    """One role.

    Attributes:
        threads: None: unknown, the plan says. budget: registers of a thread, and where it is from.
        planned: the plan's budget, None: no plan.
        live: the most that hold a needed value. live_nvdisasm: the same as nvdisasm counts.
        named: the highest register that its code names, and one: what it occupies. It is no less
            than live, and says how the compiler filled the budget, not what is needed.
        found_by: which instructions are the role's.
    """

    name: str
    threads: int | None
    budget: int
    budget_from: str
    planned: int | None
    live: int
    live_nvdisasm: int
    named: int
    local_stores: int
    local_loads: int
    instructions: int
    peak: Peak
    grade: Grade
    advice: str
    found_by: str


@dataclass(frozen=True)
class KernelReport:
    """One kernel; sizes in bytes, registers of a thread.

    Attributes:
        register_limit: what the CTA's threads leave to each at launch.
        pool_used: registers of the CTA, all roles at their budgets; None: threads unknown.
        dynamic_shared_bytes: of the plan; the cubin has the static part only.
        spill_stores, spill_loads: bytes, as ptxas says; None: it was not run here.
        lines: whether lines are of the source, of the PTX, or not known.
    """

    name: str
    arch: str
    threads: int | None
    registers: int
    register_limit: int
    pool_used: int | None
    stack_bytes: int
    local_stores: int
    local_loads: int
    spill_stores: int | None
    spill_loads: int | None
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    barriers: int
    code_bytes: int
    instructions: int
    mix: dict[str, int]
    lines: str
    roles: tuple[RoleReport, ...]
    notes: tuple[str, ...]
    grade: Grade


def report_kernel(
    record: KernelRecord,
    code: Code,
    arch: str,
    ours: Variant | None = None,
    spills: tuple[int, int] | None = None,
) -> KernelReport:
    """Everything that is known of a kernel.

    Args:
        ours: its plan, for a kernel of ours. spills: bytes of stores and loads, as ptxas says.
    """
    edges = flow.successors(code)
    live = flow.live_registers(code, edges)
    limit = min(record.register_cap or MAX_REGISTERS, registers_by_threads(record.threads))
    regions = find_regions(code, edges, planned_roles(ours) if ours else ())
    whole = _Whole(
        record, code, edges, flow.predecessors(edges), live, limit, _free(record, regions)
    )
    found = [_report_role(whole, region) for region in regions]
    roles = tuple(_advised(whole, role, found) for role in found)
    own = [one for one in code.instructions if one.base != "NOP"]
    return KernelReport(
        name=record.name,
        arch=arch,
        threads=record.threads,
        registers=record.registers,
        register_limit=limit,
        pool_used=_used(record, regions),
        stack_bytes=record.stack_bytes,
        local_stores=sum(one.base == "STL" for one in own),
        local_loads=sum(one.base == "LDL" for one in own),
        spill_stores=spills[0] if spills else None,
        spill_loads=spills[1] if spills else None,
        static_shared_bytes=record.shared_bytes,
        dynamic_shared_bytes=ours.plan.smem_bytes if ours else None,
        barriers=record.barriers,
        code_bytes=record.code_bytes,
        instructions=len(own),
        mix=instruction_mix(code.instructions),
        lines=_lines_known(code),
        roles=roles,
        notes=tuple(_notes(record, code, roles)),
        grade=max((role.grade for role in roles), key=list(Grade).index),
    )


@dataclass(frozen=True)
class _Whole:
    """Data that the roles of a kernel share."""

    record: KernelRecord
    code: Code
    edges: flow.Edges
    back: flow.Edges
    live: flow.Liveness
    limit: int
    free: int | None


def _report_role(whole: _Whole, region: CodeRegion) -> RoleReport:
    code = whole.code
    inside = [code.instructions[i] for i in sorted(region.instructions)]
    at = max(sorted(region.instructions), key=lambda i: whole.live.counts[i])
    live = whole.live.counts[at]
    specialised = any(one.base == "USETMAXREG" for one in code.instructions)
    if region.registers is not None:
        budget, source = min(region.registers, MAX_REGISTERS), "setmaxnreg"
    elif specialised:
        budget, source = whole.record.registers, "launch"
    else:
        budget, source = whole.limit, "threads of the CTA"
    stores = sum(one.base == "STL" for one in inside)
    loads = sum(one.base == "LDL" for one in inside)
    touched = [one.reads | one.writes for one in inside]
    touched += [whole.live.before[i] for i in region.instructions]
    named = max(registers.bit_length() for registers in touched)
    peak = _peak(whole, at)
    grade = grade_of(live, budget, stores + loads)
    whole_threads = whole.record.threads if region.name == WHOLE else None
    threads = region.planned.role.threads if region.planned else whole_threads
    return RoleReport(
        name=region.name,
        threads=threads,
        budget=budget,
        budget_from=source,
        planned=region.planned.role.registers if region.planned else None,
        live=live,
        live_nvdisasm=max(one.live for one in inside),
        named=named,
        local_stores=stores,
        local_loads=loads,
        instructions=sum(one.base != "NOP" for one in inside),
        peak=peak,
        grade=grade,
        advice="",
        found_by=region.found_by,
    )


def _advised(whole: _Whole, role: RoleReport, roles: Sequence[RoleReport]) -> RoleReport:
    """The report with its advice, for which the other roles' registers count."""
    spare = {
        one.name: one.budget - least_budget(one.live)
        for one in roles
        if one is not role and one.threads == role.threads and one.grade is Grade.OK
    }
    holders = [
        (holder.how, _place(holder), holder.registers)
        for holder in role.peak.holders
        if holder.file
    ]
    room = Room(whole.free, spare, role.threads, role.budget_from == "setmaxnreg")
    stack = whole.record.stack_bytes
    advice = advise(
        role.grade, role.live, role.budget, stack_bytes=stack, holders=holders, room=room
    )
    return replace(role, advice=advice)


def _peak(whole: _Whole, at: int) -> Peak:
    """The peak, and which lines made what it holds: each register's nearest writer before it."""
    one = whole.code.instructions[at]
    before, after = whole.live.before[at], whole.live.after[at]
    written = whole.live.writes[at]
    if (after | written).bit_count() < before.bit_count():
        written, after = 0, before
    makers = flow.nearest(whole.code, whole.live.writes, whole.back, at, after & ~written)
    makers |= dict.fromkeys(flow.bits(written), one)
    lost = sum(1 << register for register, maker in makers.items() if not maker.line)
    reads = [instruction.reads for instruction in whole.code.instructions]
    readers = flow.nearest(whole.code, reads, whole.edges, at, lost)
    counts: Counter[tuple[str, str, int]] = Counter()
    opcodes: dict[tuple[str, str, int], Counter[str]] = {}
    for register, maker in makers.items():
        reader = readers.get(register)
        place = ("made", *_where(maker))
        if reader is not None and reader.line:
            place = ("needed", *_where(reader))
        counts[place] += 1
        opcodes.setdefault(place, Counter())[maker.base] += 1
    holders = tuple(
        Holder(*place, registers, tuple(o for o, _ in opcodes[place].most_common(3)))
        for place, registers in counts.most_common(MOST_HOLDERS)
    )
    file, line = _where(one)
    return Peak(one.address, one.text, file, line, holders)


def _where(one: Instruction) -> tuple[str, int]:
    return (one.line.file, one.line.number) if one.line else ("", 0)


def _place(holder: Holder) -> str:
    file = "PTX" if holder.file.startswith(PTX_TEXT) else Path(holder.file).name
    return f"{file}:{holder.line}"


def _lines_known(code: Code) -> str:
    files = {one.line.file for one in code.instructions if one.line}
    if not files:
        return "none"
    return "PTX" if all(file.startswith(PTX_TEXT) for file in files) else "source"


def _used(record: KernelRecord, regions: list[CodeRegion]) -> int | None:
    """Registers of the CTA with every role at its setmaxnreg."""
    planned = [region.planned for region in regions if region.planned]
    if record.threads is None:
        return None
    if any(region.registers is not None for region in regions):
        if not planned or len(planned) != len(regions):
            return None
        return sum(
            region.planned.role.threads * (region.registers or record.registers)
            for region in regions
            if region.planned
        )
    return record.threads * -(-record.registers // REGISTER_STEP) * REGISTER_STEP


def _free(record: KernelRecord, regions: list[CodeRegion]) -> int | None:
    used = _used(record, regions)
    return None if used is None else CTA_REGISTERS - used


def _notes(record: KernelRecord, code: Code, roles: tuple[RoleReport, ...]) -> list[str]:
    notes = []
    for role in roles:
        if role.planned is not None and role.planned != role.budget:
            notes.append(
                f"{role.name}: the plan says {role.planned} registers a thread, "
                f"{role.budget} is what its code has ({role.budget_from})"
            )
    if record.threads is None:
        notes.append("no .reqntid or .maxntid: the CTA's threads are the launch's")
    if code.called_from is not None:
        calls = len({t for one in code.instructions if one.base == "CALL" for t in one.targets})
        notes.append(f"{calls} called function(s): what they hold is counted at the calls")
    return notes
