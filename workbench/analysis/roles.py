"""Instructions of each role of a warp-specialised kernel.

- A kernel whose plan names roles: a role is what is reached only through the first instruction that
  leads to (nearly) all memory accesses and waits of the functions that only this role runs, and to
  no other role's.
- Else a kernel with setmaxnreg: from each USETMAXREG on, up to the next.
- Else the whole kernel is one role.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from workbench.analysis.flow import Edges, common_dominator, dominated, dominators, reach
from workbench.analysis.role_functions import Lines, RoleLines
from workbench.analysis.sass import Code, Instruction


class Kind(StrEnum):
    """Classes of the instruction mix, in the order of reports."""

    TENSOR = "tensor core"
    TENSOR_MEMORY = "tensor memory"
    BULK = "TMA and bulk copies"
    GLOBAL = "global memory"
    SHARED = "shared memory"
    LOCAL = "local memory"
    SYNC = "synchronisation"
    FP32 = "floating point"
    CONVERSION = "conversions"
    INTEGER = "integer and logic"
    MOVE = "moves and constants"
    UNIFORM = "uniform datapath"
    CONTROL = "control flow"
    OTHER = "other"


_BASES: dict[Kind, str] = {
    Kind.TENSOR: "HGMMA QGMMA IGMMA BGMMA HMMA QMMA IMMA DMMA BMMA OMMA UTCHMMA UTCQMMA UTCIMMA "
    "UTCOMMA UTCMXQMMA WARPGROUP",
    Kind.TENSOR_MEMORY: "LDTM STTM UTCCP UTCSHIFT UTCATOMSWS UTCBAR LDT STT",
    Kind.BULK: "UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UBLKPF UTMACCTL UTMACMDFLUSH "
    "UTMALST UGETNEXTWORKID",
    Kind.GLOBAL: "LDG STG LD ST LDGSTS RED REDG ATOM ATOMG CCTL CCTLL CCTLT LDGDEPBAR LDGMC "
    "SULD SUST TEX TLD TLD4",
    Kind.SHARED: "LDS STS LDSM STSM ATOMS STAS REDAS MOVM ARRIVES",
    Kind.LOCAL: "LDL STL",
    Kind.SYNC: "SYNCS BAR MEMBAR FENCE DEPBAR ERRBAR CGAERRBAR UCGABAR_WAIT UCGABAR_ARV WARPSYNC "
    "NANOSLEEP ELECT ACQBULK USETMAXREG UVIRTCOUNT",
    Kind.FP32: "FADD FADD2 FMUL FMUL2 FFMA FFMA2 FMNMX FMNMX3 FSEL FSET FSETP FCHK FSWZADD MUFU "
    "HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2 FHADD FHFMA DADD DMUL DFMA DSETP DMNMX",
    Kind.CONVERSION: "F2F F2I F2FP I2F I2FP I2I I2IP FRND F2IP",
    Kind.INTEGER: "IADD IADD3 IMAD IMUL IMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 IABS IDP ISETP ISCADD "
    "LEA LOP LOP3 PLOP3 SHF SHL SHR SEL PRMT BMSK SGXT BREV FLO POPC VOTE MATCH REDUX CREDUX "
    "SHFL VABSDIFF VABSDIFF4 P2R R2P PSETP LEPC IDE",
    Kind.MOVE: "MOV LDC S2R S2UR R2UR R2B B2R NOP UP2UR",
    Kind.CONTROL: "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK BMOV BPT YIELD KILL PREEXIT "
    "RPCMOV ENDCOLLECTIVE",
}
_KINDS = {base: kind for kind, bases in _BASES.items() for base in bases.split()}
_MOVING = frozenset({"IMAD.MOV", "IMAD.U32"})
"""Moves that are spelt as arithmetic."""
SIDE_EFFECTS = frozenset(
    {Kind.TENSOR, Kind.TENSOR_MEMORY, Kind.BULK, Kind.GLOBAL, Kind.SHARED, Kind.SYNC}
)
"""Kinds that the compiler does not move in front of the branch to a role."""


def kind_of(instruction: Instruction) -> Kind:
    """The class of an instruction; OTHER where this table does not know the opcode."""
    if instruction.base == "CS2R":
        return Kind.MOVE  # mostly a pair of registers set to zero
    if any(instruction.opcode.startswith(spelt) for spelt in _MOVING):
        return Kind.MOVE
    known = _KINDS.get(instruction.base)
    if known:
        return known
    uniform = instruction.base.startswith("U") or instruction.base == "VOTEU"
    return Kind.UNIFORM if uniform else Kind.OTHER


def instruction_mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Counts of the classes that occur. Padding behind the code (NOP) does not count."""
    counts = Counter(kind_of(one) for one in instructions if one.base != "NOP")
    return {kind.value: counts[kind] for kind in Kind if counts[kind]}


WHOLE = "whole kernel"
BEFORE = "before setmaxnreg"
MOST = 0.9
"""Share of a role's acting instructions whose common dominator is the role's first instruction.
The compiler gives a few instructions, mostly waits, the line of another role."""


