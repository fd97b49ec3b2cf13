"""Bound operations: functions of operands of given sizes, and kernels loaded before a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import Implementation, resolve_backend
from flashdsa.dispatch import checks
from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.registration import OPERATIONS, choose
from flashdsa.dispatch.registration import bind as bind_call
from flashdsa.dispatch.spec import OpSpec
from flashdsa.dispatch.transforms import without_autocast
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.ops.attention import PACKED
from flashdsa.problem import D_QK, D_V, INDEX_TOKEN_BYTES, INDEX_TOPK, NUM_INDEX_HEADS, PAGE_SIZE
from flashdsa.row_formats import V32, row_format

__all__ = ["bind", "warm_up"]

MANY_ROWS = 256
"""More than GPUs have SMs."""
_PAGES = (1, 1 + INDEX_TOPK // PAGE_SIZE, 2**20 // PAGE_SIZE)
"""Pages that a block table has room for: rows need no scores, are short, have a million tokens."""
_USUAL: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("B", "S"), (1, MANY_ROWS)),
    "table_page_size": (PAGE_SIZE,),
    "token_bytes": (INDEX_TOKEN_BYTES,),
    "H": (NUM_INDEX_HEADS,),
    "d_qk": (D_QK,),
    "d_v": (D_V,),
    **dict.fromkeys(("topk", "extra_topk"), (INDEX_TOPK,)),
    "max_len": (INDEX_TOPK,),
    **dict.fromkeys(("S_kv", "S_extra"), (PAGE_SIZE,)),
    "offsets": (2,),
}
"""Sizes and numbers by their names in the operations' tables; others are 1."""
_COMES_WITH: Mapping[str, torch.dtype] = {"k_scale": torch.float8_e4m3fn}
"""Optional operands that come with a first operand of this dtype; others are left out."""


def bind(
    operation: str, operands: Sequence[Tensor | None], *, backend: str = "auto", **parameters: Any
) -> Callable[[Sequence[Tensor | None]], Any]:
    """An operation as a function of its operands without checks, for callers that make their own.

    ``torch.ops.flashdsa.<operation>`` shows the operands and the parameters in order, and what the
    function returns: None of an operation that writes. The call is checked, its backend chosen and
    its kernels are loaded here. The function then takes operands that differ from these only in
    their values and addresses, and of `dsa_topk_indexer` in the numbers of pages and of the block
    table's columns; it allocates results, and copies what a kernel cannot read as it lies. It may
    be captured into CUDA graphs. It records no gradient.

    Args:
        operation: "sparse_mla_fwd", "sparse_mla_fwd_out", "mla_bwd", "dsa_topk_indexer" and so on.
        operands: tensors; None, or left out at the end, where an optional one is missing.
        backend: "auto" or the name of one.
        parameters: a bool is False by default, `sm_scale` is ``d_qk ** -0.5``, `index_block` 1, a
            dtype is that of the operation's function.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: no implementation serves the call, or a gradient is asked for.
    """
    spec = _spec(operation)
    checks.require_backend("backend", backend)
    missing = (None,) * (len(spec.operands) - len(operands))
    given = (*operands, *missing)
    if len(given) != len(spec.operands):
        names = ", ".join(operand.name for operand in spec.operands)
        raise ArgumentTypeError(f"operands: expected {names}; got {len(given)} operands")
    spec.require_tensors(given)
    for operand, tensor in zip(spec.operands, given, strict=True):
        if tensor is not None and (type(tensor) not in (Tensor, Parameter) or tensor.is_meta):
            kind = "one on the device meta" if tensor.is_meta else f"a {type(tensor).__name__}"
            raise ArgumentTypeError(f"{operand.name}: expected a tensor with data; got {kind}")
    refuse_tangents(operation, given)
    if checks.wants_gradient(given):
        raise UnsupportedError(
            f"{operation}: a bound function records no gradient; call it under torch.no_grad()"
        )
    spec.require_apart(given)
    serve = bind_call(spec, spec.kind(*given), _values(spec, given, parameters), backend)
    serve = partial(without_autocast, partial(_without_gradients, serve))
    return serve if not missing else lambda operands: serve((*operands, *missing))


