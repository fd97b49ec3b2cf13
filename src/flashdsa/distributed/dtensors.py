"""DTensors in and out, sharded by rows on the mesh of the call; and a `ParallelStyle`.

`parallelize_module` makes an attention module see the keys of all ranks by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from flashdsa.distributed.agree import agree
from flashdsa.distributed.group import process_group
from flashdsa.distributed.latents import gather_latents
from flashdsa.distributed.layout import SequenceLayout
from flashdsa.errors import ArgumentTypeError, ArgumentValueError


class Spread(NamedTuple):
    """Data to make a DTensor of a result: the mesh, and the number of rows of all ranks."""

    mesh: DeviceMesh
    num_rows: int


def local_parts(
    mesh: DeviceMesh | dist.ProcessGroup, arguments: Mapping[str, Tensor]
) -> tuple[list[Tensor], Spread | None]:
    """This rank's part of each argument; the first, if a DTensor, says how the result is spread.

    Raises:
        ArgumentTypeError: some arguments are DTensors and others plain tensors, or `mesh` is none.
        ArgumentValueError: a DTensor on another mesh, or placed otherwise than `Shard(0)`.
    """
    spread = [name for name, one in arguments.items() if isinstance(one, DTensor)]
    if not spread:
        return list(arguments.values()), None
    plain = [name for name in arguments if name not in spread]
    if plain:
        raise ArgumentTypeError(
            f"{plain[0]}: expected a DTensor, as {spread[0]} is; got a plain tensor"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh: expected the DeviceMesh of the DTensors; got {type(mesh).__name__}"
        )
    parts = []
    for name, one in arguments.items():
        assert isinstance(one, DTensor)
        if one.device_mesh != mesh:
            raise ArgumentValueError(
                f"{name}: expected a DTensor on the mesh of the call, {mesh}; "
                f"got one on {one.device_mesh}"
            )
        if tuple(one.placements) != (Shard(0),):
            raise ArgumentValueError(
                f"{name}: expected a DTensor placed as Shard(0); got {list(one.placements)}"
            )
        parts.append(one.to_local())
    first = next(iter(arguments.values()))
    return parts, Spread(mesh, first.shape[0])


def as_dtensor(local: Tensor, spread: Spread | None) -> Tensor:
    """`local` as the part of a DTensor, `Shard(0)`; as it is where `spread` is None."""
    if spread is None:
        return local
    shape = (spread.num_rows, *local.shape[1:])
    return DTensor.from_local(
        local,
        spread.mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=local.new_empty(0, *local.shape[1:]).stride(),
    )


NAMES = ("q", "kv", "indices")


class ContextParallelSparseMLA(ParallelStyle):
    """Style for attention modules whose forward takes (q, kv, indices, ...), by position or name.

    Before each call kv becomes the rows of all ranks, and token positions become rows if a layout
    is given; the module stays as it is. DTensors, `Shard(0)`, come in as their local parts, and O
    goes out as one. kv's gradient: each rank's share in kv's dtype, added in fp32 in rank order.

    Example:
        ``parallelize_module(model, mesh["cp"], {"layers.*.inner_attention":
        ContextParallelSparseMLA(layout)})``
    """

    def __init__(self, layout: SequenceLayout | None = None) -> None:
        """Take indices as token positions with a `layout`, else as rows of the gathered kv."""
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        spreads: list[Spread | None] = []

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            try:
                (q, kv, indices), spread = self._inputs(module, device_mesh, given)
            except Exception as error:
                # The other ranks wait in the gather, to agree on it.
                if not torch.compiler.is_compiling():
                    agree(process_group(device_mesh), None, {"operation": "gather_latents"}, error)
                raise
            given |= {"q": q, "kv": gather_latents(kv, device_mesh), "indices": indices}
            spreads.append(spread)
            in_order = [given.pop(name) for name in NAMES[: len(args)]]
            return (*in_order, *args[len(NAMES) :]), given

        def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
            return as_dtensor(out, spreads.pop())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module

    def _inputs(
        self, module: nn.Module, mesh: DeviceMesh, given: Mapping[str, Any]
    ) -> tuple[list[Tensor], Spread | None]:
        """q, kv and indices, this rank's parts, and how the result is spread."""
        missing = [name for name in NAMES if not isinstance(given.get(name), Tensor)]
        if missing:
            raise ArgumentTypeError(
                f"{missing[0]}: {type(module).__name__}.forward was called without this "
                f"tensor; ContextParallelSparseMLA expects {', '.join(NAMES)}"
            )
        parts, spread = local_parts(mesh, {name: given[name] for name in NAMES})
        if self.layout is not None:
            parts[2] = self.layout.key_row(parts[2])
        return parts, spread
