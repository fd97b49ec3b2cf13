"""Two GPUs of one host, one process each, NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import on_gpus
from tests.distributed.ranks import run_ranks


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_two_gpus(tmp_path: Path) -> None:
    found = run_ranks(
        tmp_path,
        2,
        [
            on_gpus.check_attention_on_gpus,
            on_gpus.check_two_sources_on_gpus,
            on_gpus.check_indexer_on_gpus,
            on_gpus.check_ranks_that_differ_on_gpus,
            on_gpus.check_decode_on_gpus,
            on_gpus.check_decode_in_a_graph,
        ],
        backend="cpu:gloo,cuda:nccl",
    )
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
