"""A `ParallelStyle`: `parallelize_module` makes an attention module see the keys of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from flashdsa.distributed.dtensors import Spread, as_dtensor, local_parts
from flashdsa.distributed.layout import SequenceLayout
from flashdsa.distributed.sparse_mla import gather_latents
from flashdsa.errors import ArgumentTypeError

NAMES = ("q", "kv", "indices")


class ContextParallelSparseMLA(ParallelStyle):
    """For modules whose forward takes (q, kv, indices, ...), by place or by name, and attends.

    Before each call kv becomes the rows of all ranks, and token positions become rows if a layout
    is given; the module stays as it is. DTensors, `Shard(0)`, come in as their local parts, and O
    goes out as one. kv's gradient: each rank's share in kv's dtype, added in fp32 in rank order.

    Example:
        ``parallelize_module(model, mesh["cp"], {"layers.*.inner_attention":
        ContextParallelSparseMLA(layout)})``
    """

    def __init__(self, layout: SequenceLayout | None = None) -> None:
        """With a `layout`, indices are token positions; without, rows of the gathered kv."""
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        spreads: list[Spread | None] = []

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            missing = [name for name in NAMES if not isinstance(given.get(name), Tensor)]
            if missing:
                raise ArgumentTypeError(
                    f"{missing[0]}: {type(module).__name__}.forward was called without this "
                    f"tensor; ContextParallelSparseMLA expects {', '.join(NAMES)}"
                )
            parts, spread = local_parts(device_mesh, {name: given[name] for name in NAMES})
            q, kv, indices = parts
            spreads.append(spread)
            if self.layout is not None:
                indices = self.layout.key_row(indices)
            given |= {"q": q, "kv": gather_latents(kv, device_mesh), "indices": indices}
            in_order = [given.pop(name) for name in NAMES[: len(args)]]
            return (*in_order, *args[len(NAMES) :]), given

        def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
            return as_dtensor(out, spreads.pop())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module
