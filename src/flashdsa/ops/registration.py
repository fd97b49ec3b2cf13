"""The custom ops flashdsa::*, each registered from its table; what every call passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashdsa.backends.catalog import registry
from flashdsa.errors import UnsupportedError
from flashdsa.ops import indexer_launch
from flashdsa.ops.again import Serve
from flashdsa.ops.autograd import autograd_kernel
from flashdsa.ops.checks import require_backend
from flashdsa.ops.plain import is_plain_call
from flashdsa.ops.rows import Parameters
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.transforms import AUTOCAST_DEVICES, autocast, one_by_one, without_autocast
from flashdsa.problem import Operation
from flashdsa.settings import raw_settings

# NOTE: of a call `torch.library.custom_op` takes 14 us (57 on a busy machine), a definition 3.
_library = torch.library.Library("flashdsa", "FRAGMENT")


def custom_op(spec: OpSpec) -> torch._ops.OpOverload:
    """The operation as torch's dispatcher has it: operands, parameters, backend in a row."""
    overload: torch._ops.OpOverload = getattr(torch.ops.flashdsa, spec.operation).default
    return overload


def call(spec: OpSpec, operands: Sequence[Any], backend: str, **parameters: Any) -> Any:
    """The operation from a public function: through torch's dispatcher where that does anything.

    Args:
        operands: in the order of `spec.kind`, as the caller gave them; what is in it is checked.
        parameters: all that the operation has, in their order.
    """
    # Dynamo cannot trace what makes a memory, which the first call does.
    if is_dynamo_compiling():
        return _call(spec, operands, backend, parameters, None)
    try:
        sizes = getattr(operands[0], "shape", None)
    except RuntimeError:  # a nested tensor's; the checks say so
        return _call(spec, operands, backend, parameters, None)
    values = parameters.values()
    key = (sizes, backend, *values, *map(type, values), registry.size, *raw_settings())
    serve = spec.memory.find(key, operands)
    if serve is not None:
        return serve(operands)
    return _call(spec, operands, backend, parameters, key)


def _call(
    spec: OpSpec,
    given: Sequence[Any],
    backend: str,
    parameters: Parameters,
    key: tuple[Any, ...] | None,
) -> Any:
    """A call that is new to the operation's memory, which is to know it by `key`; None: is not."""
    in_a_row = spec.kind(*given)
    operands = spec.normalised(in_a_row)
    require_backend("backend", backend)
    values = [parameter.accept(parameters[parameter.name]) for parameter in spec.parameters]
    with torch.no_grad() if spec.detached else nullcontext():
        # NOTE: torch's dispatcher takes a third of the host's time of a call.
        if is_dynamo_compiling() or not is_plain_call(operands):
            return custom_op(spec)(*operands, *values, backend)
        arguments = (*operands, *values, backend)
        serve = _find_served(spec, arguments)
        if key is not None:
            alike = serve
            if operands is not in_a_row:
                alike = _normalising(serve, spec, in_a_row, operands)
            spec.memory.keep(key, in_a_row, alike)
        return serve(operands)


MOST_SERVED = 4096
"""Calls that are remembered; the next one empties the memory."""
_served: dict[tuple[Any, ...], Serve] = {}
"""Served calls by what the checks and the choice read. These take 0.1 ms after a pause of the
process."""


def _layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return the properties of an operand that the checks read."""
    if tensor is None:
        return None
    offset = tensor.storage_offset()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, offset


def _checked(spec: OpSpec, arguments: Sequence[Any]) -> Serve:
    """Check a call by the operation's schema, choose a backend, and say what serves such calls."""
    operands, parameters, backend = spec.unpack(arguments)
    sizes = spec.check(operands, parameters)
    chosen = registry.select(spec.problem(operands, parameters, sizes), backend)
    passed = spec.passed(operands, parameters)
    if chosen.bind:
        serve = chosen.load_bind()(operands, **passed)
    else:
        serve = _serving_by(chosen.load(), spec, passed)
    if chosen.launch_config:
        choice = passed["sorted"], passed["positions"], backend
        serve = indexer_launch.keeping(serve, chosen, choice)
    written = [
        number
        for number, operand in enumerate(spec.operands)
        if operand.written and operands[number] is not None
    ]
    return _telling(serve, written) if written else serve


def _serving_by(entry: Callable[..., Any], spec: OpSpec, parameters: Parameters) -> Serve:
    """Return the `Serve` of an implementation that binds nothing."""
    return lambda operands: entry(spec.kind(*operands), **parameters)


