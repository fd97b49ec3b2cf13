"""An operation as a table, and what follows from it: torch's schema, the checks, the `Problem`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashdsa.errors import ArgumentValueError
from flashdsa.ops.call_cache import CallCache
from flashdsa.ops.checks import (
    capability,
    dtype_name,
    require_backend,
    require_bool,
    require_dense_rows,
    require_device,
    require_dtype,
    require_dtype_or_none,
    require_positive,
    require_rank,
    require_shape,
    require_tensor,
)
from flashdsa.ops.overlap import require_addresses_of_its_own, require_apart
from flashdsa.problem import Operation, Problem

Dtypes = tuple[torch.dtype, ...] | Callable[[torch.dtype], tuple[torch.dtype, ...]]
Sizes = dict[str, int]
"""The value of each name in the operands' shapes."""
Parameters = dict[str, Any]
"""Keyword arguments of a backend's function."""


@dataclass(frozen=True)
class Operand:
    """One tensor of an operation.

    Attributes:
        name: as in the public function, in the schema and in messages.
        shape: sizes and names of sizes, as "B H 128"; one name has one value in all operands.
        dtypes: those it may have, or a function that gives them from the first operand's dtype.
        optional: may be None.
        written: changed in place.
        strided: its last dimension may have gaps.
        nonempty: the message where a size other than the first is 0; without one it may be 0.
        note: follows the shape in the message about a wrong one.
        why: ends that message.
        rule: raises for what the fields above cannot say; takes the name, the tensor and the sizes.
        batched: the advice where it has a dimension more than that; its rank is looked at first.
        begins_at: its rule wants it to begin in its storage at a multiple of so many elements.
        free: names of sizes that no bound function depends on, each with the most that it takes.
    """

    name: str
    shape: str
    dtypes: Dtypes
    optional: bool = False
    written: bool = False
    strided: bool = False
    nonempty: str = ""
    note: str = ""
    why: str = ""
    rule: Callable[[str, Tensor, Sizes], None] | None = None
    batched: str = ""
    begins_at: int = 1
    free: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def free_dims(self) -> Mapping[int, int]:
        """The dimensions of `free`, each with the most that it takes."""
        return {self.dims.index(name): most for name, most in self.free.items()}

    @cached_property
    def dims(self) -> list[str]:
        """One name or number a dimension."""
        return self.shape.split()

    @cached_property
    def fixed(self) -> list[int | None]:
        """The size of each dimension, None where it has a name."""
        return [int(dim) if dim.isdecimal() else None for dim in self.dims]

    @property
    def layout(self) -> str:
        """The shape as messages write it."""
        return f"[{', '.join(self.shape.split())}]"

    def require_rank(self, tensor: Tensor) -> None:
        """`tensor` has a dimension for each of the table's."""
        rank = len(self.shape.split())  # a first call that is compiled cannot fill a cache
        advice = f"; {self.batched}" if tensor.dim() == rank + 1 and self.batched else ""
        require_rank(self.name, tensor, (rank,), self.layout, advice)

    def check(self, tensor: Tensor, first: Tensor, first_name: str, sizes: Sizes) -> None:
        """Hold `tensor` against this row of the table; sizes seen for the first time are noted.

        Args:
            first: the operation's first operand, which says the device and the dtypes of others.
            sizes: of the operands before this one; added to.

        Raises:
            ArgumentTypeError, ArgumentValueError: says what was expected and what came.
        """
        dtypes = self.dtypes(first.dtype) if callable(self.dtypes) else self.dtypes
        if tensor.dtype not in dtypes:
            require_dtype(self.name, tensor, *dtypes)
        shape = tensor.shape
        if len(shape) != len(self.dims):
            self.require_rank(tensor)
        for fixed, dim, size in zip(self.fixed, self.dims, shape, strict=True):
            if size != (sizes.setdefault(dim, size) if fixed is None else fixed):
                expected = [
                    int(d) if d.isdecimal() else sizes.get(d, n)
                    for d, n in zip(self.dims, shape, strict=True)
                ]
                require_shape(self.name, tensor, expected, self.layout + self.note, self.why)
        if self.nonempty and 0 in shape[1:]:
            raise ArgumentValueError(f"{self.name}: {self.nonempty.format(shape=list(shape))}")
        if tensor.device != first.device:
            require_device(self.name, tensor, first.device, first_name)
        if self.rule is not None:
            self.rule(self.name, tensor, sizes)
        if not self.strided:
            require_dense_rows(self.name, tensor)
        if self.written:
            require_addresses_of_its_own(self.name, tensor)


