"""Argument rules in one place: one rule, one message naming argument, expectation and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.packed_rows import is_packed
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.problem import INT32_MAX, PAGE_SIZE
from flashdsa.row_formats import V32, RowFormat, find_row_format, has_split_rows
from flashdsa.settings import BACKENDS


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@lru_cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of a GPU, (0, 0) of one that is not NVIDIA's; None for the CPU."""
    if device.type != "cuda":
        return None
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def are_values_read(tensor: Tensor) -> bool:
    """Whether the values of `tensor` are checked: it is read by the host then, which waits."""
    return tensor.device.type == "cpu" or values_are_checked()


def wants_gradient(values: Iterable[Tensor | None]) -> bool:
    """Whether autograd would record a call with `values`; None is no tensor."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in values)


def holds_values(tensor: Tensor) -> bool:
    """Whether values can be read: the tensor stands for no other one, in a trace or a transform."""
    return (
        type(tensor) is Tensor
        and not tensor.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.get_interpreter_stack()
    )


def require_tensor(name: str, value: object) -> None:
    """`value` is a torch.Tensor that has strides: neither sparse nor nested."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor; got {type(value).__name__}")
    # Dynamo refuses to read a layout in a backward that it traces.
    if is_dynamo_compiling():
        return
    if value.layout is not torch.strided or value.is_nested:
        nested = " of a nested tensor" if value.is_nested else ""
        raise ArgumentTypeError(
            f"{name}: expected a dense tensor (layout torch.strided); got {value.layout}{nested}"
        )


def require_writable(name: str, tensor: Tensor) -> None:
    """The memory of `tensor` holds its numbers, and no gradient of it is asked for."""
    if not is_dynamo_compiling() and tensor.is_neg():
        raise ArgumentValueError(
            f"{name}: expected a tensor whose numbers are stored as they are; got a view that "
            "negates them, as that of a conjugate's imaginary part"
        )
    if wants_gradient((tensor,)):
        raise UnsupportedError(
            f"{name}: what is written to the caller's tensor has no gradient; give one that asks "
            "for none, or call under torch.no_grad()"
        )


def require_backend(name: str, value: object) -> None:
    """`value` is "auto" or the name of a backend."""
    if value not in BACKENDS:
        error = ArgumentValueError if isinstance(value, str) else ArgumentTypeError
        raise error(f"{name}: expected one of {', '.join(BACKENDS)}; got {value!r}")


def require_dtype_or_none(name: str, value: object) -> None:
    """`value` is a torch.dtype or None."""
    if value is not None and not isinstance(value, torch.dtype):
        raise ArgumentTypeError(
            f"{name}: expected a torch.dtype or None; got {type(value).__name__}"
        )


def require_dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """`tensor` has one of the `expected` dtypes."""
    if tensor.dtype not in expected:
        names = " or ".join(dtype_name(dtype) for dtype in expected)
        raise ArgumentTypeError(f"{name}: expected dtype {names}; got {dtype_name(tensor.dtype)}")


def require_rank(
    name: str, tensor: Tensor, ranks: Sequence[int], layout: str, advice: str = ""
) -> None:
    """`tensor` has one of the `ranks`; `layout` says in words what the dimensions are."""
    if tensor.dim() not in ranks:
        got = f"{tensor.dim()} dimensions, {_shape(tensor)}{advice}"
        raise ArgumentValueError(f"{name}: expected shape {layout}; got {got}")


def require_shape(
    name: str, tensor: Tensor, expected: Sequence[int], layout: str, why: str = ""
) -> None:
    """`tensor` has exactly the `expected` shape; `why` says where a size comes from."""
    require_rank(name, tensor, (len(expected),), layout)
    for axis, size in enumerate(expected):
        if tensor.shape[axis] != size:
            raise ArgumentValueError(
                f"{name}: expected shape {layout} = {list(expected)}; got {_shape(tensor)}{why}"
            )


def require_device(name: str, tensor: Tensor, device: torch.device, like: str) -> None:
    """`tensor` lies on `device`, the one of argument `like`."""
    if tensor.device != device:
        raise ArgumentValueError(
            f"{name}: expected device {device} (that of {like}); got {tensor.device}"
        )


