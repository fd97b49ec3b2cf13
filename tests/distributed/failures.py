"""Wrong calls, dead and hung ranks: every rank gets an error, and nothing hangs."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    gather_latents,
)
from flashdsa.distributed.agree import agree
from flashdsa.errors import ArgumentTypeError, RankError
from tests.distributed.inputs import require_error

DEAD = 7
"""Exit code of the rank that dies on purpose."""


ALONE = "context_parallel_sparse_mla: no answer from rank 1 (this is rank 0 of 2): "


def _attend(rows: int = 64, topk: int = 3, **options: object) -> torch.Tensor:
    dtype = options.pop("dtype", torch.float32)
    q = torch.ones(2, 2, 8, dtype=dtype)  # type: ignore[call-overload]
    kv = torch.ones(rows, 8, dtype=dtype)  # type: ignore[call-overload]
    indices = torch.zeros(2, topk, dtype=torch.int32)
    group = options.pop("group", dist.group.WORLD)
    return context_parallel_sparse_mla(q, kv, indices, group, d_v=4, **options)  # type: ignore[arg-type]


def check_ranks_that_differ() -> None:
    """Each rank raises with both values and their ranks; the group serves the next call."""
    rank, group = dist.get_rank(), dist.group.WORLD
    first = rank == 0
    require_error(
        lambda: _attend(rows=64 if first else 128),
        ValueError,
        "kv_local: float32 [64, 8] on cpu on rank 0, float32 [128, 8] on cpu on rank 1",
    )
    require_error(
        lambda: _attend(topk=3 if first else 4, dtype=torch.float32 if first else torch.float64),
        ValueError,
        "indices: int32 [any, 3] on cpu on rank 0, int32 [any, 4] on cpu on rank 1",
        "q_local: float32",
    )
    require_error(
        lambda: _attend(deterministic=first), ValueError, "True on rank 0, False on rank 1"
    )
    require_error(
        lambda: _attend(save_gathered=first), ValueError, "save_gathered: True on rank 0, False on"
    )
    zigzag, contiguous = SequenceLayout.zigzag, SequenceLayout.contiguous
    layout = (zigzag if first else contiguous)(256, group)
    require_error(
        lambda: _attend(rows=128, layout=layout),
        ValueError,
        "layout: zigzag of 256 tokens on 2 ranks",
        "contiguous of 256 tokens on 2 ranks",
    )
    require_error(
        lambda: gather_latents(torch.zeros(64 if first else 65, 8), group),
        ValueError,
        "kv_local: float32 [64, 8] on cpu on rank 0, float32 [65, 8] on cpu on rank 1",
    )
    # Another operation on the other rank.
    require_error(
        lambda: gather_latents(torch.zeros(64, 8), group) if first else _attend(),
        ValueError,
        "operation: gather_latents on rank 0, context_parallel_sparse_mla on rank 1",
    )
    layout = zigzag(200, group)
    require_error(
        lambda: context_parallel_topk_indexer(
            torch.zeros(layout.num_local, 4, 128).to(torch.float8_e4m3fn),
            torch.zeros(layout.num_local, 128),
            torch.zeros(layout.num_local, 4),
            group,
            layout=layout,
            topk=5 + rank,
        ),
        ValueError,
        "topk: 5 on rank 0, 6 on rank 1",
    )
    assert torch.equal(_attend(), torch.ones(2, 2, 4))


def check_an_error_of_one_rank() -> None:
    """The rank with the wrong argument raises its own error, the other one names it."""
    first = dist.get_rank() == 0
    wrong: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, ValueError, "topk_length: expected"),
        ({"grad_wire": "fp8"}, ValueError, 'grad_wire: expected "fp32" or "bf16"; got'),
        ({"grad_wire": "bf16"}, TypeError, 'grad_wire: "bf16" is for bfloat16 inputs'),
        ({"ids": "positions"}, ValueError, 'ids: "positions" needs a layout'),
        ({"attn_sink": torch.zeros(9)}, ValueError, "attn_sink: expected"),
        ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a finite number"),
        ({"backend": "sm90"}, NotImplementedError, "backend 'sm90' cannot serve"),
        ({"layout": SequenceLayout.zigzag(64, (1, 3))}, ValueError, "layout: expected one of rank"),
    ]
    for options, kind, text in wrong:
        if first:
            require_error(lambda o=options: _attend(**o), kind, text)  # type: ignore[misc]
        else:
            require_error(_attend, ValueError, "wrong arguments on another rank: rank 0: ", text)
    # Also where the descriptions are the same.
    own = ArgumentTypeError("only here") if first else None
    require_error(
        lambda: agree(dist.group.WORLD, torch.zeros(1), {"a": "b"}, own),
        TypeError if first else ValueError,
        "only here",
    )
    assert torch.equal(_attend(), torch.ones(2, 2, 4))


def check_meshes() -> None:
    """A mesh of two dimensions, and what is no mesh."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    require_error(lambda: _attend(group=mesh), ValueError, 'e.g. mesh["dp"]; got 2 (dp, cp)')
    require_error(
        lambda: _attend(group="cp"), TypeError, "mesh: expected a DeviceMesh or a Process"
    )
    # A dimension of size 1 communicates nothing and gives the plain operation.
    assert torch.equal(_attend(group=mesh["dp"]), torch.ones(2, 2, 4))


