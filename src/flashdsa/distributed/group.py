"""The process group of a mesh: its name, size, this rank, devices; what ranks tell of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.dispatch.checks import dtype_name
from flashdsa.errors import ArgumentTypeError, ArgumentValueError

Mesh = DeviceMesh | dist.ProcessGroup | tuple[int, int]
"""Mesh or group of a layout; (rank, number of ranks) if nothing communicates."""


class Group(NamedTuple):
    """A process group as torch's functional collectives name it, and the call that uses it."""

    name: str
    size: int
    rank: int
    call: str

    @property
    def processes(self) -> dist.ProcessGroup:
        group_name: Any = self.name
        return _resolve_process_group(group_name)


def process_group(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of a 1-D mesh, or the group itself.

    Raises:
        ArgumentTypeError, ArgumentValueError: something else, or a mesh of more dimensions.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f'mesh["{names[0]}"]' if names else "one of its dimensions"
            raise ArgumentValueError(
                f"mesh: expected 1 dimension, e.g. {example}; got {mesh.ndim}"
                + (f" ({', '.join(names)})" if names else "")
            )
        return mesh.get_group()
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise ArgumentTypeError(
        f"mesh: expected a DeviceMesh or a ProcessGroup; got {type(mesh).__name__}"
    )


def group_of(mesh: DeviceMesh | dist.ProcessGroup, call: str = "flashdsa") -> Group:
    """The mesh's group; `call`, the public function, is what its errors begin with."""
    group = process_group(mesh)
    return Group(group.group_name, group.size(), group.rank(), call)


def serves(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the group has a backend for tensors of such devices."""
    try:
        group._get_backend(torch.device(device_type))
    except RuntimeError:
        return False
    return True


def require_device_of_group(name: str, device: torch.device, group: dist.ProcessGroup) -> None:
    """The group communicates tensors of `device`, the one of argument `name`."""
    if not serves(group, device.type):
        raise ArgumentValueError(
            f"{name}: expected a device that the group communicates ({dist.get_backend(group)}); "
            f"got {device}"
        )


def device_of_group(mesh: DeviceMesh | dist.ProcessGroup) -> torch.device:
    """Return the device of the group's tensors: the mesh's, or the GPU if the group serves one."""
    on_gpu = mesh.device_type == "cuda" if isinstance(mesh, DeviceMesh) else serves(mesh, "cuda")
    if on_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def describe(value: object, *, of_each_row: bool = False) -> str:
    """ "bfloat16 [64, 576]" of a tensor; with `of_each_row` without the first dimension."""
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    sizes = [str(size) for size in value.shape]
    if of_each_row and sizes:
        sizes[0] = "any"
    return f"{dtype_name(value.dtype)} [{', '.join(sizes)}] on {value.device.type}"
