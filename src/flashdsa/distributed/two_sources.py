"""Two sources whose tokens are spread over ranks: windows and entries across the ranks' borders.

A rank computes what ends with its tokens: the windows of its queries, and the entries that its
tokens complete. Both reach back to tokens of other ranks, which send copies of those rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.dispatch.checks import require_positive, require_rank, require_shape, require_tensor
from flashdsa.dispatch.dtypes import sum_dtype
from flashdsa.distributed.agree import agreement
from flashdsa.distributed.collectives import all_to_all
from flashdsa.distributed.group import Group, describe, group_of, require_device_of_group
from flashdsa.distributed.layout import PADDING, SequenceLayout, require_layout
from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from flashdsa.ops.entries import compress_kv

P = ParamSpec("P")
T = TypeVar("T")


class _Borders(NamedTuple):
    """Rows that a rank computes with, of its own and from others; all on the layout's device.

    Attributes:
        send: [ranks * n] local rows for each rank, the first `given` of n; then row 0.
        given: rows that each rank gets from this one.
        place: [M] each row's place among the local rows and, behind them, the [ranks * n] received.
    """

    send: Tensor
    given: tuple[int, ...]
    place: Tensor


class _Windows(NamedTuple):
    """Borders of windows of tokens, and the rows [starts, ends) [num_local] of each query."""

    borders: _Borders
    starts: Tensor
    ends: Tensor


class _Entries(NamedTuple):
    """Borders of windows that entries pool.

    Attributes:
        positions: [M] each row's place in its document.
        segments: bounds of the windows, a document's each; the last is their number.
        own: the windows whose entries are this rank's. padding: rows after these entries.
    """

    borders: _Borders
    positions: Tensor
    segments: tuple[int, ...]
    own: Tensor
    padding: int


def context_parallel_window(
    kv_local: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, layout: SequenceLayout, window: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The rows that this rank's queries see in their windows: its own and its neighbours' last
    ones. See "Tokens on several ranks" in "DeepSeek Sparse Attention".

    Args:
        kv_local: (layout.num_local, d), any floating dtype.
        mesh: a 1-D DeviceMesh or a ProcessGroup, the layout's.
        layout: of the tokens.
        window: tokens that a query sees, its own among them; of its own document only.

    Returns:
        rows (M, d), differentiable, and the range (starts, ends), each (layout.num_local,) int32,
        of each query: `extra_kv` and `extra_indices` of `sparse_mla`. Padding sees nothing.

    Raises:
        TypeError, ValueError: a wrong argument here or on another rank, or ranks that differ.
    """
    group = group_of(mesh, "context_parallel_window")
    with agreement(group, kv_local) as facts:
        require_positive("window", window)
        _require_rows("kv_local", kv_local, layout, group.processes)
        facts |= {"kv_local": describe(kv_local), "window": str(window), "layout": layout.summary}
        facts["gradient"] = str(torch.is_grad_enabled() and kv_local.requires_grad)
    plan = _windows(layout, window)
    return _gather(kv_local, plan.borders, group), (plan.starts, plan.ends)


class PoolingOptions(TypedDict, total=False):
    """The keywords of `flashdsa.compress_kv` that are the same on every rank."""

    ape: Tensor | None
    norm_weight: Tensor | None
    eps: float
    rotation: tuple[Tensor, Tensor] | None
    backend: str


