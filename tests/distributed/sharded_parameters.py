"""FSDP2 over the context-parallel mesh: every parameter's gradient is the one of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_compress_kv,
    context_parallel_sparse_mla,
    context_parallel_window,
)
from tests.distributed.checks import norm_error, spread
from tests.distributed.inputs import D_V, one_process, whole
from tests.distributed.inputs import HEADS as ALL_HEADS

SEQ_LEN, HIDDEN, HEADS, WIDTH, RATIO, WINDOW, TOPK = 300, 12, 2, 16, 4, 70, 20
PROJECTIONS = {"q": 32, "kv": 16, "pool": 32, "gate": 32, "q_index": 512, "k_index": 128, "w": 4}


class _Layer(nn.Module):
    """All that takes parameters: attention over one source and over two, entries, both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(
            {name: nn.Linear(HIDDEN, n, bias=False) for name, n in PROJECTIONS.items()}
        )
        sizes = {"sink": HEADS, "ape": (RATIO, 2 * WIDTH), "norm": WIDTH}
        self.own = nn.ParameterDict({name: torch.randn(n) for name, n in sizes.items()})

    def forward(self, hidden: Tensor, ids: Tensor, layout: SequenceLayout) -> Tensor:
        """The sum over this rank's queries of all losses."""
        x = {name: project(hidden) for name, project in self.projections.items()}
        q, sink, mesh = x["q"].unflatten(1, (HEADS, WIDTH)), self.own["sink"], layout.mesh
        assert mesh is not None
        attention = {"d_v": WIDTH, "attn_sink": sink}
        loss = context_parallel_sparse_mla(
            q, x["kv"], ids, mesh, layout=layout, ids="positions", **attention
        ).square()
        mine = context_parallel_compress_kv(
            *(x["pool"], x["gate"], mesh),
            layout=layout,
            ratio=RATIO,
            overlap=True,
            ape=self.own["ape"],
            norm_weight=self.own["norm"],
        )
        entries = layout.entries(RATIO).unshard(mine)
        bounds = torch.tensor(layout.cu_seqlens)
        seen = [layout.shard(one) for one in flashdsa.causal_ranges(bounds, ratio=RATIO)]
        rows, window = context_parallel_window(x["kv"], mesh, layout=layout, window=WINDOW)
        two = {"extra_kv": rows, "extra_indices": window}
        loss = loss + flashdsa.sparse_mla(q, entries, tuple(seen), **two, **attention).square()
        kv, k_index = layout.unshard(x["kv"]).detach(), layout.unshard(x["k_index"])
        _, lse = flashdsa.sparse_mla_fwd(q.detach(), kv, ids, d_v=WIDTH)
        teacher = {"q": q.detach(), "kv": kv, "lse": lse}
        index = x["q_index"].unflatten(1, (4, 128)), k_index, x["w"]
        sparse = flashdsa.indexer_kl_loss(*index, ids, **teacher)
        ends = layout.seq_lens
        dense = flashdsa.indexer_kl_loss_dense(
            *index, *teacher.values(), ends, row_weight=(ends > 0).double()
        )
        return loss.sum() + sparse.sum() + dense


def check_sharded_parameters() -> None:
    """With `fully_shard`, which averages over ranks, and summed by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQ_LEN, HIDDEN, generator=generator, dtype=torch.float64)
    share = torch.rand(SEQ_LEN, TOPK, generator=generator)
    ids = (share * torch.arange(1, SEQ_LEN + 1)[:, None]).int()
    alone = dist.new_subgroups(1)[0]
    whole = SequenceLayout.contiguous(SEQ_LEN, alone)
    expected = _gradients(whole, hidden, ids)
    layout = SequenceLayout.zigzag(SEQ_LEN, mesh)
    for sharded in (False, True):
        for name, found in _gradients(layout, hidden, ids, sharded).items():
            if not sharded:
                dist.all_reduce(found)
            error = norm_error(found, expected[name])
            assert error <= 1e-13, (name, sharded, error)


def _gradients(
    layout: SequenceLayout, hidden: Tensor, ids: Tensor, sharded: bool = False
) -> dict[str, Tensor]:
    """The gradient of each parameter, from this rank's queries; of all ranks' if `sharded`."""
    torch.manual_seed(0)
    layer = _Layer().double()
    if sharded:
        fully_shard(layer, mesh=layout.mesh)
    loss = layer(layout.shard(hidden), layout.shard(ids, padding=-1), layout)
    (loss * layout.num_ranks if sharded else loss).backward()
    found = {}
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def check_heads_split_over_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"], mesh["tp"]
    heads = ALL_HEADS // tp.size()
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