def require_dense_rows(name: str, tensor: Tensor) -> None:
    """The last dimension of `tensor` is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise ArgumentValueError(
            f"{name}: expected a contiguous last dimension (stride 1); "
            f"got strides {list(tensor.stride())}"
        )


def require_positive(name: str, value: object, most: int = INT32_MAX) -> None:
    """`value` is an integer of 1 to `most`: products with an int32 fit int64."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise ArgumentTypeError(f"{name}: expected an integer; got {type(value).__name__}")
    if value < 1:
        raise ArgumentValueError(f"{name}: expected at least 1; got {_number(value)}")
    if value > most:
        raise ArgumentValueError(f"{name}: expected at most {most}; got {_number(value)}")


def as_float(name: str, value: object, expected: str = "a float") -> float:
    """`value`, a finite number, as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise ArgumentTypeError(f"{name}: expected {expected}; got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # of an int that float64 does not hold
        number = math.inf
    if not is_dynamo_compiling() and not math.isfinite(number):
        raise ArgumentValueError(f"{name}: expected a finite number; got {_number(value)}")
    return number


def _number(value: Any) -> str:
    """A number as messages write it; Python does not write an int of any size."""
    is_long = isinstance(value, int) and value.bit_length() > 64
    return f"an integer of {value.bit_length()} bits" if is_long else str(value)


def require_bool(name: str, value: object) -> None:
    """`value` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected a bool; got {type(value).__name__}")


def wants_positions(ids: object) -> bool:
    """Whether `ids` asks the indexer for token positions; otherwise it asks for cache slots."""
    if ids == "slot":
        return False
    if ids == "position":
        return True
    error = ArgumentValueError if isinstance(ids, str) else ArgumentTypeError
    raise error(f'ids: expected "slot" or "position"; got {ids!r}')


def scale_or_default(sm_scale: float | None, q: Tensor) -> float:
    """`sm_scale`, or d_qk ** -0.5 where it is None."""
    if sm_scale is None:
        require_tensor("q", q)
        if not q.dim() or not q.shape[-1]:
            raise ArgumentValueError(f"q: expected shape [S, H, d_qk]; got {_shape(q)}")
        return float(q.shape[-1] ** -0.5)
    return as_float("sm_scale", sm_scale, "a float or None")


def drop_kv_head(name: str, tensor: Tensor, layout: str) -> Tensor:
    """`tensor` (n, d) or (n, 1, d) as (n, d): MLA in MQA form has one kv head."""
    require_rank(name, tensor, (2, 3), layout)
    if tensor.dim() == 2:
        return tensor
    if tensor.shape[1] != 1:
        raise ArgumentValueError(
            f"{name}: expected one kv head, shape {layout}; got {_shape(tensor)}"
        )
    return tensor.squeeze(1)


def kv_rows(name: str, kv: Tensor) -> Tensor:
    """Every row of `kv` as (n, d): MLA in MQA form has one kv head, and pages follow each other.

    Packed pages stay pages (num_pages, page_size, bytes), unless they have one row or are whole
    rows that follow each other, which 656 bytes tell.

    Args:
        kv: (n, d), (n, 1, d), or pages (num_pages, 64, d) or (num_pages, page_size, 1, d).
    """
    layout = (
        "[S_kv, d], [S_kv, 1, d] or pages, "
        f"[num_pages, {PAGE_SIZE}, d] or [num_pages, page_size, 1, d]"
    )
    require_rank(name, kv, (2, 3, 4), layout)
    heads = {2: 1, 3: 1 if kv.shape[1] == PAGE_SIZE else kv.shape[1], 4: kv.shape[-2]}[kv.dim()]
    if heads != 1:
        raise ArgumentValueError(f"{name}: expected one kv head, shape {layout}; got {_shape(kv)}")
    if kv.dim() == 2:
        return kv
    if kv.dim() == 3 and kv.shape[1] == 1:
        return kv.squeeze(1)
    pages = kv.squeeze(2) if kv.dim() == 4 else kv
    if is_packed(kv):
        return _packed_pages(pages)
    if pages.shape[0] > 1 and pages.stride(0) != pages.shape[1] * pages.stride(1):
        raise ArgumentValueError(
            f"{name}: expected pages that follow each other in memory, as ids count their rows "
            f"through; got shape {list(kv.shape)} with strides {list(kv.stride())}"
        )
    return pages.flatten(0, 1)