def context_parallel_compress_kv(
    kv_local: Tensor,
    gate_local: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    layout: SequenceLayout,
    ratio: int,
    overlap: bool = False,
    **pooling: Unpack[PoolingOptions],
) -> Tensor:
    """`flashdsa.compress_kv` of tokens on several ranks: the entries that this rank's tokens
    complete, with the bits of one process.

    Args:
        kv_local, gate_local: (layout.num_local, width), of one dtype.
        mesh: a 1-D DeviceMesh or a ProcessGroup, the layout's.
        layout: of the tokens; each document is a sequence.
        ratio, overlap: as for `compress_kv`.
        pooling: `ape`, `norm_weight`, `eps`, `rotation` and `backend` likewise, the same on every
            rank. The gradients of `ape` and `norm_weight` are of this rank's entries: add them over
            the ranks, as those of every weight.

    Returns:
        Entries (layout.entries(ratio).num_local, d); `layout.entries(ratio).unshard` gives all of
        them, in order.

    Raises:
        TypeError, ValueError: a wrong argument here or on another rank, or ranks that differ.
        NotImplementedError: no implementation serves the call.
    """
    group = group_of(mesh, "context_parallel_compress_kv")
    with agreement(group, kv_local) as facts:
        require_positive("ratio", ratio)
        _require_rows("kv_local", kv_local, layout, group.processes)
        require_tensor("gate_local", gate_local)
        require_shape("gate_local", gate_local, kv_local.shape, "[num_local, width]")
        if overlap and kv_local.shape[1] % 2:
            raise ArgumentValueError(
                f"kv_local: expected an even width with overlap; got {kv_local.shape[1]}"
            )
        unknown = [name for name in pooling if name not in PoolingOptions.__annotations__]
        if unknown:
            raise ArgumentTypeError(f"{unknown[0]}: no keyword of context_parallel_compress_kv")
        longest = max(end - begin for begin, end in pairwise(layout.cu_seqlens)) // ratio * ratio
        rotation = pooling.get("rotation")
        if rotation is not None and len(rotation[0]) <= longest - ratio:
            raise ArgumentValueError(
                f"rotation: expected tables of at least {longest - ratio + 1} positions; "
                f"got {len(rotation[0])}"
            )
        tensors = {"kv_local": kv_local, "gate_local": gate_local}
        tensors |= {name: pooling.get(name) for name in ("ape", "norm_weight")}  # type: ignore[misc]
        facts |= {name: describe(value) for name, value in tensors.items()}
        facts |= {name: str(pooling.get(name)) for name in ("eps", "backend")}
        facts |= {"ratio": str(ratio), "overlap": str(overlap), "layout": layout.summary}
        facts["rotation"] = str(rotation is not None)
        wanted = (name for name, x in tensors.items() if x is not None and x.requires_grad)
        facts["gradients"] = ", ".join(wanted) if torch.is_grad_enabled() else ""
    plan = _entries(layout, ratio, overlap)
    both = torch.cat((kv_local, gate_local), dim=1)
    kv, gate = _gather(both, plan.borders, group).chunk(2, dim=1)
    options: dict[str, Any] = {**pooling, "rotation": None}
    found = []
    for first, last in zip(plan.segments[:-1], plan.segments[1:], strict=True):
        tokens = slice(first * ratio, last * ratio)
        if rotation is not None and first < last:  # a rank without entries has gradients of 0
            at = plan.positions[tokens]
            options["rotation"] = rotation[0][at], rotation[1][at]
        entries = compress_kv(kv[tokens], gate[tokens], ratio=ratio, overlap=overlap, **options)
        assert entries is not None
        found.append(entries)
    own = torch.cat(found).index_select(0, plan.own)
    return torch.nn.functional.pad(own, (0, 0, 0, plan.padding))


