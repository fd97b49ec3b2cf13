"""The table of instructions: opcode prefixes to the functions that decode them, once, at load.

Two kinds. A *pure* instruction maps operand values to a result value and touches nothing else; its
meaning is a function on NumPy arrays of 32 lanes. A *visible* instruction does something that
another agent could notice (memory, synchronisation, control); it is decoded into a step that acts
on a warp. Decoding fails closed: a modifier that the function does not take is an error at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias, TypeVar

from ptxemu import isa
from ptxemu.errors import PtxEmuError, UnsupportedInstructionError
from ptxemu.machine.decoded import AccessStep, Decoded, PureOp, Step
from ptxemu.syntax.ast import Instruction

PureDecoder: TypeAlias = "Callable[[Instruction, Modifiers], PureOp]"
StepDecoder: TypeAlias = "Callable[[Instruction, Modifiers], Step | AccessStep]"
_Decoder = TypeVar("_Decoder", bound="Callable[[Instruction, Modifiers], Decoded]")


_DECODERS: dict[str, Callable[[Instruction, Modifiers], Decoded]] = {}


def pure(*opcodes: str) -> Callable[[PureDecoder], PureDecoder]:
    """Register a decoder of pure instructions whose opcode starts with one of `opcodes`."""
    return lambda decode: _registered(opcodes, decode)


def visible(*opcodes: str) -> Callable[[StepDecoder], StepDecoder]:
    """Register a decoder of visible instructions whose opcode starts with one of `opcodes`."""
    return lambda decode: _registered(opcodes, decode)


def _registered(opcodes: tuple[str, ...], decode: _Decoder) -> _Decoder:
    for opcode in opcodes:
        if opcode in _DECODERS:
            raise ValueError(f"{opcode} is defined twice")
        _DECODERS[opcode] = decode
    return decode


def decode(instruction: Instruction) -> Decoded:
    """Decode one instruction, by the longest opcode that its own starts with.

    Raises:
        UnsupportedInstructionError: no definition has it, or not with these modifiers.
    """
    parts = instruction.modifiers
    isa.load(parts[0])
    starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    opcode = next((start for start in starts if start in _DECODERS), None)
    if opcode is None:
        unsupported(instruction, "unknown instruction")
    modifiers = Modifiers(instruction, opcode)
    try:
        decoded = _DECODERS[opcode](instruction, modifiers)
        modifiers.done()
        return decoded
    except PtxEmuError:
        raise
    except (ValueError, IndexError) as error:  # operands that are too few, or too many
        unsupported(instruction, f"its operands do not fit: {error}")


class Modifiers:
    """The modifiers of an instruction after its opcode, taken one by one; none may be left."""

    def __init__(self, instruction: Instruction, opcode: str) -> None:
        self._instruction = instruction
        self._left = list(instruction.modifiers[opcode.count(".") + 1 :])

    def flag(self, name: str) -> bool:
        """Take `name` if it is there."""
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Take the one of `names` that is there; without it `default`, or an error if None."""
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            unsupported(self._instruction, f"expected one of .{', .'.join(names)}")
        return default

    def expect(self, *names: str) -> None:
        """Take all of these, which must be there."""
        for name in names:
            self.one_of(name)

    def type(self) -> str:
        """Take the last modifier as the instruction's type."""
        if not self._left:
            unsupported(self._instruction, "it has no type")
        return self._left.pop()

    def all_left(self) -> str:
        """Take all that are left, with the dots between them."""
        left, self._left = self._left, []
        return ".".join(left)

    def drop_hints(self) -> None:
        """Drop cache and eviction hints, which have no functional effect."""
        self._left = [
            m
            for m in self._left
            if not m.startswith(("L1::", "L2::", "evict", "level"))
            and m not in ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified")
        ]

    def done(self) -> None:
        """Fail when a modifier is left that nobody took."""
        if self._left:
            unsupported(self._instruction, f"modifier .{self._left[0]} is not known")


def unsupported(instruction: Instruction, why: str) -> NoReturn:
    """Refuse to decode."""
    raise UnsupportedInstructionError(f"{instruction.span}: {instruction.opcode}: {why}")
