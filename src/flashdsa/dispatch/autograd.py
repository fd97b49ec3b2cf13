"""Gradients: backwards of the operations that have one, and errors where there is none.

An operation's Autograd kernel is written here instead of by `torch.library.register_autograd`: that
one gives torch.func.grad an error about its own insides, and forward-mode AD tangents of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import Parameter

from flashdsa.backends.catalog import registry
from flashdsa.dispatch.call_cache import BACKWARD, Serve
from flashdsa.dispatch.rows import Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import DoubleBackwardError, UnsupportedError

Run = Callable[[str, Sequence[Any], str], Any]
"""Calls an operation by its name with operands and parameters in a row, and a backend."""
Kernel = Callable[..., Any]
"""Function that torch's dispatcher calls for a key, of the key set and an op's arguments."""


def recorded_function(spec: OpSpec, run: Run) -> Callable[..., Any]:
    """A function of `serve`, the parameters by name and the operands: the operation by `serve`,
    with its backward, where no transform and no mode is active."""

    def forward(ctx: Any, serve: Serve, parameters: Parameters, *operands: Any) -> Any:
        output = serve(operands)
        _save(ctx, spec, operands, parameters, output)
        return output

    def backward(ctx: Any, d_first: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_gradients(ctx, spec, d_first, run))

    derive = _where_defined(backward, 2 + len(spec.operands))
    members = {"forward": staticmethod(forward), "backward": staticmethod(derive)}
    function: Any = type(f"{spec.operation}_recorded", (_SingleLevelFunction,), members)
    apply: Callable[..., Any] = function.apply
    return apply


def _where_defined(backward: Kernel, num_inputs: int) -> Kernel:
    """Return `backward` for a function that does not materialize its outputs' gradients.

    The first output's gradient, which alone counts, is None where a later function has none: then
    no input has one, and nothing is computed.
    """

    def derive(ctx: Any, d_first: Tensor | None, *others: Any) -> Sequence[Tensor | None]:
        if d_first is None:
            return (None,) * num_inputs
        gradients: Sequence[Tensor | None] = backward(ctx, d_first, *others)
        return gradients

    return derive


def _save(
    ctx: Any, spec: OpSpec, operands: Sequence[Any], parameters: Parameters, output: Any
) -> None:
    """Keep what the backward needs."""
    gradient = spec.gradient
    assert gradient is not None
    outputs = (output,) if isinstance(output, Tensor) else output
    ctx.parameters = parameters
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *[outputs[number] for number in spec.kept])
    if len(outputs) > 1:
        ctx.mark_non_differentiable(*outputs[1:])


def _gradients(ctx: Any, spec: OpSpec, d_first: Tensor, run: Run) -> Sequence[Tensor | None]:
    """The operands' gradients; None where there is none."""
    gradient = spec.gradient
    if gradient is None:
        _no_gradient(spec)
    count = len(spec.operands)
    saved = ctx.saved_tensors  # a look unpacks: checkpointing allows one
    operands = spec.kind._make(saved[:count])
    parameters = ctx.parameters
    arguments = gradient.arguments(operands, saved[count:], d_first.contiguous(), parameters)
    results = run(gradient.by, arguments, parameters["backward_backend"])
    results = (results,) if isinstance(results, Tensor) else results
    found: list[Tensor | None] = [None] * count
    for number, result in zip(spec.differentiated, results, strict=True):
        if operands[number] is not None:
            found[number] = result
    return found


def _no_gradient(spec: OpSpec) -> NoReturn:
    if not spec.backward_of:
        raise UnsupportedError(f"{spec.operation}: no gradient is available")
    raise DoubleBackwardError(
        f"{spec.operation}: no gradient of a gradient is available; the backward of "
        f"{spec.backward_of} cannot be differentiated (create_graph=True)"
    )


def require_backward(spec: OpSpec, by: str, arguments: Sequence[Any]) -> None:
    """Raise UnsupportedError where no implementation would serve the call's backward: the forward
    says so, before anything is computed."""
    count = len(spec.operands)
    given, values, backend = arguments[:count], arguments[count:-1], arguments[-1]
    if spec.cache.find(given, values, backend, BACKWARD) is not None:
        return
    operands, parameters, _ = spec.unpack(arguments)
    if not all(x is None or (type(x) in (Tensor, Parameter) and not x.is_meta) for x in operands):
        return  # sizes are symbols, or not those of the call; or nothing is computed
    problem = spec.problem(operands, parameters, spec.check(operands, parameters))
    registry.select(problem, backend)  # its own reasons come first
    # Choices of the forward alone.
    of_backward = replace(problem, operation=by, max_logits=False, batch_invariant=False)
    try:
        registry.select(of_backward, parameters["backward_backend"])
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}. {spec.operation} needs {by} where a gradient is asked for; under "
            "torch.no_grad() it does not"
        ) from None
    spec.cache.keep(given, values, backend, _nothing, BACKWARD)


def _nothing(_: object) -> None:
    """Stand for a backward that is served."""


def has_tangent(value: object) -> bool:
    """Whether forward-mode AD wants a derivative along `value`."""
    if not isinstance(value, Tensor) or forward_ad._current_level < 0:
        return False
    while is_batchedtensor(value):
        value = get_unwrapped(value)
    return forward_ad.unpack_dual(value, level=0).tangent is not None


def refuse_tangents(name: str, values: Iterable[object]) -> None:
    """Raise UnsupportedError where forward-mode AD wants a derivative of `name` along a value."""
    if forward_ad._current_level >= 0 and any(has_tangent(value) for value in values):
        raise UnsupportedError(
            f"{name}: forward-mode AD (torch.func.jvp, jacfwd, torch.autograd.forward_ad) is not "
            "available; reverse mode is, where an operation has a gradient"
        )


def autograd_kernel(spec: OpSpec, op: torch._ops.OpOverload, run_backward: Run) -> Kernel:
    """`recording` of an operation, with its backward, or an error in its place."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if spec.gradient is not None:
            operands, parameters, _backend = spec.unpack(inputs)
            _save(ctx, spec, operands, parameters, output)

    def backward(ctx: Any, d_first: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx, spec, d_first, run_backward)
        return (*gradients, *[None for _ in (*spec.parameters, "backend")])

    def prepared(arguments: Sequence[Any]) -> Sequence[Any]:
        if spec.gradient is not None:
            require_backward(spec, spec.gradient.by, arguments)
        return arguments

    return recording(op, setup_context, backward, prepared)


def recording(
    op: torch._ops.OpOverload,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
    prepared: Callable[[Sequence[Any]], Sequence[Any]],
) -> Kernel:
    """Return the function that the dispatcher calls if gradients are recorded and there are
    outputs.

    Its autograd.Function is one of one level of torch.func's transforms: the dispatcher has taken
    the outer ones apart when it calls the Autograd kernel.

    Args:
        setup_context, backward: as an autograd.Function has them. `backward` is called where the
            first output has a gradient; those of other outputs are None or not used.
        prepared: gives the arguments of a call that is recorded, or raises.
    """
    name = op._schema.name.removeprefix("flashdsa::")

    def forward(*arguments: Any) -> Any:
        # Recording switches gradients off, of this level by torch.func; an outer one may want them.
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
        ):
            return op(*arguments)

    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(_where_defined(backward, len(op._schema.arguments))),
    }
    function: Any = type(f"{name}_function", (_SingleLevelFunction,), members)

    def run(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        refuse_tangents(name, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            with enable_single_level_autograd_function():
                return function.apply(*prepared(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return run
