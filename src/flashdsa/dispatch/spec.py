"""An operation as a table, and what follows from it: torch's schema, the checks, the `Problem`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch.compiler import is_dynamo_compiling

from flashdsa.backends.features import ANY_FORMATS, FLAGS, SIZES, Features, OneOf
from flashdsa.dispatch.call_cache import CallCache
from flashdsa.dispatch.checks import capability, dtype_name, require_tensor, require_writable
from flashdsa.dispatch.overlap import require_apart
from flashdsa.dispatch.rows import (
    Gradient,
    Operand,
    Output,
    Parameter,
    Parameters,
    Rule,
    Sizes,
    rows_of,
)
from flashdsa.problem import Problem


@dataclass(frozen=True)
class OpSpec:
    """An operation.

    Attributes:
        operation: its name.
        kind: the NamedTuple that its tensors travel in. A field's annotation holds its row, and a
            field with a default is optional; the first one says device and dtype.
        parameters: in the order of the schema, which ends with the backend's name.
        outputs: the tensors that it returns.
        cpu: "module:function" in backends/cpu/: a function of the operands and the parameters by
            keyword, which serves every call that the checks take.
        autocast: names of the operands that torch.autocast casts.
        rule: raises for what no operand says alone; takes the operands.
        normalise: gives the operands in the table's form from tensors in any form that a caller may
            give them in, the same tuple where they are in that form.
        detached: it is computed without gradients, whatever its operands ask for.
        gradient: how it is differentiated; None: not at all.
        backward_of: name of the function whose backward it is.
        sizes: gives further sizes of outputs, by name, from those of operands and the parameters.
        operands: the rows of `kind`, if its annotations do not hold them.
    """

    operation: str
    kind: type[Any]
    parameters: tuple[Parameter, ...] = ()
    outputs: tuple[Output, ...] = ()
    cpu: str = ""
    autocast: tuple[str, ...] = ()
    rule: Callable[[Any], None] | None = None
    normalise: Callable[[Any], Any] | None = None
    detached: bool = False
    gradient: Gradient | None = None
    backward_of: str = ""
    sizes: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None
    operands: tuple[Operand, ...] = ()

    def __post_init__(self) -> None:
        """Take the rows of `kind`, or hold those that are given against its fields."""
        rows = self.operands or rows_of(self.kind)
        object.__setattr__(self, "operands", rows)
        fields = [(name, name in self.kind._field_defaults) for name in self.kind._fields]
        if fields != [(row.name, row.optional) for row in rows]:
            raise TypeError(f"{self.operation}: {self.kind.__name__} has other fields than {rows}")

    def with_buffers(self, operation: str, kind: type[Any], rule: Rule, cpu: str) -> OpSpec:
        """The operation that writes its results to the caller's tensors: each output is a written
        operand behind the required ones, and a size or a choice that it tells is no parameter.

        Args:
            rule: of each output.
            cpu: the function that serves this form.
        """
        told = {name for output in self.outputs for name in (*output.shape.split(), output.when)}
        return OpSpec(
            operation,
            kind,
            operands=(
                *(operand for operand in self.operands if not operand.optional),
                *(output.as_operand(self.operands[0], rule) for output in self.outputs),
                *(operand for operand in self.operands if operand.optional),
            ),
            parameters=tuple(p for p in self.parameters if p.passed and p.name not in told),
            cpu=cpu,
            rule=self.rule,
        )

    @cached_property
    def cache(self) -> CallCache:
        """Bound functions of its calls. The checks read only the operands' types, sizes and
        strides, whether they begin where they must, and whether the written ones lie apart."""
        return CallCache(self)

    @cached_property
    def d_qk(self) -> int | None:
        """Columns of the first operand, where they have no name."""
        last = self.operands[0].dims[-1]
        return int(last) if last.isdecimal() else None

    @property
    def features(self) -> Features:
        """Everything that calls may need and the checks take, which the CPU serves."""
        rows, dtypes = self.operands, self.operands[0].dtypes
        assert isinstance(dtypes, tuple)
        names = {row.name for row in rows if row.optional} | {x.name for x in self.parameters}
        has: dict[str, Any] = {name: True for name in FLAGS if name in names}
        has |= {x.name: x.taken for x in self.parameters if x.name in SIZES}
        has |= {name: OneOf(values) for row in rows for name, values in row.among.items()}
        if self.d_qk:
            has["d_qk"] = OneOf((self.d_qk,))
        if "kv_format" in names:
            has["row_formats"] = has["mixed_formats"] = ANY_FORMATS
        has |= {"deterministic": True, "ranges": "ends" in names}
        return Features(devices=("cpu",), dtypes=tuple(map(dtype_name, dtypes)), **has)

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Numbers of the operands that are written."""
        return tuple(n for n, operand in enumerate(self.operands) if operand.written)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the outputs that its backward needs."""
        keeps = () if self.gradient is None else self.gradient.keeps
        names = [output.name for output in self.outputs]
        return tuple(names.index(name) for name in keeps)

    @cached_property
    def differentiated(self) -> tuple[int, ...]:
        """Numbers of the operands that have gradients, as its backward returns them."""
        of = () if self.gradient is None else self.gradient.of
        names = [operand.name for operand in self.operands]
        return tuple(names.index(name) for name in of)

    @property
    def schema(self) -> str:
        """Schema in torch's dispatcher: "name(Tensor q, ..., str backend) -> (Tensor, Tensor)"."""
        arguments = []
        for number, operand in enumerate(self.operands):
            alias = f"({chr(ord('a') + number)}!)" if operand.written else ""
            arguments.append(f"Tensor{alias}{'?' * operand.optional} {operand.name}")
        # An int that changes would be a graph of its own each time.
        kinds = [(x.name, "SymInt" if x.kind == "int" else x.kind) for x in self.parameters]
        arguments += [f"{kind} {name}" for name, kind in kinds]
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

    def filled(self, operands: Sequence[Any], given: Parameters) -> Parameters:
        """All parameters by name: as they are given, or what nothing stands for."""
        return {x.name: x.filled(given.get(x.name), operands[0]) for x in self.parameters}

    def require_tensors(self, operands: Sequence[Any]) -> None:
        """Every operand is a torch.Tensor, or None where that is allowed; none has a batch."""
        rows = zip(self.operands, operands, strict=True)
        given = [(row, x) for row, x in rows if x is not None or not row.optional]
        for operand, value in given:
            require_tensor(operand.name, value)
            if operand.written:
                require_writable(operand.name, value)
        for operand, value in given:
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
            parameter.check(parameter.accept(parameters[parameter.name]), operands)
        if self.rule is not None:
            self.rule(operands)
        return sizes

    def problem(self, operands: Sequence[Any], parameters: Parameters, sizes: Sizes) -> Problem:
        """Return what a backend must support for this call, the GPU's capability included."""
        first = operands[0]
        known = {"d_qk": self.d_qk, **sizes, "num_heads": sizes.get("H"), **parameters}
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

    def results(self, operands: Sequence[Any], parameters: Parameters, sizes: Sizes) -> Any:
        """Uninitialised results of a call that `check` took, as the schema returns them.

        Args:
            sizes: what `check` returned.
        """
        first = operands[0]
        named = {x.name: value for x, value in zip(self.operands, operands, strict=True)}
        known = {**named, **parameters}
        measures = {**sizes, **parameters}
        if self.sizes is not None:
            measures.update(self.sizes(measures))
        results = []
        for output in self.outputs:
            given = known[output.when] if output.when else True
            there = given is not None and given is not False
            shape = output.sizes(measures) if there else [0]
            results.append(first.new_empty(shape, dtype=output.dtype(first.dtype, known)))
        return results[0] if len(results) == 1 else tuple(results) or None

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
