"""The custom ops flashdsa::*, each registered from its table; what every call passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashdsa.backends.catalog import registry
from flashdsa.ops import indexer_launch
from flashdsa.ops.autograd import register_gradients
from flashdsa.ops.fakes import FAKES
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.table import DSA_TOPK_INDEXER, OPERATIONS

# NOTE: of a call `torch.library.custom_op` takes 14 us (57 on a busy machine), a definition 3.
_library = torch.library.Library("flashdsa", "FRAGMENT")


def custom_op(spec: OpSpec) -> torch._ops.OpOverload:
    """The operation as torch's dispatcher has it: operands, parameters, backend in a row."""
    overload: torch._ops.OpOverload = getattr(torch.ops.flashdsa, spec.operation).default
    return overload


def call(spec: OpSpec, operands: Sequence[Any], backend: str, **parameters: Any) -> Any:
    """The operation through torch's dispatcher, from a public function.

    Args:
        operands: the tuple of `spec.kind`; what is in it is checked.
        parameters: all that the operation has.
    """
    spec.require_tensors(operands)
    values = [parameter.accept(parameters[parameter.name]) for parameter in spec.parameters]
    return custom_op(spec)(*operands, *values, backend)


def serve(spec: OpSpec, arguments: Sequence[Any]) -> Any:
    """Check a call by the operation's schema, choose a backend and have it compute the results."""
    operands, parameters, backend = spec.unpack(arguments)
    sizes = spec.check(operands, parameters)
    chosen = registry.select(spec.problem(operands, parameters, sizes), backend)
    results = chosen.load()(operands, **spec.passed(operands, parameters))
    for operand, tensor in zip(spec.operands, operands, strict=True):
        if operand.written:
            torch.autograd.graph.increment_version(tensor)
    if chosen.launcher:
        indexer_launch.keep(chosen, operands, (parameters["sorted"], backend))
    return results


def _implementation(spec: OpSpec) -> Callable[..., Any]:
    """What the dispatcher calls with tensors of any device."""

    def run(*arguments: Any) -> Any:
        return serve(spec, arguments)

    def run_indexer(*arguments: Any) -> None:
        *operands_and_order, _check, backend = arguments
        if not indexer_launch.launch_again(*(*operands_and_order, backend)):
            serve(spec, arguments)

    return run_indexer if spec is DSA_TOPK_INDEXER else run


def _fake(spec: OpSpec) -> Callable[..., Any]:
    """What the dispatcher calls with tensors that have no data."""

    def run(*arguments: Any) -> Any:
        operands, parameters, _backend = spec.unpack(arguments)
        spec.check(operands, parameters)
        return FAKES[spec.operation](operands, **parameters)

    return run


for _spec in OPERATIONS:
    _library.define(_spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_spec.operation, _implementation(_spec), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashdsa::{_spec.operation}", _fake(_spec), lib=_library)
    register_gradients(_spec, _library)