def _step(group: dist.ProcessGroup, compiled: bool = False) -> torch.Tensor:
    """What is to be gone back from."""
    q, kv = torch.ones(2, 2, 8, requires_grad=True), torch.ones(64, 8, requires_grad=True)
    slots = torch.zeros(2, 3, dtype=torch.int32)

    def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return context_parallel_sparse_mla(q, kv, slots, group, d_v=4)

    return (torch.compile(attend, backend="aot_eager") if compiled else attend)(q, kv).sum()


def check_a_hung_rank() -> None:
    """Rank 1 does not come, or not back, or not in compiled code: rank 0 gets an error when the
    group's timeout is over, which names the call and the rank, and has torch's as its cause."""
    for part, timeout in (("forward", 1.0), ("compiled", 2.0), ("backward", 1.0)):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout))
        loss = _step(group, part == "compiled")
        if dist.get_rank() == 1:
            time.sleep(timeout + 0.5)
            continue
        started = time.monotonic()
        error = require_error(
            loss.backward if part == "backward" else lambda: _step(group, part == "compiled"),  # noqa: B023
            RankError,
            ALONE,
        )
        assert type(error.__cause__) is RuntimeError and "\n" not in str(error)
        assert timeout - 0.5 < time.monotonic() - started < timeout + 10


def check_silent_ranks_of_four() -> None:
    """Ranks 1 and 2 do not come: the others name both."""
    group, rank = dist.new_group(timeout=timedelta(seconds=4)), dist.get_rank()
    _step(group)
    if rank in (1, 2):
        time.sleep(6)
        return
    text = f"no answer from ranks 1, 2 (this is rank {rank} of 4): "
    require_error(lambda: _step(group), RankError, text)


def check_a_dead_rank_of_four() -> None:
    """Rank 2 is gone: the others name it, and it alone."""
    if (rank := dist.get_rank()) == 2:
        sys.stdout.flush()
        os._exit(DEAD)
    text = f"no answer from rank 2 (this is rank {rank} of 4): "
    require_error(lambda: _step(dist.group.WORLD), RankError, text)
    time.sleep(2)


def check_a_dead_rank() -> None:
    """Rank 1 is gone: rank 0 gets an error long before the timeout."""
    if dist.get_rank() == 1:
        sys.stdout.flush()
        os._exit(DEAD)
    started = time.monotonic()
    require_error(_attend, RankError, ALONE)
    require_error(lambda: _attend(grad_wire="fp8"), ValueError, "grad_wire")  # its own, if it can
    assert time.monotonic() - started < 30
