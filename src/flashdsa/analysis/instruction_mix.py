"""Machine instructions by what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from flashdsa.analysis.sass import Instruction


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
