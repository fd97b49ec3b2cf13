"""The abstract syntax of a PTX module: what the parser makes and everything else reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ptxemu.errors import Span


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; scoped names are resolved, `slot` is unique in the kernel."""

    name: str
    slot: int
    type: str
    """Declared type without its dot: pred, b16, b32, f32, b64, b128..."""


@dataclass(frozen=True, slots=True)
class NegatedRegister:
    """A predicate operand written `!%p`."""

    register: Register


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """%tid.x, %laneid, %cluster_ctarank..."""

    name: str


@dataclass(frozen=True, slots=True)
class IntImmediate:
    """A decimal, hexadecimal, octal or binary constant, possibly negative."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatImmediate:
    """0fXXXXXXXX, 0dXXXXXXXXXXXXXXXX or a decimal; `bits` has `width` bits (32 or 64)."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or parameter, or a label or function name.

    The name is resolved: what an inner scope declares carries the scope's number, "WAIT@3", and
    a name that both the function and the module declare means the function's.
    """

    name: str
    addend: int = 0
    """Bytes added to the address where the operand is written `symbol+8`; 0 for the rest."""


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`: the value is dropped."""


Scalar: TypeAlias = (
    Register | NegatedRegister | SpecialRegister | IntImmediate | FloatImmediate | Symbol | Sink
)


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}"""

    elements: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p, two destinations."""

    first: Scalar
    second: Scalar


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], or [map, {c0, c1, ...}] with `coordinates` for tensor copies."""

    base: Register | Symbol | IntImmediate
    offset: int = 0
    coordinates: tuple[Scalar, ...] | None = None


Operand: TypeAlias = Scalar | Vector | Pair | Address


def register_slots(operands: Iterable[Operand]) -> Iterator[int]:
    """The slots of the registers that operands name."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.slot
        elif isinstance(operand, NegatedRegister):
            yield operand.register.slot
        elif isinstance(operand, Vector):
            yield from register_slots(operand.elements)
        elif isinstance(operand, Pair):
            yield from register_slots((operand.first, operand.second))
        elif isinstance(operand, Address):
            yield from register_slots((operand.base, *(operand.coordinates or ())))


@dataclass(frozen=True, slots=True)
class Guard:
    """@%p or @!%p"""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel.

    `call` always has the operands Vector(returns), target, Vector(arguments), and a fourth one,
    the Symbol of a prototype or of a list of targets, where the text has it.
    """

    opcode: str
    """The opcode as written: "ld.shared::cta.v4.b32"."""
    modifiers: tuple[str, ...]
    """The opcode split at its dots: ("ld", "shared::cta", "v4", "b32")."""
    operands: tuple[Operand, ...]
    guard: Guard | None
    pc: int
    span: Span
    text: str
    """The instruction as written, one line, without guard."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter at byte `offset` of the parameter block."""

    name: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """Bytes of an initial value that hold the address of a symbol, known when it is placed."""

    offset: int
    size: int
    symbol: str
    addend: int = 0
    is_generic: bool = False
    """Written generic(symbol): the generic address, not the one within the symbol's space."""
    shift: int = 0
    """Bits to shift the address right by before its low `size` bytes are taken."""


@dataclass(frozen=True, slots=True)
class Prototype:
    """The signature that an indirect call goes by (`.callprototype`)."""

    returns: tuple[Parameter, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in `space` (shared, local, global, const); size 0: extern dynamic shared.

    Space param: what a function declares to pass arguments to a call and take results from it.
    """

    name: str
    space: str
    size: int
    align: int
    is_extern: bool = False
    initial: bytes | None = None
    """`size` bytes, little endian; zero where `relocations` put an address."""
    relocations: tuple[Relocation, ...] = ()
    is_managed: bool = False
    """Host and device share it (`.attribute(.managed)`)."""


@dataclass(slots=True)
class Function:
    """A kernel (.entry) or a device function (.func; body empty for a prototype)."""

    name: str
    is_entry: bool
    parameters: tuple[Parameter, ...]
    registers: tuple[Register, ...] = ()
    """The registers that instructions name, `registers[k].slot == k`; not all that are declared."""
    instructions: tuple[Instruction, ...] = ()
    labels: dict[str, int] = field(default_factory=dict)
    """Resolved (scope-qualified) label to the pc of the instruction that follows it.

    A label after the last instruction stands for the pc past it.
    """
    variables: tuple[Variable, ...] = ()
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """reqntid, maxntid, minnctapersm, maxnreg, reqnctapercluster, explicitcluster..."""
    returns: tuple[Parameter, ...] = ()
    """Results of a device function, laid out in a block of their own."""
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The labels of each `.branchtargets` list, by the list's Symbol name in `brx.idx`."""
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The functions of each `.calltargets` list, by the list's Symbol name in `call`."""
    prototypes: dict[str, Prototype] = field(default_factory=dict)
    """Each `.callprototype`, by its Symbol name in `call`."""


@dataclass(slots=True)
class Module:
    """A PTX module."""

    version: tuple[int, int]
    target: str
    address_size: int
    functions: dict[str, Function] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()
    name: str = "<ptx>"
    """Source of the text, for messages."""

    @property
    def kernels(self) -> dict[str, Function]:
        """The entry points by name."""
        return {name: f for name, f in self.functions.items() if f.is_entry}