def _without_gradients(serve: Callable[..., Any], operands: Sequence[Tensor | None]) -> Any:
    """Results that have no gradient, whatever the operands ask for."""
    # NOTE: torch.no_grad() takes 1.5 us, this 0.2.
    recorded = torch.is_grad_enabled()
    if not recorded:
        return serve(operands)
    torch._C._set_grad_enabled(False)
    try:
        return serve(operands)
    finally:
        torch._C._set_grad_enabled(recorded)


def warm_up(operation: str, *, backend: str = "auto", **choices: Any) -> None:
    """Compile or load the kernels that an operation takes for given sizes, before its first call.

    The backend chooses kernels as for a call: `warm_up` makes calls on zeros of these sizes, on a
    GPU. On the CPU nothing is run. For example ``warm_up("dsa_topk_indexer", H=64, topk=2048,
    sorted=(False, True))`` or ``warm_up("sparse_mla_fwd", S=(1, 4096), H=128, kv_dtype=torch.uint8,
    width=656)``.

    Args:
        operation: see `bind`.
        backend: "auto" or the name of one.
        choices: each one value, or a tuple of several, of which every combination is warmed up:
            sizes by their names in the operation's table (``S``, ``H``, ``topk``); parameters;
            an optional operand's name, which is there if True; its name and ``_dtype``, of an
            operand that may have several. What is left out is a model's usual size or False,
            `k_scale` of e4m3 keys True; rows are 1 and 256.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: no implementation serves such a call.
    """
    for spec, operands, values, found in _calls(operation, backend, choices):
        if found.runner and not found.binds_each_call:
            bind_call(spec, operands, values, backend)(operands)


def backends_for(operation: str, *, backend: str = "auto", **choices: Any) -> tuple[str, ...]:
    """Return the names of the backends that serve the calls which `warm_up` would make, sorted.

    Nothing is loaded or run. Args and Raises: as for `warm_up`.
    """
    calls = _calls(operation, backend, choices)
    return tuple(sorted({found.backend for _, _, _, found in calls}))


def _calls(
    operation: str, backend: str, choices: Mapping[str, Any]
) -> Iterator[tuple[OpSpec, Any, tuple[Any, ...], Implementation]]:
    """The table, operands, parameters and implementation of every call of these choices."""
    spec = _spec(operation)
    checks.require_backend("backend", backend)
    names = _names(spec)
    unknown = [name for name in choices if name not in names]
    if unknown:
        raise ArgumentTypeError(
            f"warm_up: {operation} has {', '.join(names)}; got {', '.join(unknown)}"
        )
    device = _device(spec, backend)
    for chosen in _combinations(spec, choices):
        operands = spec.kind(*_zeros(spec, chosen, device))
        given = {x.name: chosen[x.name] for x in spec.parameters if chosen.get(x.name) is not None}
        values = _values(spec, operands, given)
        yield spec, operands, values, choose(spec, operands, spec.named(values), backend)


def _spec(operation: str) -> OpSpec:
    """The table of an operation."""
    found = OPERATIONS.get(operation) if isinstance(operation, str) else None
    if found is None:
        error = ArgumentValueError if isinstance(operation, str) else ArgumentTypeError
        names = ", ".join(OPERATIONS)
        raise error(f"operation: expected one of {names}; got {operation!r}")
    return found


def _values(spec: OpSpec, operands: Sequence[Any], parameters: dict[str, Any]) -> tuple[Any, ...]:
    """All parameters in their order."""
    names = [x.name for x in spec.parameters if x.passed]
    unknown = [name for name in parameters if name not in names]
    if unknown:
        have = ", ".join(names) or "no parameters"
        raise ArgumentTypeError(f"{spec.operation}: expected {have}; got {', '.join(unknown)}")
    return tuple(spec.filled(operands, parameters).values())


