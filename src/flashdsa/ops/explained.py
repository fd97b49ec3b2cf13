"""Explanations: which kernels serve a call, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashdsa.dispatch.explanation import Explanation, explain_call
from flashdsa.dispatch.registration import OPERATIONS
from flashdsa.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["explain"]


class _Reached(BaseException):
    """A function came to its operation, with these arguments in the order of the schema."""

    def __init__(self, operation: str, arguments: Sequence[Any]) -> None:
        super().__init__(operation)
        self.operation, self.arguments = operation, arguments


class _UpToOperation(TorchDispatchMode):
    """In this context a function runs up to its operation, which is not made."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.removeprefix("flashdsa::")
        if name in OPERATIONS:
            raise _Reached(name, args)
        return func(*args, **(kwargs or {}))


def explain(
    operation: str | Callable[..., Any], /, *operands: Any, gpu: str | None = None, **arguments: Any
) -> Explanation:
    """Say which backend and which kernels serve a call, and why; nothing is computed.

    ``print(flashdsa.explain("sparse_mla_fwd", q, kv, indices, backend="sm90"))`` prints a table:
    the backend, why others do not serve the call, the kernels, and by which rules or predicted
    times they were chosen. The call's own code finds them from sizes, strides, dtypes and
    arguments. No kernel reads a value, so that tensors on the device "meta" suffice.

    Args:
        operation: a function of flashdsa that is one operation, or its name: "sparse_mla",
            "mla_bwd", "dsa_topk_indexer" and so on. Of a function with a gradient it is the forward
            that is explained.
        operands: the call's arguments, as the function takes them.
        gpu: "h200", "b200" or "a100", to explain what that GPU would take, wherever the tensors
            are. None: the tensors' own device; of other tensors than a GPU's, with
            ``backend="sm90"`` an H200, "sm100" a B200, "triton" an A100.
        arguments: the call's arguments by keyword, `backend` too.

    Returns:
        `str` of it is the table. Fields: `backend`, `gpu`, `kernels` (names that the
        workbench's `inspect` takes), `launches`, `choices`, `reasons`, `refusals` (other backends,
        each with why it does not serve the call), `also` (backends that would serve it).

    Raises:
        TypeError, ValueError: an argument is wrong, as in the call.
        NotImplementedError: no implementation serves the call; says why each does not.
    """
    function = _function_of(operation)
    try:
        with torch.no_grad(), _UpToOperation():  # type: ignore[no-untyped-call]
            function(*operands, **arguments)
    except _Reached as reached:
        spec = OPERATIONS[reached.operation]
        return explain_call(spec, *spec.unpack(reached.arguments), gpu)
    raise AssertionError(f"{function.__name__} made no operation")


def _function_of(operation: str | Callable[..., Any]) -> Callable[..., Any]:
    """The public function of one operation.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is none.
    """
    from flashdsa import ops

    names = [name for name in ops.PUBLIC if name in OPERATIONS or name == "sparse_mla"]
    if not isinstance(operation, str) and not isfunction(operation):
        kind = type(operation).__name__
        raise ArgumentTypeError(f"operation: expected a function or its name; got {kind}")
    name = operation if isinstance(operation, str) else operation.__name__
    function: Callable[..., Any] | None = getattr(ops, name, None) if name in names else None
    if function is None or not (isinstance(operation, str) or operation is function):
        raise ArgumentValueError(f"operation: expected one of {', '.join(names)}; got {name!r}")
    return function
