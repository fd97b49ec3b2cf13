"""Locations of a kernel's variables and parameters: shared offsets, parameter and constant
windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.memory.address import (
    CODE_WINDOW,
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_WINDOW,
)
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.syntax.ast import Function, Module, SpecialRegister, Variable

_FUNCTION_BYTES = 128


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class Layout:
    """Offsets of one kernel of a module for a launch with `dynamic_shared_bytes`.

    Static shared variables come first, in order; extern ones share the dynamic part after them.
    Module-level variables that outlive launches are `placed`: they have addresses by name, and
    their memory is the caller's to register.
    """

    def __init__(
        self,
        module: Module,
        function: Function,
        dynamic_shared_bytes: int,
        placed: Mapping[str, int] | None = None,
    ) -> None:
        self.shared_offsets: dict[str, int] = {}
        self._addresses: dict[str, int] = dict(placed or {})
        self.constants: list[tuple[Variable, int]] = []
        """Module-level .const and .global variables that are not placed, with their addresses."""
        shared = [v for v in (*module.variables, *function.variables) if v.space == "shared"]
        offset = 0
        for variable in (v for v in shared if not v.is_extern):
            offset = _align(offset, variable.align)
            self.shared_offsets[variable.name] = offset
            offset += variable.size
        externs = [v for v in shared if v.is_extern]
        if externs:
            offset = _align(offset, max(v.align for v in externs))
        for variable in externs:
            self.shared_offsets[variable.name] = offset
        self.static_shared_bytes = offset
        self.shared_bytes = offset + dynamic_shared_bytes
        """All shared memory of a CTA."""
        self.uses_reserved_shared = any(
            isinstance(operand, SpecialRegister)
            and operand.name.startswith("%reserved_smem_offset_")
            for instruction in function.instructions
            for operand in instruction.operands
        )
        """The kernel may access the part of shared memory that is reserved for the system."""
        unplaced = (
            v
            for v in module.variables
            if v.space in ("const", "global") and v.name not in self._addresses
        )
        self._place(CONST_WINDOW, unplaced)
        self.local_bytes = self._place(
            LOCAL_WINDOW, (v for v in function.variables if v.space == "local")
        )
        for number, name in enumerate(module.functions):
            self._addresses[name] = CODE_WINDOW + _FUNCTION_BYTES * number
        for parameter in function.parameters:
            self._addresses[parameter.name] = PARAM_WINDOW + parameter.offset

    def _place(self, window: int, variables: Iterable[Variable]) -> int:
        offset = 0
        for variable in variables:
            offset = _align(offset, variable.align)
            self._addresses[variable.name] = window + offset
            if window == CONST_WINDOW:
                self.constants.append((variable, window + offset))
            offset += variable.size
        return offset

    def initial_bytes(self, variable: Variable) -> bytes:
        """Return the initial bytes of a variable, with the addresses of other symbols filled in."""
        data = bytearray(variable.initial or b"")
        for place in variable.relocations:
            if place.symbol in self.shared_offsets:
                address = SHARED_BASE + self.shared_offsets[place.symbol]
                address += SHARED_WINDOW if place.is_generic else 0
            else:
                address = self.symbol_address(place.symbol)
            value = (address + place.addend) >> place.shift
            low = value & ((1 << (8 * place.size)) - 1)
            data[place.offset : place.offset + place.size] = low.to_bytes(place.size, "little")
        return bytes(data)

    def register(self, memory: GlobalMemory, parameters: bytes) -> None:
        """Put the parameters and the constants into the launch's memory."""
        block = np.frombuffer(bytearray(parameters), dtype=np.uint8)
        if len(block):
            memory.register(block, "kernel parameters", base=PARAM_WINDOW, writable=False)
        for variable, address in self.constants:
            initial = self.initial_bytes(variable)
            data = np.zeros(max(variable.size, 1), dtype=np.uint8)
            data[: len(initial)] = np.frombuffer(initial, dtype=np.uint8)
            memory.register(data, variable.name, base=address)

    def symbol_address(self, name: str) -> int:
        """Generic address of a parameter, constant, global or local variable."""
        address = self._addresses.get(name)
        if address is None:
            raise ExecutionError(f"symbol {name} has no address")
        return address