def _telling(serve: Serve, written: Sequence[int]) -> Serve:
    """`serve`, of which autograd learns that it writes the operands of these numbers. Nothing is
    returned: torch's dispatcher takes nothing else of an operation that writes."""

    def run(operands: Sequence[Any]) -> None:
        serve(operands)
        torch._C._increment_version([operands[number] for number in written])

    return run


def _normalising(serve: Serve, spec: OpSpec, given: Sequence[Any], brought: Sequence[Any]) -> Serve:
    """`serve` of operands in the form that a caller gave them in.

    Args:
        given: in that form. brought: by `spec.normalise` into the table's; where it only took
            views, the same views are taken of calls alike, without a look at what they are of.
    """
    normalise = spec.normalise
    assert normalise is not None
    views = []
    for number, (one, other) in enumerate(zip(given, brought, strict=True)):
        if other is not one:
            if other.dtype != one.dtype or other.data_ptr() != one.data_ptr():
                return lambda operands: serve(normalise(spec.kind(*operands)))
            views.append((number, other.shape, other.stride()))

    def run(operands: Sequence[Any]) -> Any:
        viewed = list(operands)
        for number, shape, stride in views:
            viewed[number] = viewed[number].as_strided(shape, stride)
        return serve(viewed)

    return run


def is_served(spec: OpSpec, operands: Any, backend: str, **parameters: Any) -> bool:
    """Whether `call` with these arguments, which are right, finds an implementation.

    Raises:
        ArgumentTypeError, ArgumentValueError: they are not right.
    """
    sizes = spec.check(operands, parameters)
    try:
        registry.select(spec.problem(operands, parameters, sizes), backend)
    except UnsupportedError:
        return False
    return True


def _find_served(spec: OpSpec, arguments: Sequence[Any]) -> Serve:
    """Return the function that serves a call; the call is checked unless one like it was."""
    count = len(spec.operands)
    *values, backend = arguments[count:]
    chosen_by = backend, raw_settings(), registry.size
    key = (spec.operation, *map(_layout, arguments[:count]), *values, *chosen_by)
    serve = _served.get(key)
    if serve is None:
        serve = _checked(spec, arguments)
        if len(_served) >= MOST_SERVED:
            _served.clear()
        _served[key] = serve
    return serve


def serve(spec: OpSpec, arguments: Sequence[Any]) -> Any:
    """Check a call, unless one like it was served, and have its backend compute the results."""
    return _find_served(spec, arguments)(arguments[: len(spec.operands)])


def prepare(spec: OpSpec, operands: Any, backend: str, **parameters: Any) -> Callable[[], None]:
    """A call that writes to its operands, checked, its backend chosen: it only remains to be run.

    Args: as for `call`; the operation is one that its backends prepare.
    """
    require_backend("backend", backend)
    sizes = spec.check(operands, parameters)
    chosen = registry.select(spec.problem(operands, parameters, sizes), backend)
    launch = chosen.load_prepare()(operands, **spec.passed(operands, parameters))
    return partial(without_autocast, launch)


def _implementation(spec: OpSpec) -> Callable[..., Any]:
    """Return the function that the dispatcher calls with tensors of any device, under autocast
    too."""

    def run(*arguments: Any) -> Any:
        return without_autocast(serve, spec, arguments)

    def run_indexer(*arguments: Any) -> None:
        *operands_and_kind, _check, backend = arguments
        if not indexer_launch.launch_again(*(*operands_and_kind, backend)):
            run(*arguments)

    return run_indexer if spec.operation == Operation.DSA_TOPK_INDEXER else run


def _fake(spec: OpSpec) -> Callable[..., Any]:
    """Return the function that the dispatcher calls with tensors that have no data."""

    def run(*arguments: Any) -> Any:
        operands, parameters, _backend = spec.unpack(arguments)
        return spec.results(operands, parameters, spec.check(operands, parameters))

    return run


OPERATIONS: dict[str, OpSpec] = {}
"""Every operation by its name; `flashdsa.ops` imports the files that declare them."""


def register(spec: OpSpec) -> OpSpec:
    """Define the operation and say what it does on tensors, on fakes and under transforms."""
    name, qualified = spec.operation, f"flashdsa::{spec.operation}"
    _library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = custom_op(spec)
    _library.impl(name, _implementation(spec), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, _fake(spec), lib=_library)
    torch.library.register_vmap(qualified, one_by_one(spec, op), lib=_library)
    if spec.outputs:
        _library.impl(name, autograd_kernel(spec, op), "Autograd", with_keyset=True)
    if spec.autocast:
        for key, device in AUTOCAST_DEVICES.items():
            _library.impl(name, autocast(spec, op, device), key)
    OPERATIONS[name] = spec
    return spec