def _positive(name: str, value: Any) -> Any:
    require_positive(name, value)
    return value


def _bool(name: str, value: Any) -> Any:
    require_bool(name, value)
    return value


def _dtype_or_none(name: str, value: Any) -> Any:
    require_dtype_or_none(name, value)
    return value


def _backend(name: str, value: Any) -> Any:
    require_backend(name, value)
    return value


_ACCEPT: Mapping[str, Callable[[str, Any], Any]] = {
    "int": _positive,
    "float": lambda _, value: value,
    "bool": _bool,
    "ScalarType?": _dtype_or_none,
    "str": _backend,
}
"""Functions by a parameter's kind: return the value that the schema takes, or raise."""


@dataclass(frozen=True)
class Parameter:
    """A value that is no tensor.

    Attributes:
        name: as in the public function and in messages.
        kind: its type in the schema; an "int" is at least 1, a "str" the name of a backend.
        default: gives the value that None stands for from the first operand.
        rule: raises for a wrong value; takes the name, the value and the operands.
        passed: whether the backend's function gets it; otherwise it only tells backends apart.
        given: whether a caller gives it; otherwise the public function does.
    """

    name: str
    kind: str
    default: Callable[[Tensor], Any] | None = None
    rule: Callable[[str, Any, Any], None] | None = None
    passed: bool = True
    given: bool = True

    def accept(self, value: Any) -> Any:
        """`value` as the schema takes it, or an ArgumentTypeError or ArgumentValueError."""
        return _ACCEPT[self.kind](self.name, value)