def _packed_pages(pages: Tensor) -> Tensor:
    """Packed pages as rows (n, bytes) where these are alike, else as they are. The format is not
    known here: one of these bytes that is split keeps the pages of all."""
    num_pages, page_size, row_bytes = pages.shape
    if page_size == 1:
        return pages[:, 0]
    adjacent = num_pages <= 1 or pages.stride(0) == page_size * pages.stride(1)
    if not adjacent or row_bytes != V32.row_bytes or has_split_rows(row_bytes):
        return pages
    return pages.flatten(0, 1)


def row_format_of(
    name: str, kv: Tensor, kv_format: str | None, *, alone: bool = True
) -> RowFormat | None:
    """Return the format of packed rows `kv` in any form; None of other rows, which have no name.

    Args:
        alone: as for `find_row_format`; else other rows may come with a name.
    """
    if not is_packed(kv):
        if kv_format is not None and alone:
            raise ArgumentValueError(
                f"kv_format: {name} has dtype {dtype_name(kv.dtype)}, not packed rows; "
                f"got {kv_format!r}"
            )
        return None
    form = find_row_format(name, kv.shape, kv_format, alone=alone)
    has_pages = kv.dim() > 2 and kv.shape[1] > 1 and kv.numel() > 0
    if form.split and has_pages and not kv[0].is_contiguous():
        raise ArgumentValueError(
            f"{name}: expected pages without gaps inside, as {form.name} has all data of a page "
            f"before its scales; got {_shape(kv)} with strides {list(kv.stride())}"
        )
    return form


def as_int32(tensor: Tensor, lowest: int) -> Tensor:
    """`tensor` of int64 (what torch.topk returns) as int32, others as they are.

    Values below `lowest`, which is invalid or means nothing, become it; values that int32 does not
    hold become its largest, which no tensor is long enough for.
    """
    if tensor.dtype != torch.int64:
        return tensor
    return tensor.clamp(lowest, INT32_MAX).to(torch.int32)


_LOWEST_SLOTS = {"indices": -1, "ends": -1, "topk_length": 0}
"""Fields of a list of slots, each with the lowest value that means something."""


def int32_slots(operands: Any) -> Any:
    """A tuple of operands with lists of int32: ids (S, topk) instead of (S, 1, topk), the starts of
    a range (S, 1) instead of (S,)."""
    indices, length = operands.indices, operands.topk_length
    if (
        indices.dtype is torch.int32
        and indices.dim() == 2
        and (length is None or length.dtype is torch.int32)
        and getattr(operands, "extra_indices", None) is getattr(operands, "ends", None) is None
    ):
        return operands
    changed: dict[str, Tensor] = {}
    for source in ("", "extra_"):
        for field, lowest in _LOWEST_SLOTS.items():
            name = source + field
            given = getattr(operands, name, None)
            if given is None:
                continue
            slots = given
            if field == "indices" and slots.dim() != 2:
                if slots.dim() == 1 and getattr(operands, f"{source}ends", None) is not None:
                    slots = slots[:, None]
                else:
                    slots = drop_kv_head(name, slots, "[S, topk] or [S, 1, topk]")
            if slots.dtype is not torch.int32:
                require_dtype(name, slots, torch.int32, torch.int64)
                slots = as_int32(slots, lowest)
            if slots is not given:
                changed[name] = slots
    return operands._replace(**changed) if changed else operands


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"


def require_offsets(name: str, offsets: Tensor) -> int:
    """The last of `offsets`, which begin at 0, do not decrease and fit int32."""
    values = offsets.tolist()
    if values[0] != 0:
        raise ArgumentValueError(
            f"{name}: expected offsets that begin at 0; got {name}[0] = {values[0]}"
        )
    for sequence, (before, value) in enumerate(pairwise(values), 1):
        if value < before:
            raise ArgumentValueError(
                f"{name}: expected offsets that do not decrease; "
                f"got {name}[{sequence}] = {value} after {before}"
            )
        if value > INT32_MAX:
            raise ArgumentValueError(
                f"{name}: expected at most {INT32_MAX} (int32 rows); "
                f"got {name}[{sequence}] = {value}"
            )
    last: int = values[-1]
    return last


def bounded_offsets(offsets: Tensor, most: int) -> Tensor:
    """`offsets` that are not read, within [0, most]; one that decreases is as the largest before.

    What lies before the first or from the last on belongs to no sequence then. Offsets name rows:
    those of a slice are not moved to 0, as nothing says whether the rows were sliced, too.
    """
    return offsets.clamp(0, most).cummax(0).values
