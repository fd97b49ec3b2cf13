"""Writes the Python source of a block: one call per instruction on registers in local variables.

Within a block a register is a set of *forms*: variables that hold the same bits viewed as different
NumPy types. A result keeps the type that its instruction gave it until another one is asked for, a
move only gives a set a second name, and registers go back to the warp at the end. Lanes that are
not active are computed like the others and left out then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from types import CodeType
from typing import Any

import numpy as np

from ptxemu.machine.decoded import PureOp, identity
from ptxemu.machine.lanes import STORAGE, VALUE, Mask
from ptxemu.machine.operands import convert, immediate_lanes
from ptxemu.machine.special_registers import special
from ptxemu.numerics.canonical import bits_of_f16, bits_of_f32
from ptxemu.syntax import ast

BlockFunction = Callable[[Any, Mask], None]
_BITS = {"float32": bits_of_f32, "float16": bits_of_f16}
Forms = dict[str, str]
"""Variables by the name of their NumPy type; all of the register's width."""


def compile_block(
    code: Sequence[tuple[ast.Instruction, PureOp]], temporaries: frozenset[int], *, masked: bool
) -> BlockFunction:
    """A function that executes `code` on a warp; if masked, with the lanes of its mask only.

    Registers in the slots of `temporaries` are not given back to the warp.
    """
    generator = _Generator(masked=masked)
    for number, (instruction, op) in enumerate(code):
        generator.emit(number, instruction, op)
    return generator.finish(f"<block {code[0][0].pc}>", temporaries)


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Its name; NumPy takes long to make one up."""
    return dtype.name


@lru_cache(1000)
def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec")


class _Generator:
    """The source of one block function in the making."""

    def __init__(self, *, masked: bool) -> None:
        self._masked = masked
        self._lines: list[str] = []
        self._names: dict[str, Any] = {
            "where": np.where,
            "putmask": np.putmask,
            "convert": convert,
            "special": special,
            "full": np.full,
        }
        self._forms: dict[int, Forms] = {}
        self._narrowed: dict[tuple[str, str], str] = {}
        """Variables with the low bits of a variable, by it and the type."""
        self._constants: dict[tuple[ast.IntImmediate | ast.FloatImmediate, str], str] = {}
        self._written: dict[int, ast.Register] = {}
        self._num_variables = 0

    def emit(self, number: int, instruction: ast.Instruction, op: PureOp) -> None:
        """Write one instruction."""
        if op.function is identity and instruction.guard is None and self._rename(op):
            return
        if instruction.modifiers[0] == "cvt":  # which may keep a NaN's payload
            self._settle(operand for operand in op.sources if isinstance(operand, ast.Register))
        arguments = [
            self._source(operand, type_)
            for operand, type_ in zip(op.sources, op.source_types, strict=True)
        ]
        if op.function is identity:
            results = arguments
        else:
            self._names[f"f{number}"] = op.function
            results = [self._variable() for _ in op.destinations]
            self._lines.append(f"{', '.join(results)} = f{number}({', '.join(arguments)})")
        for destination, type_, result in zip(
            op.destinations, op.result_types, results, strict=True
        ):
            if isinstance(destination, ast.Register):
                self._store(destination, type_, result, instruction.guard)
            elif not isinstance(destination, ast.Sink):
                raise TypeError(f"{instruction.span}: {destination} is no destination")

    def finish(self, name: str, temporaries: frozenset[int]) -> BlockFunction:
        """Write the registers back, except for temporaries, and compile."""
        for slot, register in sorted(self._written.items()):
            if slot in temporaries:
                continue
            value = self._form(register, STORAGE[register.type])
            if self._masked:
                value = self._merged("m", value, f"R[{slot}]", register)
            self._lines.append(f"R[{slot}] = {value}")
        body = "\n    ".join(["R = warp.registers", *self._lines])
        source = f"def block(warp, m):\n    {body}\n"
        exec(_compiled(source, name), self._names)
        function: BlockFunction = self._names["block"]
        return function

    def _variable(self) -> str:
        self._num_variables += 1
        return f"v{self._num_variables}"

    def _assign(self, expression: str) -> str:
        variable = self._variable()
        self._lines.append(f"{variable} = {expression}")
        return variable

    def _dtype(self, dtype: np.dtype[Any]) -> str:
        name = f"d_{name_of(dtype)}"
        self._names[name] = dtype
        return name

    def _rename(self, op: PureOp) -> bool:
        """A move between registers of one type: the destination gets the source's forms."""
        destination, source = op.destinations[0], op.sources[0]
        if not isinstance(destination, ast.Register) or not isinstance(source, ast.Register):
            return False
        if STORAGE[destination.type] != STORAGE[source.type]:
            return False
        self._load(source)
        self._forms[destination.slot] = dict(self._forms[source.slot])
        self._written[destination.slot] = destination
        return True

    def _load(self, register: ast.Register) -> Forms:
        forms = self._forms.get(register.slot)
        if forms is None:
            loaded = self._assign(f"R[{register.slot}]")
            forms = self._forms[register.slot] = {name_of(STORAGE[register.type]): loaded}
        return forms

    def _form(self, register: ast.Register, dtype: np.dtype[Any]) -> str:
        """The variable that holds a register viewed as a type of its width."""
        forms = self._load(register)
        if name_of(dtype) in forms:
            return forms[name_of(dtype)]
        storage = STORAGE[register.type]
        if name_of(storage) not in forms:
            value, some = next(iter(forms.items()))
            forms[name_of(storage)] = self._bits(value, some, storage)
        if name_of(dtype) not in forms:
            forms[name_of(dtype)] = self._assign(
                f"{forms[name_of(storage)]}.view({self._dtype(dtype)})"
            )
        return forms[name_of(dtype)]

    def _settle(self, registers: Iterable[ast.Register]) -> None:
        """Forget the float forms of results: their NaN are not the canonical ones."""
        for register in registers:
            storage = STORAGE[register.type]
            if name_of(storage) not in self._load(register):
                self._forms[register.slot] = {name_of(storage): self._form(register, storage)}

    def _bits(self, value: str, variable: str, storage: np.dtype[Any]) -> str:
        """A result's bits. INVARIANT: a float form without them is a result, whose NaN are not yet
        the canonical ones; with them it is a view, whose NaN are data."""
        function = _BITS.get(value)
        if function is not None:
            self._names[function.__name__] = function
            return self._assign(f"{function.__name__}({variable})")
        return self._assign(f"{variable}.view({self._dtype(storage)})")

    def _store(
        self, register: ast.Register, type_: str, result: str, guard: ast.Guard | None
    ) -> None:
        value, storage = VALUE[type_], STORAGE[register.type]
        if value.itemsize != storage.itemsize:  # a narrower one is extended by its own sign
            result, value = self._assign(f"{result}.astype({self._dtype(storage)})"), storage
        if guard is not None:
            forms = self._load(register)
            if value != storage and (name_of(value) not in forms or name_of(storage) in forms):
                result, value = self._bits(name_of(value), result, storage), storage
            condition = self._form(guard.register, np.dtype(np.bool_))
            condition = f"~{condition}" if guard.negated else condition
            result = self._merged(condition, result, self._form(register, value), register)
        self._forms[register.slot] = {name_of(value): result}
        self._written[register.slot] = register

    def _merged(self, condition: str, new: str, old: str, register: ast.Register) -> str:
        if register.type == "b128":
            return self._assign(f"where(({condition})[:, None], {new}, {old})")
        merged = self._assign(f"{old}.copy()")
        self._lines.append(f"putmask({merged}, {condition}, {new})")
        return merged

    def _source(self, operand: ast.Scalar, type_: str) -> str:
        if isinstance(operand, ast.Register):
            return self._viewed(operand, type_)
        if isinstance(operand, ast.NegatedRegister):
            return self._assign(f"~{self._form(operand.register, np.dtype(np.bool_))}")
        if isinstance(operand, ast.IntImmediate | ast.FloatImmediate):
            return self._constant(operand, type_)
        if isinstance(operand, ast.SpecialRegister):
            return self._assign(f"convert(special(warp, {operand.name!r}), {type_!r})")
        if isinstance(operand, ast.Symbol):
            symbol = f"warp.symbol_address({operand.name!r}) + {operand.addend}"
            return self._assign(f"convert(full(32, {symbol}, 'uint64'), {type_!r})")
        raise TypeError(f"{operand} is no source")

    def _constant(self, operand: ast.IntImmediate | ast.FloatImmediate, type_: str) -> str:
        key = (operand, type_)
        if key not in self._constants:
            lanes = immediate_lanes(operand, type_)
            lanes.flags.writeable = False
            name = self._constants[key] = f"k{len(self._constants)}"
            self._names[name] = lanes
        return self._constants[key]

    def _viewed(self, register: ast.Register, type_: str) -> str:
        value, storage = VALUE[type_], STORAGE[register.type]
        if value.itemsize == storage.itemsize and (value == np.bool_) == (storage == np.bool_):
            return self._form(register, value)
        whole = self._form(register, storage)
        key = (whole, type_)
        if key not in self._narrowed:
            self._narrowed[key] = self._assign(f"convert({whole}, {type_!r})")
        return self._narrowed[key]
