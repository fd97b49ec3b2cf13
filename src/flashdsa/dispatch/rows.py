"""The rows of an operation's table: its operands, its outputs, its parameters, its gradient.

An operand's row annotates its field of the NamedTuple that an operation's tensors travel in. So
name, place and whether it may be missing are written once, and mypy sees the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch import Tensor

from flashdsa.backends.features import ANY, IntSet, OneOf
from flashdsa.dispatch import checks
from flashdsa.dispatch.overlap import require_addresses_of_its_own
from flashdsa.errors import ArgumentValueError
from flashdsa.row_formats import row_format

Dtypes = tuple[torch.dtype, ...] | Callable[[torch.dtype], tuple[torch.dtype, ...]]
Sizes = dict[str, int]
"""The value of each name in the operands' shapes."""
Rule = Callable[[str, Tensor, Sizes], None]
"""Function that raises for a wrong operand: of its name, the tensor and the sizes."""
Parameters = dict[str, Any]
"""Keyword arguments of a backend's function."""


@dataclass(frozen=True)
class Operand:
    """One tensor of an operation: the annotation of a field of the tuple that it travels in.

    Attributes:
        shape: sizes and names of sizes, as "B H 128"; one name has one value in all operands.
        pages: another shape that it may have, of names; "": none.
        dtypes: those it may have, or a function that gives them from the first operand's dtype.
        written: changed in place.
        strided: its last dimension may have gaps, as a single dimension may.
        nonempty: the message where a size other than the first is 0; without one it may be 0.
        note: follows the shape in the message about a wrong one.
        why: ends that message.
        rule: raises for what the fields above cannot say; takes the name, the tensor and the sizes.
        batched: the advice where it has a dimension more than that; its rank is looked at first.
        begins_at: elements of whose multiple its rule wants it to begin in its storage.
        among: the values that its rule takes of a size that it knows by name.
        free: names of sizes that no bound function depends on, each with the most that it takes.
        name: the field's, as in the public function, in the schema and in messages.
        optional: may be None, as the field's default.
    """

    shape: str
    dtypes: Dtypes
    pages: str = ""
    written: bool = False
    strided: bool = False
    nonempty: str = ""
    note: str = ""
    why: str = ""
    rule: Rule | None = None
    batched: str = ""
    begins_at: int = 1
    among: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    optional: bool = False

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
        checks.require_rank(self.name, tensor, (rank,), self.layout, advice)

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
            checks.require_dtype(self.name, tensor, *dtypes)
        shape, dims, numbers = tensor.shape, self.dims, self.fixed
        if len(shape) != len(dims):
            dims = self.pages.split()
            numbers = [None] * len(dims)
            if not dims or len(shape) != len(dims):
                self.require_rank(tensor)
        for fixed, dim, size in zip(numbers, dims, shape, strict=True):
            if size != (sizes.setdefault(dim, size) if fixed is None else fixed):
                expected = [
                    int(d) if d.isdecimal() else sizes.get(d, n)
                    for d, n in zip(dims, shape, strict=True)
                ]
                checks.require_shape(self.name, tensor, expected, self.layout + self.note, self.why)
        if self.nonempty and 0 in shape[1:]:
            raise ArgumentValueError(f"{self.name}: {self.nonempty.format(shape=list(shape))}")
        if tensor.device != first.device:
            checks.require_device(self.name, tensor, first.device, first_name)
        if self.rule is not None:
            self.rule(self.name, tensor, sizes)
        if not self.strided and len(shape) > 1:
            checks.require_dense_rows(self.name, tensor)
        if self.written:
            require_addresses_of_its_own(self.name, tensor)


def fold_batch(queries: str, keys: str, ids: str) -> str:
    """The advice, as of `Operand.batched`, where queries and keys have a batch."""
    return (
        f"fold the batch into S ({queries}.flatten(0, 1)) and into S_kv ({keys}.flatten(0, 1)), "
        f"and add b * S_kv to the {ids}"
    )


def _row_format(_: str, value: object) -> None:
    if value is not None:
        row_format(value)


def _float(name: str, value: object) -> None:
    if not isinstance(value, torch.SymFloat):
        checks.as_float(name, value)


_REQUIRE: Mapping[str, Callable[[str, Any], None]] = {
    "int": checks.require_positive,
    "float": _float,
    "bool": checks.require_bool,
    "ScalarType?": checks.require_dtype_or_none,
    "str": checks.require_backend,
    "str?": _row_format,
}
"""Functions by a parameter's kind: raise for a value that the schema does not take."""
_DEFAULTS = {"bool": False, "str": "auto"}
"""Values that nothing stands for, by kind; other kinds' are a parameter's own."""


