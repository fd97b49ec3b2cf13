"""Names in nested `{ }` scopes: what is declared, and which register or symbol a use means."""

from __future__ import annotations

from typing import TypeAlias

from ptxemu.syntax.ast import Operand, Register, Symbol, Vector
from ptxemu.syntax.lexer import StatementError

Named: TypeAlias = Register | Vector | Symbol
"""Meaning of a declared name: a Vector is a `.v2` or `.v4` register."""

_DIGITS = "0123456789"
_COMPONENTS = (("x", "y", "z", "w"), ("r", "g", "b", "a"))


class RegisterFile:
    """Hands out the slots of one function's registers, in the order in which they are used."""

    def __init__(self) -> None:
        self.registers: list[Register] = []

    def allocate(self, name: str, type_name: str) -> Register:
        """A new register."""
        register = Register(name, len(self.registers), type_name)
        self.registers.append(register)
        return register


class Scope:
    """One `{ }`: names are unique in it and hide those of the scopes around it."""

    __slots__ = ("_declared", "_file", "_names", "_ranges", "number", "operands", "parent")

    def __init__(self, parent: Scope | None, number: int, file: RegisterFile) -> None:
        self.parent = parent
        self.number = number
        """0 for a function's body, counted in the order in which they open; -1 for the module."""
        self.operands: dict[str, Operand] = {}
        """Operands by their text; a declaration in this scope invalidates them."""
        self._file = file
        self._names: dict[str, Named] = {}
        self._declared: dict[str, tuple[str, int]] = {}
        self._ranges: dict[str, tuple[int, str, int]] = {}

    def qualified(self, name: str) -> str:
        """The name that nothing else in the function has."""
        return name if self.number <= 0 else f"{name}@{self.number}"

    def declare_register(self, name: str, type_name: str, lanes: int) -> None:
        """`.reg .type name;` or, with lanes 2 or 4, `.reg .v2 .type name;`."""
        self._refuse_second(name)
        self._declared[name] = (type_name, lanes)
        self.operands.clear()

    def declare_range(self, prefix: str, count: int, type_name: str, lanes: int) -> None:
        """`.reg .type prefix<count>;`: prefix0 to prefix(count-1)."""
        if prefix in self._ranges:
            raise StatementError(f"{prefix}<> is declared twice in this scope")
        self._ranges[prefix] = (count, type_name, lanes)
        self.operands.clear()

    def declare_symbol(self, name: str) -> str:
        """Declare a label, variable or function; its resolved name."""
        self._refuse_second(name)
        resolved = self.qualified(name)
        self._names[name] = Symbol(resolved)
        self.operands.clear()
        return resolved

    def has(self, name: str) -> bool:
        """Whether this scope itself declares the name."""
        return name in self._names or name in self._declared

    def find(self, name: str) -> Named | None:
        """Return the meaning of the name here: the innermost scope that declares it decides."""
        scope: Scope | None = self
        while scope is not None:
            found = scope._names.get(name) or scope._materialise(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def _refuse_second(self, name: str) -> None:
        if self.has(name) or self._in_range(name):
            raise StatementError(f"{name} is declared twice in this scope")

    def _materialise(self, name: str) -> Named | None:
        """Give a declared register its slot, at the first use of its name."""
        declaration = self._declared.get(name) or self._in_range(name)
        if declaration is not None:
            type_name, lanes = declaration
            full = self.qualified(name)
            if lanes == 1:
                self._names[name] = self._file.allocate(full, type_name)
            else:
                self._names[name] = Vector(
                    tuple(
                        self._file.allocate(f"{full}.{component}", type_name)
                        for component in _COMPONENTS[0][:lanes]
                    )
                )
            return self._names[name]
        if "." in name:
            return self._component(name)
        return None

    def _component(self, name: str) -> Named | None:
        base, _, component = name.partition(".")
        whole = self._names.get(base) or self._materialise(base)
        if not isinstance(whole, Vector):
            return None
        for letters in _COMPONENTS:
            if component in letters[: len(whole.elements)]:
                register = whole.elements[letters.index(component)]
                assert isinstance(register, Register)
                return register
        return None

    def _in_range(self, name: str) -> tuple[str, int] | None:
        """The type and lanes of a register of a range; a prefix may itself end in digits."""
        shortest = len(name.rstrip(_DIGITS))
        for cut in range(shortest, len(name)):
            found = self._ranges.get(name[:cut])
            if found is None:
                continue
            digits = name[cut:]
            if (digits[0] != "0" or digits == "0") and len(digits) < 12 and int(digits) < found[0]:
                return found[1], found[2]
        return None
