"""A mesh ("cp", "tp") of 2 x 2: heads are split over tp, tokens over cp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashdsa.distributed import SequenceLayout, context_parallel_sparse_mla
from tests.distributed.checks import norm_error, spread
from tests.distributed.inputs import D_V, HEADS, one_process, whole


def check_heads_split_over_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"], mesh["tp"]
    heads = HEADS // tp.size()
    mine = slice(tp.get_local_rank() * heads, (tp.get_local_rank() + 1) * heads)
    for dtype, limit in ((torch.float64, 1e-15), (torch.bfloat16, 5e-3)):
        x = whole(300, dtype)
        # Of these heads alone: the CPU backend's products depend on how many there are.
        of_mine = one_process(x._replace(q=x.q[:, mine], sink=x.sink[mine], d_out=x.d_out[:, mine]))
        layout = SequenceLayout.zigzag(300, cp)
        local = spread(x, layout)
        q = local.q[:, mine].clone().requires_grad_()
        kv = local.kv.clone().requires_grad_()
        sink = local.sink[mine].clone().requires_grad_()
        out = context_parallel_sparse_mla(
            q, kv, local.positions, cp, layout=layout, ids="positions", attn_sink=sink, d_v=D_V
        )
        dq, dkv, d_sink = torch.autograd.grad(out, (q, kv, sink), local.d_out[:, mine])
        assert torch.equal(out, layout.shard(of_mine.out))
        assert torch.equal(dq, layout.shard(of_mine.dq))
        dist.all_reduce(d_sink, group=cp.get_group())
        assert norm_error(d_sink, of_mine.d_sink) <= 1e-6
        # Latents are replicated over tp: their gradient is the sum over tp, which is the caller's.
        dist.all_reduce(dkv, group=tp.get_group())
        assert norm_error(layout.unshard(dkv), one_process(x).dkv) <= limit
