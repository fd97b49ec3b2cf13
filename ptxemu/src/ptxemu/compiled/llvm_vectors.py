"""LLVM's types for the 32 lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir

from ptxemu.machine.lanes import VALUE, WARP_SIZE

Vector: TypeAlias = Any
"""An llvmlite value of a vector type of 32 lanes."""
Builder: TypeAlias = Any
Lower: TypeAlias = Callable[[Builder, Sequence[Vector]], Any]
"""Writer of an instruction: gives its result, or a tuple of results."""
FLOATS = ir.VectorType(ir.FloatType(), WARP_SIZE)


def bits_of_type(type_: str) -> int:
    """Bits of a value of a PTX type; 1 of a predicate."""
    return 1 if type_ == "pred" else 8 * int(VALUE[type_].itemsize)


def integers(bits: int) -> Any:
    """The LLVM type of 32 lanes of so many bits."""
    return ir.VectorType(ir.IntType(bits), WARP_SIZE)


def splat(type_: Any, value: int) -> Vector:
    """A constant in every lane."""
    return ir.Constant(type_, [value] * WARP_SIZE)


def intrinsic(builder: Builder, name: str, type_: Any, arity: int) -> Any:
    """LLVM's function of that name on operands of one type."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(type_, [type_] * arity), name=name)
    return function
