"""A `ParallelStyle`: `parallelize_module` makes an attention module see the keys of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from flashdsa.distributed.agree import agree
from flashdsa.distributed.dtensors import Spread, as_dtensor, local_parts
from flashdsa.distributed.group import process_group
from flashdsa.distributed.latents import gather_latents
from flashdsa.distributed.layout import SequenceLayout
from flashdsa.errors import ArgumentTypeError

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
