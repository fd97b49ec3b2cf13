"""The program of docs/guides/context-parallel.md: a training step and a step of decoding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_compress_kv,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    context_parallel_window,
    decode_sparse_mla,
    decode_topk_indexer,
    local_slots,
)

dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl", and a mesh of "cuda"
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
layout = SequenceLayout.zigzag(1000, mesh)  # of 1,000 tokens

torch.manual_seed(0)  # every rank has the same weights
to_q, to_kv = nn.Linear(64, 8 * 576), nn.Linear(64, 576)
to_index_q, to_index_k, to_weights = nn.Linear(64, 4 * 128), nn.Linear(64, 128), nn.Linear(64, 4)
hidden = layout.shard(torch.randn(1000, 64))  # [num_local, 64]; RoPE: layout.positions
q, kv = to_q(hidden).view(-1, 8, 576), to_kv(hidden)
with torch.no_grad():
    q_index = to_index_q(hidden).view(-1, 4, 128).bfloat16()
    q_index_fp8, weights = flashdsa.quantize_index_q(q_index, to_weights(hidden))
    k_index = to_index_k(hidden)

indices = context_parallel_topk_indexer(
    q_index_fp8, k_index, weights, mesh, layout=layout, topk=256
)
out = context_parallel_sparse_mla(q, kv, indices, mesh)  # [num_local, 8, 512]

to_pool, to_gate, sink = nn.Linear(64, 1024), nn.Linear(64, 1024), nn.Parameter(torch.zeros(8))
ape, norm = nn.Parameter(torch.zeros(4, 1024)), nn.Parameter(torch.ones(512))

rows, window = context_parallel_window(kv[:, :512], mesh, layout=layout, window=128)
mine = context_parallel_compress_kv(
    *(to_pool(hidden), to_gate(hidden), mesh),
    layout=layout,
    ratio=4,
    overlap=True,
    ape=ape,
    norm_weight=norm,
)
entries = layout.entries(4).unshard(mine)  # all of them, in order, with a gradient
bounds = torch.tensor(layout.cu_seqlens)
starts, ends = (layout.shard(one) for one in flashdsa.causal_ranges(bounds, ratio=4))
both = flashdsa.sparse_mla(  # every entry; (starts, ends) may be ids that an indexer selected
    q[..., :512], entries, (starts, ends), extra_kv=rows, extra_indices=window, attn_sink=sink
)

loss = out.square().sum() + both.square().sum()  # of this rank's tokens
loss.backward()
for weight in (to_q.weight, to_kv.weight, to_pool.weight, to_gate.weight, ape, norm, sink):
    dist.all_reduce(weight.grad)  # or FSDP, or DDP

# Two requests, 8 pages of each on this rank.
index_cache = torch.zeros(16, 64, 1, 132, dtype=torch.uint8)
flashdsa.write_index_k_cache(torch.randn(1024, 128), torch.arange(1024), index_cache)
kv_cache, table = torch.randn(16, 64, 576), torch.arange(16, dtype=torch.int32).view(2, 8)
q8, w8 = flashdsa.quantize_index_q(torch.randn(2, 4, 128).bfloat16(), torch.rand(2, 4))
seq_lens = torch.tensor([900, 700], dtype=torch.int32)  # on all ranks together
q_local = torch.randn(2, 8 // dist.get_world_size(), 576)  # this rank's heads

tokens = decode_topk_indexer(q8, index_cache, w8, seq_lens, table, mesh, topk=256)
slots = local_slots(tokens, table, mesh)  # of this rank, then -1
decoded = decode_sparse_mla(q_local, kv_cache, slots, mesh)

if layout.rank == 0:  # all ranks have one terminal
    print(f"O {list(out.shape)}, {list(both.shape)}, decoded {list(decoded.shape)}")
dist.destroy_process_group()
del mesh, layout  # which hold the group: it ends before the interpreter does
