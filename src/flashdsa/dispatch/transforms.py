"""torch's transforms of a call other than gradients: vmap and autocast; and calls without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import UnsupportedError

AUTOCAST_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
"""Dispatch key of autocast -> device type."""
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(
    torch._C.DispatchKey.AutocastCUDA
)
_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that autocast casts; fp64 stays as it is, like in torch's own operations."""


def without_autocast(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result where torch's own operations take their operands as they are.

    Operations are computed so: autocast casts what the operation's table names, and no product on
    the way to the results.
    """
    # NOTE: the guard takes 0.8 us, the question 0.1.
    if not torch._C._is_any_autocast_enabled():
        return function(*arguments)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        return function(*arguments)


def as_autocast_casts(tensor: Tensor) -> Tensor:
    """`tensor` as an operation gets it that autocast casts operands of; differentiable.

    Functions need it that save such an operand beside the operation's result for their backward.
    """
    device = tensor.device.type
    casts = device in AUTOCAST_DEVICES.values() and torch.is_autocast_enabled(device)
    if not casts or tensor.dtype not in _CAST:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def one_by_one(op: torch._ops.OpOverload, written: Mapping[int, str]) -> Callable[..., Any]:
    """The operation under vmap: a call for each element of the batch, its results stacked.

    Args:
        written: names of the arguments that it writes, by their places.
    """
    name = op._schema.name.removeprefix("flashdsa::")

    def run(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        for place, argument in written.items():
            if in_dims[place] is None and arguments[place] is not None:
                raise _one_buffer(name, argument)

        def element(number: int) -> list[Any]:
            chosen = list(arguments)
            for place, (value, dim) in enumerate(zip(arguments, in_dims, strict=True)):
                if dim is not None:
                    view = value.select(dim, number)
                    chosen[place] = view if place in written else view.contiguous()
            return chosen

        if info.batch_size:
            results = [op(*element(number)) for number in range(info.batch_size)]
            stack: Callable[[list[Tensor] | tuple[Tensor, ...]], Tensor] = torch.stack
        else:
            results = [op(*_on_meta(arguments, in_dims))]
            stack = partial(_empty_batch, arguments)
        if results[0] is None:
            return None, None
        if isinstance(results[0], Tensor):
            return stack(results), 0
        stacked = tuple(stack(each) for each in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return run


def _on_meta(arguments: Sequence[Any], in_dims: Sequence[int | None]) -> list[Any]:
    """Arguments of a batch's element as tensors of the device meta, also of a batch of 0."""

    def element(value: Tensor, dim: int | None) -> Tensor:
        shape = [size for axis, size in enumerate(value.shape) if axis != dim]
        asks = value.requires_grad
        return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=asks)

    pairs = zip(arguments, in_dims, strict=True)
    return [element(x, dim) if isinstance(x, Tensor) else x for x, dim in pairs]


def _empty_batch(arguments: Sequence[Any], results: Sequence[Tensor]) -> Tensor:
    """A batch of 0 of the one result, which is on meta; the gradients of its inputs are 0."""
    (form,) = results
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    batch = tensors[0].new_empty((0, *form.shape), dtype=form.dtype)
    if not form.requires_grad:
        return batch
    return batch + torch.stack([x.sum().to(form.dtype) for x in tensors if x.requires_grad]).sum()


def refuse_transforms(function: str) -> None:
    """Raise UnsupportedError where a transform of torch.func is active."""
    active = [str(x.key()).rpartition(".")[2] for x in _functorch.get_interpreter_stack() or ()]
    for key, transform in (("Grad", "func.grad"), ("Vmap", "vmap"), ("Jvp", "func.jvp")):
        if key in active:
            raise UnsupportedError(
                f"{function}: torch.{transform} is not available over several ranks; "
                "`backward` is, where there is a gradient"
            )


def require_batch(function: str, name: str, written: Tensor, given: Iterable[Any]) -> None:
    """Raise UnsupportedError where a vmap gives `function` a batch of another argument and one
    tensor to write to. What is no tensor of `given` has no batch."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    if any(_batches(x) - _batches(written) for x in tensors):
        raise _one_buffer(function, name)


VIEWS_BYTES = torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")
"""Whether torch views a batch's bytes as another dtype under vmap; 2.11 does not."""


def require_byte_views(function: str, *tensors: Tensor) -> None:
    """Raise UnsupportedError under a vmap where this torch has no views of a batch's bytes."""
    if not VIEWS_BYTES and any(map(_batches, tensors)):
        raise UnsupportedError(
            f"{function}: torch.vmap over packed bytes needs a newer torch than {torch.__version__}"
        )


def _batches(tensor: Tensor) -> set[int]:
    """Levels of the vmaps whose batch a tensor has a dimension of."""
    if is_dynamo_compiling() or not _functorch.is_functorch_wrapped_tensor(tensor):
        return set()
    own = {_functorch.maybe_get_level(tensor)} if _functorch.is_batchedtensor(tensor) else set()
    return own | _batches(_functorch.get_unwrapped(tensor))


def _one_buffer(function: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: {function} under vmap writes it once an element of the batch; it must have the "
        "batch's dimension"
    )


def autocast(spec: OpSpec, op: torch._ops.OpOverload, device: str) -> Callable[..., Any]:
    """The operation under torch.autocast: operands of q's dtype are cast to autocast's."""

    def run(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def cast(name: str, value: Any) -> Any:
            is_cast = name in spec.autocast and isinstance(value, Tensor) and value.dtype in _CAST
            return value.to(dtype) if is_cast else value

        count = len(spec.operands)
        operands = [cast(o.name, x) for o, x in zip(spec.operands, arguments, strict=False)]
        return without_autocast(op, *operands, *arguments[count:])

    return run


_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_EAGER = _INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView)
_PLAIN = (_EAGER.raw_repr(), _INFERENCE.raw_repr())
"""Dispatch keys that torch includes in every call of a thread: outside and in inference mode."""


def is_plain_eager() -> bool:
    """Whether the dispatcher would do nothing but call the implementation, if all operands are
    just `torch.Tensor`: no mode (fake tensors, tracing, torch functions), transform or profiler.

    Those of torch.func wrap tensors in ones of the same type; like vmap, functionalization, jit and
    dispatch modes they are seen by the key that each includes.
    """
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
    )


def is_plain_call(operands: Iterable[Tensor | None]) -> bool:
    """Whether this holds of a call, but for gradients: also nothing is cast, and no operand has a
    tangent, is of a subclass other than `Parameter`, without data, or a view that its dispatch keys
    say how to read."""
    # Autocast is no key that torch includes: it ceases to exclude one.
    if forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
        return False
    if not is_plain_eager():
        return False
    return all(
        x is None
        or (
            type(x) in (Tensor, Parameter)
            and x.layout is torch.strided
            and (x.is_cuda or x.is_cpu)
            and not x.is_neg()
        )
        for x in operands
    )