@dataclass(frozen=True)
class CodeRegion:
    """A role's instructions, as indices.

    Attributes:
        registers: that its setmaxnreg asks for; None: it keeps those of the launch.
        planned: of the plan. found_by: how the region was found, for people.
    """

    name: str
    instructions: frozenset[int]
    registers: int | None
    found_by: str
    planned: RoleLines | None = None


def find_regions(code: Code, edges: Edges, planned: tuple[RoleLines, ...] = ()) -> list[CodeRegion]:
    """Return the roles of a kernel. A plan without line information counts as no plan."""
    if planned and any(one.line for one in code.instructions):
        regions = _planned_regions(code, edges, planned)
        if regions:
            return regions
    return _setmaxnreg_regions(code, edges)


def setmaxnreg(instruction: Instruction) -> int | None:
    """The registers that a USETMAXREG asks for; None for other instructions."""
    found = re.search(r"(0x[0-9a-f]+|\d+)$", instruction.text)
    return int(found.group(1), 0) if instruction.base == "USETMAXREG" and found else None


def _own(code: Code) -> int:
    """Return the number of the kernel's own instructions; called functions lie after them."""
    return len(code.instructions) if code.called_from is None else code.called_from


def _setmaxnreg_regions(code: Code, edges: Edges) -> list[CodeRegion]:
    changes = {
        index: registers
        for index, one in enumerate(code.instructions)
        if (registers := setmaxnreg(one)) is not None
    }
    if not changes:
        every = reach(edges, [0])
        return [
            CodeRegion(WHOLE, frozenset(every), None, "no setmaxnreg, no plan with line numbers")
        ]
    first = reach(edges, [0], frozenset(changes))
    regions = [CodeRegion(BEFORE, frozenset(first), None, "reached without a setmaxnreg")]
    for index, registers in changes.items():
        others = frozenset(c for c in changes if c != index)
        inside = reach(edges, edges[index], others) | {index}
        address = f"{code.instructions[index].address:#x}"
        name = f"setmaxnreg {registers} @{address}"
        found_by = f"reached from {address} without another setmaxnreg"
        regions.append(CodeRegion(name, frozenset(inside), registers, found_by))
    return regions


def _planned_regions(
    code: Code, edges: Edges, planned: tuple[RoleLines, ...]
) -> list[CodeRegion] | None:
    above = dominators(edges)
    roots: dict[str, int] = {}
    for role in planned:
        root = common_dominator(_seeds(code, role.lines), above, MOST)
        if root is not None:
            roots[role.role.name] = root
    roots = _first_of_their_own(roots, above)
    inside = {name: dominated(root, above) for name, root in roots.items()}
    regions = []
    for role in planned:
        name = role.role.name
        if name not in roots:
            continue
        mine = inside[name]
        nested = [o for o in roots if o != name and roots[o] in mine and roots[o] != roots[name]]
        for other in nested:
            mine = mine - inside[other]
        found_by = f"reached only through {code.instructions[roots[name]].address:#x}"
        if roots[name] == 0:
            mine = {i for i in range(_own(code)) if _comes_from(code.instructions[i], role.lines)}
            found_by = "instructions of its source lines only"
        registers = _registers_of(code, mine, roots[name], above)
        regions.append(CodeRegion(name, frozenset(mine), registers, found_by, role))
    return regions or None


def _first_of_their_own(roots: dict[str, int], above: list[int]) -> dict[str, int]:
    """Each role's way in moved up to the first instruction that leads to no other role."""
    ways = {name: {root, *_ancestors(root, above)} for name, root in roots.items()}
    moved = {}
    for name, root in roots.items():
        others = set().union(*(way for other, way in ways.items() if other != name))
        at = root
        while at != 0 and above[at] not in others:
            at = above[at]
        moved[name] = at
    return moved


def _ancestors(node: int, above: list[int]) -> list[int]:
    found = []
    while node != 0:
        node = above[node]
        found.append(node)
    return found


def _seeds(code: Code, lines: tuple[Lines, ...]) -> list[int]:
    mine = [i for i in range(_own(code)) if _comes_from(code.instructions[i], lines)]
    acting = [i for i in mine if kind_of(code.instructions[i]) in SIDE_EFFECTS]
    return acting or mine


def _registers_of(code: Code, inside: set[int], root: int, above: list[int]) -> int | None:
    """The setmaxnreg of a role: the last inside it, else the nearest that leads to it."""
    asked = [n for i in sorted(inside) if (n := setmaxnreg(code.instructions[i])) is not None]
    if asked:
        return asked[-1]
    above_it = (setmaxnreg(code.instructions[at]) for at in _ancestors(root, above))
    return next((registers for registers in above_it if registers is not None), None)


def _comes_from(instruction: Instruction, lines: tuple[Lines, ...]) -> bool:
    line = instruction.line
    return line is not None and any(
        line.file == own.file and own.first <= line.number <= own.last for own in lines
    )
