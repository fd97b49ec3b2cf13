"""What is checked of context parallelism under autocast, on every rank."""

from __future__ import annotations

import torch

from flashdsa.distributed import SequenceLayout, gather_latents
from tests.distributed.checks import DKV_LIMITS, _mesh, on_ranks, require_same
from tests.distributed.inputs import one_process, whole


def check_attention_is_cast_as_in_one_process() -> None:
    """fp32 operands under autocast, `backward` inside and gathered rows given or not."""
    mesh = _mesh()
    x = whole(300, torch.float32)
    x = x._replace(d_out=x.d_out.bfloat16())
    layout = SequenceLayout.zigzag(300, mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = one_process(x)
        assert expected.out.dtype == torch.bfloat16 and expected.dkv.dtype == torch.float32
        for gathered in (None, gather_latents(layout.shard(x.kv), mesh, async_op=True)):
            found = on_ranks(x, layout, mesh, kv_gathered=gathered)
            require_same(found, expected, layout, DKV_LIMITS[torch.bfloat16])