@dataclass(frozen=True)
class OpSpec:
    """An operation.

    Attributes:
        operation: its name. kind: the NamedTuple that its tensors travel in.
        operands: the table's rows in the order of `kind`; the first says device and dtype.
        parameters: in the order of the schema, which ends with the backend's name.
        outputs: names of the tensors that it returns.
        facts: of the `Problem`, the same for every call.
        autocast: names of the operands that torch.autocast casts.
        rule: raises for what no operand says alone; takes the operands.
        normalise: gives the operands in the table's form from tensors in any form that a caller may
            give them in, the same tuple where they are in that form.
        detached: it is computed without gradients, whatever its operands ask for.
    """

    operation: Operation
    kind: Callable[..., Any]
    operands: tuple[Operand, ...]
    parameters: tuple[Parameter, ...] = ()
    outputs: tuple[str, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)
    autocast: tuple[str, ...] = ()
    rule: Callable[[Any], None] | None = None
    normalise: Callable[[Any], Any] | None = None
    detached: bool = False

    @cached_property
    def cache(self) -> CallCache:
        """Bound functions of its calls. The checks read only the operands' types, sizes and
        strides, whether they begin where they must, and whether the written ones lie apart."""
        return CallCache(self)

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Numbers of the operands that are written."""
        return tuple(n for n, operand in enumerate(self.operands) if operand.written)

    @property
    def schema(self) -> str:
        """Schema in torch's dispatcher: "name(Tensor q, ..., str backend) -> (Tensor, Tensor)"."""
        arguments = []
        for number, operand in enumerate(self.operands):
            alias = f"({chr(ord('a') + number)}!)" if operand.written else ""
            arguments.append(f"Tensor{alias}{'?' * operand.optional} {operand.name}")
        arguments += [f"{parameter.kind} {parameter.name}" for parameter in self.parameters]
        outputs = ", ".join("Tensor" for _ in self.outputs)
        returned = outputs if len(self.outputs) == 1 else f"({outputs})"
        return f"{self.operation}({', '.join(arguments)}, str backend) -> {returned}"

    def unpack(self, arguments: Sequence[Any]) -> tuple[Any, Parameters, str]:
        """The operands' tuple, the parameters by name and the backend of a call by the schema."""
        *arguments, backend = arguments
        operands = self.kind(*arguments[: len(self.operands)])
        values = arguments[len(self.operands) :]
        return operands, self.named(values), backend

    def named(self, values: Sequence[Any]) -> Parameters:
        """The values of all parameters by name."""
        return {x.name: value for x, value in zip(self.parameters, values, strict=True)}

    def require_tensors(self, operands: Sequence[Any]) -> None:
        """Every operand is a torch.Tensor, or None where that is allowed; none has a batch."""
        for operand, value in zip(self.operands, operands, strict=True):
            if value is not None or not operand.optional:
                require_tensor(operand.name, value)
        for operand, value in zip(self.operands, operands, strict=True):
            if operand.batched:
                operand.require_rank(value)

    def require_apart(self, operands: Sequence[Any]) -> None:
        """No operand that is written shares memory with another one.

        Compiled code is not looked at: it reads its inputs before it writes to them.
        """
        if not is_dynamo_compiling() and self.written:
            require_apart([operand.name for operand in self.operands], operands, self.written)

    def normalised(self, operands: Any) -> Any:
        """The operands in the table's form, from what a caller gave.

        Raises:
            ArgumentTypeError, ArgumentValueError: one is no tensor, has no such form, or is written
                and shares memory with another.
        """
        self.require_tensors(operands)
        self.require_apart(operands)
        return operands if self.normalise is None else self.normalise(operands)

    def check(self, operands: Sequence[Any], parameters: Parameters) -> Sizes:
        """Hold a call against the table; nothing but shapes, dtypes, devices and strides is read.

        Raises:
            ArgumentTypeError, ArgumentValueError: names the argument.
        """
        sizes: Sizes = {}
        first, first_name = operands[0], self.operands[0].name
        for operand, tensor in zip(self.operands, operands, strict=True):
            if tensor is not None:
                operand.check(tensor, first, first_name, sizes)
        for parameter in self.parameters:
            value = parameter.accept(parameters[parameter.name])
            if parameter.rule is not None:
                parameter.rule(parameter.name, value, operands)
        if self.rule is not None:
            self.rule(operands)
        return sizes

    def problem(self, operands: Sequence[Any], parameters: Parameters, sizes: Sizes) -> Problem:
        """Return what a backend must support for this call, the GPU's capability included."""
        first = operands[0]
        known = {**sizes, "num_heads": sizes.get("H"), **parameters, **self.facts}
        for operand, tensor in zip(self.operands, operands, strict=True):
            if operand.optional:
                known[operand.name] = tensor is not None
            elif tensor is not first:
                known[f"{operand.name}_dtype"] = dtype_name(tensor.dtype)
        return Problem(
            self.operation,
            first.device.type,
            dtype_name(first.dtype),
            capability=capability(first.device),
            **{name: known[name] for name in _PROBLEM_FACTS if name in known},
        )

    def passed(self, operands: Sequence[Any], parameters: Parameters) -> Parameters:
        """The parameters that the backend's function takes."""
        values = {p.name: parameters[p.name] for p in self.parameters if p.passed}
        for parameter in self.parameters:
            if parameter.default is not None and values[parameter.name] is None:
                values[parameter.name] = parameter.default(operands[0])
        return values


_PROBLEM_FACTS = tuple(
    f.name for f in fields(Problem) if f.name not in ("operation", "device", "dtype", "capability")
)
"""Fields of a `Problem` that have the name of a size, a parameter or an optional operand, or of an
operand's dtype ("kv_dtype")."""
