"""The processes that torchrun started: connect them, and tell the one that reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flashdsa.errors import ArgumentValueError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def mesh_of_processes() -> Iterator[DeviceMesh]:
    """A mesh of all processes, on gloo.

    Raises:
        ArgumentValueError: this process was not started by torchrun.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ArgumentValueError(
            "--context-parallel: expected several processes, e.g. torchrun --nproc-per-node 2 -m "
            "flashdsa.demo --context-parallel; this process was not started by torchrun"
        )
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
