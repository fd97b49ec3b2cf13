"""The custom ops flashdsa::*, each registered from its table; what every call passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import Implementation
from flashdsa.dispatch import autograd, transforms
from flashdsa.dispatch.call_cache import INSIDE, Serve
from flashdsa.dispatch.checks import require_backend, wants_gradient
from flashdsa.dispatch.rows import Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.dispatch.transforms import is_plain_call, without_autocast
from flashdsa.errors import UnsupportedError
from flashdsa.problem import DEVICES

# NOTE: of a call `torch.library.custom_op` takes 14 us (57 on a busy machine), a definition 3.
_library = torch.library.Library("flashdsa", "FRAGMENT")


def custom_op(spec: OpSpec) -> torch._ops.OpOverload:
    """The operation as torch's dispatcher has it: operands, parameters, backend in a row."""
    overload: torch._ops.OpOverload = getattr(torch.ops.flashdsa, spec.operation).default
    return overload


def call(spec: OpSpec, operands: Sequence[Any], values: tuple[Any, ...], backend: str) -> Any:
    """The operation from a public function: through torch's dispatcher where that does anything.

    Args:
        operands: in the order of `spec.kind`, as the caller gave them; what is in it is checked.
        values: of all parameters that the operation has, in their order.
    """
    # Dynamo cannot trace what makes a cache, which the first call does.
    if not is_dynamo_compiling():
        serve = spec.cache.find(operands, values, backend)
        if serve is not None:
            return serve(operands)
    return _call(spec, operands, values, backend)


def _call(spec: OpSpec, given: Sequence[Any], values: tuple[Any, ...], backend: str) -> Any:
    """A call that is new to the operation's cache."""
    in_a_row = spec.kind(*given)
    operands = spec.normalised(in_a_row)
    require_backend("backend", backend)
    accepted = tuple(x.accept(value) for x, value in zip(spec.parameters, values, strict=True))
    with torch.no_grad() if spec.detached else nullcontext():
        # NOTE: torch's dispatcher takes a third of the host's time of a call.
        recorded = wants_gradient(operands)
        if (
            is_dynamo_compiling()
            or (recorded and spec.gradient is None)
            or not is_plain_call(operands)
        ):
            return custom_op(spec)(*operands, *accepted, backend)
        if recorded:
            serve = alike = _recording(spec, operands, accepted, backend)
        else:
            found = spec.cache.find(operands, accepted, backend, INSIDE)
            serve = alike = found or _bind_and_keep(spec, operands, accepted, backend)
        if operands is not in_a_row:
            alike = _normalising(serve, spec, in_a_row, operands, recorded=recorded)
        spec.cache.keep(in_a_row, values, backend, alike)
        return serve(operands)


def _recording(spec: OpSpec, operands: Any, values: Sequence[Any], backend: str) -> Serve:
    """A function of operands like these, of which gradients are asked for."""
    assert spec.gradient is not None
    autograd.require_backward(spec, spec.gradient.by, (*operands, *values, backend))
    with torch.no_grad():
        serve = bind(spec, operands, values, backend)
    apply, parameters = autograd.recorded_function(spec, _run), spec.named(values)
    return lambda given: apply(serve, parameters, *given)


def _run(name: str, arguments: Sequence[Any], backend: str) -> Any:
    """The operation of that name, whose operands are in the table's form."""
    spec = OPERATIONS[name]
    count = len(spec.operands)
    return call(spec, arguments[:count], tuple(arguments[count:]), backend)


def _bind_and_keep(
    spec: OpSpec, operands: Sequence[Any], values: Sequence[Any], backend: str
) -> Serve:
    """Check a call that is new to the cache, and bind it."""
    serve = bind(spec, spec.kind(*operands), values, backend)
    spec.cache.keep(operands, values, backend, serve, INSIDE)
    return serve


def bind(spec: OpSpec, operands: Any, values: Sequence[Any], backend: str) -> Serve:
    """Check a call by the operation's schema, choose a backend, and have it bind such calls.

    Args:
        operands: in the table's form.
    """
    parameters = spec.named(values)
    chosen = choose(spec, operands, parameters, backend)
    serve = chosen.load()(operands, **spec.passed(operands, parameters))
    written = [number for number in spec.written if operands[number] is not None]
    return _telling(serve, written) if written else serve


