"""The demo's training on all ranks against the same training in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashdsa.demo.context_parallel import make_trainer, untrained
from flashdsa.demo.options import DemoOptions
from tests.distributed.checks import norm_error


def check_demo_trains_as_one_process() -> None:
    options = DemoOptions(steps=2, window=200, num_queries=70, topk=48, num_heads=2, batch=2)
    text = torch.randint(97, 123, (3000,), generator=torch.Generator().manual_seed(3)).byte()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    one, all_ranks = (
        make_trainer(*untrained(options), text, options, where) for where in (None, mesh)
    )
    expected, found = one.step(), all_ranks.step()
    assert abs(found.language - expected.language) <= 2e-6 * expected.language
    assert abs(found.indexer - expected.indexer) <= 2e-6 * expected.indexer
    for mine, wanted in zip(all_ranks.parameters, one.parameters, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        assert norm_error(mine.grad, wanted.grad) <= 1e-3, tuple(mine.shape)
    # Adam divides small gradients by their size, and with them the order of their sums. The first
    # step was the indexer's warm-up, the second one is of the sparse stage.
    expected, found = one.step(), all_ranks.step()
    assert abs(found.language - expected.language) <= 1e-4 * expected.language
    assert abs(found.indexer - expected.indexer) <= 1e-2 * expected.indexer
    # Every rank has the same weights, bit by bit.
    weights = torch.cat([one.detach().flatten() for one in all_ranks.parameters])
    of_first = weights.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(weights, of_first)