def _require_rows(
    name: str, value: Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> None:
    """`value` has the layout's rows, on a device that the group communicates."""
    require_layout(layout)
    layout.require_place(group)
    require_tensor(name, value)
    require_rank(name, value, (2,), "[num_local, d]")
    require_shape(name, value, (layout.num_local, *value.shape[1:]), "[num_local, d]")
    require_device_of_group(name, value.device, group)


class _Gather(torch.autograd.Function):
    """Copies rows from other ranks; the gradients of the copies go back and are added in fp32."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, borders: _Borders, group: Group) -> Tensor:
        ctx.borders, ctx.group, ctx.rows = borders, group, len(local)
        received = _exchange(local[borders.send], group)
        return torch.cat((local, received)).index_select(0, borders.place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), borders = gradients, ctx.borders
        # A place is one row's at most, and a row is given to a rank once: sums have one order.
        every = gradient.new_zeros(ctx.rows + len(borders.send), *gradient.shape[1:])
        every[borders.place] = gradient
        total = every[: ctx.rows].to(sum_dtype(gradient.dtype))
        returned = _exchange(every[ctx.rows :], ctx.group).chunk(ctx.group.size)
        sent = borders.send.chunk(ctx.group.size)
        for rows, share, count in zip(sent, returned, borders.given, strict=True):
            total[rows[:count]] += share[:count]
        return total.to(gradient.dtype), None, None


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """Parts of all ranks; nothing is sent where no rank needs a row."""
    return all_to_all(parts, group) if len(parts) else parts


def _gather(local: Tensor, borders: _Borders, group: Group) -> Tensor:
    """The rows that this rank computes with."""
    apply: Any = _Gather.apply
    rows: Tensor = apply(local, borders, group)
    return rows


def _borders(layout: SequenceLayout, needed: list[Tensor]) -> _Borders:
    """The exchange after which each rank r has the rows of the tokens `needed[r]`, in order."""
    rows, me = layout.rows.cpu().long(), layout.rank
    owners, local = rows // layout.num_local, rows % layout.num_local
    others = range(layout.num_ranks)
    counts = [
        torch.bincount(owners[tokens], minlength=layout.num_ranks).index_fill_(
            0, torch.tensor(taker, dtype=torch.int64), 0
        )
        for taker, tokens in enumerate(needed)
    ]
    count = int(torch.stack(counts).max())
    given, send = [], torch.zeros(layout.num_ranks, count, dtype=torch.int64)
    for taker, tokens in enumerate(needed):
        mine = tokens[owners[tokens] == me] if taker != me else tokens[:0]
        given.append(len(mine))
        send[taker, : len(mine)] = local[mine]
    tokens = needed[me]
    place = local[tokens]
    for giver in others:
        here = owners[tokens] == giver
        if giver != me:
            place[here] = layout.num_local + giver * count + torch.arange(int(here.sum()))
    device = layout.rows.device
    return _Borders(send.flatten().to(device), tuple(given), place.to(device))


def _beginnings(layout: SequenceLayout) -> Tensor:
    """[seq_len] the first token of each token's document."""
    bounds = torch.tensor(layout.cu_seqlens, dtype=torch.int64)
    return bounds[:-1].repeat_interleave(bounds.diff())


def _while_the_layout_lives(
    make: Callable[Concatenate[SequenceLayout, P], T],
) -> Callable[Concatenate[SequenceLayout, P], T]:
    """Remembers results of `make` by layout, and does not keep the layout: it holds its group,
    which must end before the interpreter does."""
    known: WeakKeyDictionary[SequenceLayout, dict[object, T]] = WeakKeyDictionary()

    def remembered(layout: SequenceLayout, /, *options: P.args, **none: P.kwargs) -> T:
        of_layout = known.setdefault(layout, {})
        if options not in of_layout:
            of_layout[options] = make(layout, *options, **none)
        return of_layout[options]

    return remembered


@_while_the_layout_lives
def _windows(layout: SequenceLayout, window: int) -> _Windows:
    first = torch.maximum(torch.arange(layout.seq_len) + 1 - window, _beginnings(layout))
    needed = []
    for tokens in layout.tokens.cpu().view(layout.num_ranks, -1):
        own = tokens[tokens != PADDING]
        opened = torch.zeros(layout.seq_len + 1, dtype=torch.int64)
        opened.index_add_(0, first[own], torch.ones_like(own))
        opened.index_add_(0, own + 1, -torch.ones_like(own))
        needed.append((opened.cumsum(0) > 0).nonzero().flatten())
    own = layout.positions.cpu()
    bounds = torch.stack((first[own.clamp_min(0)], own + 1))
    ranges = torch.searchsorted(needed[layout.rank], bounds).masked_fill_(own < 0, 0)
    starts, ends = ranges.int().to(layout.positions.device)
    return _Windows(_borders(layout, needed), starts, ends)


@_while_the_layout_lives
def _entries(layout: SequenceLayout, ratio: int, overlap: bool) -> _Entries:
    """The windows of `ratio` tokens that the layout's entries pool."""
    entries, begins = layout.entries(ratio), _beginnings(layout)
    bounds = [torch.tensor(one.cu_seqlens, dtype=torch.int64) for one in (layout, entries)]
    begin, number = (one[:-1].repeat_interleave(bounds[1].diff()) for one in bounds)
    first = begin + ratio * (torch.arange(entries.seq_len) - number)
    own = [one[one != PADDING] for one in entries.tokens.cpu().view(layout.num_ranks, -1)]
    pooled = [
        torch.cat((one, one[first[one] > begins[first[one]]] - 1)).unique() if overlap else one
        for one in own
    ]
    needed = [(first[one][:, None] + torch.arange(ratio)).flatten() for one in pooled]
    windows = pooled[layout.rank]
    token = needed[layout.rank]
    position = token - begins[token]
    opens = (position[::ratio] == 0).nonzero().flatten().tolist()
    segments = 0, *sorted({*opens} - {0}), len(windows)
    device = layout.positions.device
    where = torch.searchsorted(windows, own[layout.rank]).to(device)
    padding = entries.num_local - len(where)
    return _Entries(_borders(layout, needed), position.to(device), segments, where, padding)
