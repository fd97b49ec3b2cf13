"""DTensors in and out: sharded by rows on the mesh of the call, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