@dataclass(frozen=True)
class Parameter:
    """A value that is no tensor.

    Attributes:
        name: as in the public function and in messages.
        kind: its type in the schema; an "int" is at least 1, a "str" the name of a backend,
            a "str?" that of a format of packed rows.
        default: gives the value that None, or nothing, stands for from the first operand.
        rule: raises for a wrong value; takes the name, the value and the operands.
        divides: an "int" divides this number; 0: any may be.
        passed: whether the backend's function gets it; otherwise it only tells backends apart.
        given: whether a caller gives it; otherwise the public function does.
    """

    name: str
    kind: str
    default: Callable[[Tensor], Any] | None = None
    rule: Callable[[str, Any, Any], None] | None = None
    divides: int = 0
    passed: bool = True
    given: bool = True

    def accept(self, value: Any) -> Any:
        """`value` as the schema takes it, or an ArgumentTypeError or ArgumentValueError."""
        _REQUIRE[self.kind](self.name, value)
        return value

    def filled(self, value: Any, first: Tensor) -> Any:
        """`value`, or if it is None what that stands for; accepted.

        Args:
            first: the operation's first operand.
        """
        if self.kind == "float" and self.default is None:
            value = checks.scale_or_default(value, first)
        elif value is None and self.kind in _DEFAULTS:
            value = _DEFAULTS[self.kind]
        elif value is None and self.kind in ("int", "float") and self.default is not None:
            value = self.default(first)
        return self.accept(value)

    @property
    def taken(self) -> IntSet:
        """Numbers that it may be."""
        whole = self.divides
        return OneOf(tuple(n for n in range(whole, 0, -1) if not whole % n)) if whole else ANY

    def check(self, value: Any, operands: Any) -> None:
        """Hold a value that was accepted against what else it must be."""
        if self.divides and self.divides % value:
            raise ArgumentValueError(
                f"{self.name}: expected a divisor of {self.divides}; got {value}"
            )
        if self.rule is not None:
            self.rule(self.name, value, operands)


def rows_of(kind: type[Any]) -> tuple[Operand, ...]:
    """The rows that a NamedTuple's annotations hold: `q: Annotated[Tensor, Operand(...)]`."""
    rows = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        (row,) = (x for x in hint.__metadata__ if isinstance(x, Operand))
        rows.append(replace(row, name=name, optional=name in kind._field_defaults))
    return tuple(rows)


@dataclass(frozen=True)
class Output:
    """One tensor that an operation returns.

    Attributes:
        name: as in the public function's docstring, and of the operand if the caller gives it.
        shape: as an operand's; an "int" parameter is a size, too.
        dtypes: a dtype, a function that gives it from the first operand's, or the name of the
            operand or parameter that has it; the first one that is not None counts.
        when: the parameter or the optional operand without which it has no element.
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype | str | Callable[[torch.dtype], torch.dtype], ...]
    when: str = ""

    def sizes(self, known: Mapping[str, Any]) -> list[int]:
        """Its shape where a name of `known` has a value."""
        return [int(dim) if dim.isdecimal() else known[dim] for dim in self.shape.split()]

    def dtype(self, first: torch.dtype, known: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Its dtype.

        Args:
            first: the first operand's.
            known: operands and parameters by name.
        """
        for one in self.dtypes:
            found = known.get(one) if isinstance(one, str) else one
            if isinstance(found, Tensor):
                return found.dtype
            if found is not None:
                return found if isinstance(found, torch.dtype) else found(first)
        raise KeyError(f"{self.name}: no dtype among {self.dtypes}")

    def as_operand(self, first: Operand, rule: Rule) -> Operand:
        """The row of a tensor that the caller gives for it."""

        def dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
            return (dtype if self.dtypes[0] == first.name else self.dtype(dtype),)

        row = Operand(self.shape, dtypes, written=True, rule=rule)
        return replace(row, name=self.name, optional=bool(self.when))


@dataclass(frozen=True)
class Gradient:
    """The operation that computes the gradients of another one, and how it is called.

    Attributes:
        by: its name. It returns a gradient for each operand of `of`.
        of: names of the operands that have gradients.
        arguments: gives all its arguments but the backend: from the operands, the outputs that were
            kept, the gradient of the first output and the parameters.
        keeps: names of the outputs that it needs.
    """

    by: str
    of: tuple[str, ...]
    arguments: Callable[[Any, Sequence[Tensor], Tensor, Parameters], tuple[Any, ...]]
    keeps: tuple[str, ...] = ()
