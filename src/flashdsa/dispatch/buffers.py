"""Calls that write their results to the caller's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.checks import require_shape, require_tensor, wants_gradient
from flashdsa.dispatch.registration import call
from flashdsa.dispatch.rows import Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import UnsupportedError


def call_into(
    spec: OpSpec,
    into: OpSpec,
    operands: Sequence[Any],
    values: tuple[Any, ...],
    buffers: Mapping[str, Tensor | None],
    backend: str,
) -> tuple[Tensor, ...]:
    """The results of a call that writes them to the caller's tensors.

    Args:
        spec, operands, values: the call without buffers. into: its form with buffers.
        buffers: by the names of outputs that a caller may give; None: a new tensor.

    Raises:
        ArgumentTypeError, ArgumentValueError: as the call itself; or a buffer is none.
        UnsupportedError: a gradient is asked for.
    """
    operands = spec.normalised(spec.kind(*operands))
    parameters = spec.named(values)
    results = _buffers_for(spec, operands, parameters, buffers)
    refuse_tangents(spec.operation, operands)
    if wants_gradient(operands):
        raise UnsupportedError(
            f"{spec.operation}: results in the caller's buffers have no gradient; leave "
            f"{' and '.join(buffers)} away, or call under torch.no_grad()"
        )
    named = {operand.name: x for operand, x in zip(spec.operands, operands, strict=True)}
    given = [(results if x.written else named)[x.name] for x in into.operands]
    call(into, given, tuple(parameters[x.name] for x in into.parameters), backend)
    return tuple(x for x in results.values() if x is not None)


def _buffers_for(
    spec: OpSpec, operands: Any, parameters: Parameters, buffers: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Each output's tensor: the caller's, a new one, or None where it has no element."""
    first = operands[0]
    sizes: dict[str, Any] = {}
    for operand, tensor in zip(spec.operands, operands, strict=True):
        if tensor is not None:
            for dim, size in zip(operand.shape.split(), tensor.shape, strict=False):
                sizes.setdefault(dim, size)
    for parameter in spec.parameters:
        if parameter.kind == "int":
            sizes[parameter.name] = parameter.accept(parameters[parameter.name])
    results: dict[str, Tensor | None] = {}
    for output in spec.outputs:
        buffer = buffers.get(output.name)
        shape = output.sizes(sizes)
        if buffer is not None:
            require_tensor(output.name, buffer)
            require_shape(output.name, buffer, shape, f"[{', '.join(output.shape.split())}]")
        elif not output.when or parameters[output.when]:
            known = {**parameters, spec.operands[0].name: first}
            buffer = first.new_empty(shape, dtype=output.dtype(first.dtype, known))
        results[output.name] = buffer
    return results