def choose(spec: OpSpec, operands: Any, parameters: Parameters, backend: str) -> Implementation:
    """Return the implementation that serves a call, which is checked by the operation's schema."""
    sizes = spec.check(operands, parameters)
    return registry.select(spec.problem(operands, parameters, sizes), backend)


def _telling(serve: Serve, written: Sequence[int]) -> Serve:
    """`serve`, of which autograd learns that it writes the operands of these numbers. Nothing is
    returned: torch's dispatcher takes nothing else of an operation that writes."""
    first, *others = written
    tell = torch._C._increment_version

    def run(operands: Sequence[Any]) -> None:
        serve(operands)
        tell((operands[first],))

    def run_all(operands: Sequence[Any]) -> None:
        serve(operands)
        tell([operands[number] for number in written])

    return run_all if others else run


def _normalising(
    serve: Serve, spec: OpSpec, given: Sequence[Any], brought: Sequence[Any], *, recorded: bool
) -> Serve:
    """`serve` of operands in the form that a caller gave them in.

    Args:
        given: in that form. brought: by `spec.normalise` into the table's; where it only took
            views, the same views are taken of calls alike, without a look at what they are of.
        recorded: gradients are asked for; they pass through the views that `spec.normalise` takes.
    """
    normalise = spec.normalise
    assert normalise is not None
    views = []
    for number, (one, other) in enumerate(zip(given, brought, strict=True)):
        if other is not one:
            if recorded or other.dtype != one.dtype or other.data_ptr() != one.data_ptr():
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

    Args:
        parameters: others are what nothing stands for.

    Raises:
        ArgumentTypeError, ArgumentValueError: they are not right.
    """
    try:
        choose(spec, operands, spec.filled(operands, parameters), backend)
    except UnsupportedError:
        return False
    return True


def _implementation(spec: OpSpec) -> Callable[..., Any]:
    """Return the function that the dispatcher calls with tensors of any device, under autocast
    too."""
    count = len(spec.operands)

    def run(*arguments: Any) -> Any:
        operands, values, backend = arguments[:count], arguments[count:-1], arguments[-1]
        serve = spec.cache.find(operands, values, backend, INSIDE)
        if serve is None:
            serve = without_autocast(_bind_and_keep, spec, operands, values, backend)
        return without_autocast(serve, operands)

    return run


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
    written = {number: spec.operands[number].name for number in spec.written}
    torch.library.register_vmap(qualified, transforms.one_by_one(op, written), lib=_library)
    if spec.outputs:
        _library.impl(name, autograd.autograd_kernel(spec, op, _run), "Autograd", with_keyset=True)
    if spec.autocast:
        for key, device in transforms.AUTOCAST_DEVICES.items():
            _library.impl(name, transforms.autocast(spec, op, device), key)
    OPERATIONS[name] = spec
    if spec.cpu:
        for backend, features in (
            ("cpu", spec.features),
            ("torch", replace(spec.features, devices=DEVICES)),
        ):
            function = f"flashdsa.backends.{backend}.{spec.cpu}"
            priority = -2 if backend == "torch" else 0  # last, where anything else serves
            registry.register(Implementation(name, backend, function, features, priority))
    return spec


def opaque(
    schema: str, fake: Callable[..., Any], gradient: tuple[Callable[..., Any], ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Make an op flashdsa::* of a function that no trace goes through: it reads values, or takes as
    many steps as sizes say. It returns new tensors.

    Args:
        schema: in torch's dispatcher. fake: gives results without values.
        gradient: as `recording` takes it.
    """
    name = schema.partition("(")[0]

    def define(function: Callable[..., Any]) -> Any:
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        op = getattr(torch.ops.flashdsa, name).default
        _library.impl(name, partial(without_autocast, function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashdsa::{name}", fake, lib=_library)
        torch.library.register_vmap(
            f"flashdsa::{name}", transforms.one_by_one(op, {}), lib=_library
        )
        if gradient:
            _library.impl(name, autograd.recording(op, *gradient), "Autograd", with_keyset=True)
        return op

    return define


def _forget_calls() -> None:
    """Every call is new again: another implementation may serve it."""
    for spec in OPERATIONS.values():
        spec.cache.clear()


registry.on_change = _forget_calls
