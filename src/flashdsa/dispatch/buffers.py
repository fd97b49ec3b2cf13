"""Calls that write their results to the caller's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch import checks
from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.overlap import require_addresses_of_its_own, require_apart
from flashdsa.dispatch.registration import call
from flashdsa.dispatch.rows import Output
from flashdsa.dispatch.spec import OpSpec
from flashdsa.dispatch.transforms import require_batch
from flashdsa.errors import UnsupportedError


class _Place(NamedTuple):
    """A result's row, and where its sizes come from.

    Attributes:
        when: number of the parameter without which it has no element; None: it always has some.
        sizes: of each dimension the number of an operand and the axis, or that of a parameter.
        is_told: whether a parameter tells a size.
        layout: the shape as messages write it.
    """

    output: Output
    when: int | None
    sizes: list[tuple[int, int | None]]
    is_told: bool
    layout: str

    def shape(self, operands: Sequence[Any], values: Sequence[Any]) -> list[int]:
        """The result's shape in a call."""
        return [values[n] if axis is None else operands[n].shape[axis] for n, axis in self.sizes]


class Total(NamedTuple):
    """A tensor of the caller's that a result is added to: its name, the result's shape, and that
    as messages write it."""

    name: str
    tensor: Tensor
    shape: Sequence[int]
    layout: str


def require_totals(
    totals: Sequence[Total], dtype: torch.dtype, spec: OpSpec, operands: Sequence[Any]
) -> None:
    """Results can be added to these: each is like its result, in memory that no operand shares.
    Totals may share theirs, as one is added to after the other.

    Args:
        operands: of the operation, which are tensors.

    Raises:
        ArgumentTypeError, ArgumentValueError: one is of another kind.
        UnsupportedError: a gradient of one is asked for, or one has no dimension of vmap's.
    """
    names, first = [operand.name for operand in spec.operands], operands[0]
    for name, tensor, shape, layout in totals:
        checks.require_tensor(name, tensor)
        checks.require_dtype(name, tensor, dtype)
        checks.require_shape(name, tensor, shape, layout)
        checks.require_device(name, tensor, first.device, names[0])
        checks.require_writable(name, tensor)
        require_addresses_of_its_own(name, tensor)
        require_apart((name, *names), (tensor, *operands), written=[0])
        require_batch(spec.operation, name, tensor, operands)


class IntoBuffers:
    """An operation and its form with buffers; the order of the one's operands in the other.

    NOTE: all that the declarations say is looked up once, since a call of a buffer takes 13 us.
    """

    def __init__(self, spec: OpSpec, into: OpSpec) -> None:
        """Look up where sizes, operands and parameters are.

        Args:
            spec: returns its results. into: `spec.with_buffers`.
        """
        self._spec, self._into = spec, into
        outputs = [output.name for output in spec.outputs]
        operands = [operand.name for operand in spec.operands]
        parameters = [parameter.name for parameter in spec.parameters]
        self._order = [
            (True, outputs.index(row.name)) if row.written else (False, operands.index(row.name))
            for row in into.operands
        ]
        self._values = [parameters.index(parameter.name) for parameter in into.parameters]
        self._numbers = [(n, x) for n, x in enumerate(spec.parameters) if x.kind == "int"]
        axes: dict[str, tuple[int, int | None]] = {}
        for number, operand in enumerate(spec.operands):
            for axis, dim in enumerate(operand.shape.split()):
                axes.setdefault(dim, (number, axis))
        self._places = []
        for output in spec.outputs:
            dims = output.shape.split()
            sizes = [axes.get(dim) or (parameters.index(dim), None) for dim in dims]
            when = parameters.index(output.when) if output.when else None
            is_told = any(axis is None for _, axis in sizes)
            self._places.append(_Place(output, when, sizes, is_told, f"[{', '.join(dims)}]"))

    def call(
        self,
        operands: Sequence[Any],
        values: tuple[Any, ...],
        buffers: Mapping[str, Tensor | None],
        backend: str,
    ) -> tuple[Tensor, ...]:
        """The results, in the caller's buffers.

        Args:
            operands, values: of the call without buffers.
            buffers: by the names of outputs that a caller may give; None: a new tensor.

        Raises:
            ArgumentTypeError, ArgumentValueError: as the call itself; or a buffer is none.
            UnsupportedError: a gradient is asked for.
        """
        spec = self._spec
        operands = spec.normalised(spec.kind(*operands))
        for number, parameter in self._numbers:
            parameter.check(parameter.accept(values[number]), operands)
        results = []
        for place in self._places:
            output, when, _, is_told, layout = place
            result = buffers.get(output.name)
            if result is None and (when is None or values[when]):
                first: Tensor = operands[0]
                dtype = output.dtype(first.dtype, {spec.operands[0].name: first})
                result = first.new_empty(place.shape(operands, values), dtype=dtype)
            elif result is not None and is_told:  # the operation takes any such size
                checks.require_tensor(output.name, result)
                checks.require_shape(output.name, result, place.shape(operands, values), layout)
            results.append(result)
        refuse_tangents(spec.operation, operands)
        if checks.wants_gradient(operands):
            raise UnsupportedError(
                f"{spec.operation}: results in the caller's buffers have no gradient; leave "
                f"{' and '.join(buffers)} away, or call under torch.no_grad()"
            )
        given = [results[n] if is_result else operands[n] for is_result, n in self._order]
        call(self._into, given, tuple([values[n] for n in self._values]), backend)
        return tuple([x for x in results if x is not None])