def _sizes(spec: OpSpec) -> list[str]:
    """Names of the sizes, and of the parameters that are numbers."""
    dims = [dim for operand in spec.operands for dim in operand.dims if not dim.isdecimal()]
    return list(dict.fromkeys((*dims, *(x.name for x in spec.parameters if x.kind == "int"))))


def _names(spec: OpSpec) -> list[str]:
    """Names of the choices that `warm_up` takes for an operation."""
    parameters = [x.name for x in spec.parameters if x.passed]
    optional = [operand.name for operand in spec.operands if operand.optional]
    dtypes = [f"{operand.name}_dtype" for operand in spec.operands]
    return list(dict.fromkeys((*_sizes(spec), *parameters, *optional, *dtypes)))


def _combinations(spec: OpSpec, choices: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the choices, of usual sizes where none is chosen."""
    sizes = _sizes(spec)
    options = {name: _USUAL.get(name, (1,)) for name in sizes if name not in _FOLLOWING}
    for name, value in choices.items():
        options[name] = value if isinstance(value, tuple | list) else (value,)
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        for name in sizes:
            if name in chosen:
                checks.require_positive(name, chosen[name])
        following = {n: _FOLLOWING[n](chosen) for n in sizes if n not in chosen}
        for others in product(*following.values()):
            yield {**chosen, **dict(zip(following, others, strict=True))}


def _requests(chosen: Mapping[str, Any]) -> Sequence[int]:
    """A row of the block table for each query, and for two of a request."""
    rows = chosen["B"]
    return (rows,) if rows % 2 else (rows, rows // 2)


def _width(name: str, chosen: Mapping[str, Any]) -> Sequence[int]:
    """Columns of a source: q's, or a packed row's bytes."""
    if chosen.get(f"{name}_dtype") not in PACKED:
        return (chosen["d_qk"],)
    return (row_format(chosen.get("kv_format", V32.name)).row_bytes,)


def _table_columns(chosen: Mapping[str, Any]) -> Sequence[int]:
    """Columns of a block table with room for the tokens of `_PAGES`."""
    return [pages * PAGE_SIZE // int(chosen["table_page_size"]) for pages in _PAGES]


_FOLLOWING: Mapping[str, Callable[[Mapping[str, Any]], Sequence[int]]] = {
    "max_pages": _table_columns,
    "requests": _requests,
    "width": partial(_width, "kv"),
    "extra_width": partial(_width, "extra_kv"),
}
"""Sizes that follow from other choices."""


def _zeros(spec: OpSpec, chosen: Mapping[str, Any], device: str) -> Iterator[Tensor | None]:
    """Operands of the chosen sizes and dtypes."""
    first = torch.float32
    for number, operand in enumerate(spec.operands):
        is_usual = _COMES_WITH.get(operand.name) == first
        if operand.optional and not chosen.get(operand.name, is_usual):
            yield None
            continue
        dtypes = operand.dtypes(first) if callable(operand.dtypes) else operand.dtypes
        dtype = chosen.get(f"{operand.name}_dtype", dtypes[0])
        checks.require_dtype_or_none(f"{operand.name}_dtype", dtype)
        if not number:
            first = dtype
        shape = [int(dim) if dim.isdecimal() else chosen[dim] for dim in operand.dims]
        # On the CPU nothing is run, so that no memory is touched.
        make = torch.empty if device == "cpu" else torch.zeros
        yield make(shape, dtype=dtype, device=device)


def _device(spec: OpSpec, backend: str) -> str:
    """Return the device of a backend's implementation; for "auto" this machine's GPU if one
    serves."""
    if not torch.cuda.is_available():
        return "cpu"
    here = checks.capability(torch.device("cuda", torch.cuda.current_device()))
    backend = resolve_backend(backend)
    on_gpu = any(
        "cuda" in implementation.features.devices
        and (backend != "auto" or here in implementation.features.capabilities)
        for implementation in registry.implementations(spec.operation)
        if backend in ("auto", implementation.backend)
    )
    return "cuda" if on_gpu else "cpu"
