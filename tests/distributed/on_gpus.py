"""On GPUs, with NCCL: the Hopper kernels behind every function, and ranks that differ."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    decode_sparse_mla,
    decode_topk_indexer,
    gather_latents,
    local_slots,
)
from tests.distributed import two_sources
from tests.distributed.inputs import require_error

D_QK, D_V, HEADS, INDEX_HEADS, TOPK = 576, 512, 128, 64, 2048
SEQ_LEN = 1000


def _device() -> torch.device:
    """Each rank's own GPU."""
    torch.cuda.set_device(dist.get_rank())
    return torch.device("cuda", dist.get_rank())


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).bfloat16()


def check_attention_on_gpus() -> None:
    """O of one GPU, bit by bit; gradients within the contract of one GPU's."""
    device, group = _device(), dist.group.WORLD
    generator = torch.Generator(device).manual_seed(0)
    q, kv = _normal(generator, SEQ_LEN, HEADS, D_QK), _normal(generator, SEQ_LEN, D_QK)
    d_out = _normal(generator, SEQ_LEN, HEADS, D_V)
    share = torch.rand(SEQ_LEN, TOPK, generator=generator, device=device)
    positions = (share * torch.arange(1, SEQ_LEN + 1, device=device)[:, None]).int()
    positions[share < 0.1] = -1
    whole = [one.clone().requires_grad_() for one in (q, kv)]
    out = flashdsa.sparse_mla(*whole, positions)
    dq, dkv = torch.autograd.grad(out, whole, d_out)
    for kind in ("zigzag", "contiguous", "interleaved"):
        layout = getattr(SequenceLayout, kind)(SEQ_LEN, group)
        for wire in ("fp32", "bf16"):
            local = [layout.shard(one).requires_grad_() for one in (q, kv)]
            ids = layout.shard(positions, padding=-1)
            found = context_parallel_sparse_mla(
                *local, ids, group, layout=layout, ids="positions", grad_wire=wire
            )
            assert torch.equal(found, layout.shard(out)), layout
            found_dq, found_dkv = torch.autograd.grad(found, local, layout.shard(d_out))
            # Not bit by bit: the Hopper backward takes rows in the order of their numbers.
            wanted = layout.shard(dq).double()
            assert (found_dq.double() - wanted).norm() <= 2.5e-3 * wanted.norm(), layout
            error = (layout.unshard(found_dkv).double() - dkv.double()).norm() / dkv.norm()
            assert error < 3.5e-3, (layout, wire, error)


def check_two_sources_on_gpus() -> None:
    """A CSA and an HCA layer of V4's columns, by the Hopper kernels."""
    device, group = _device(), dist.group.WORLD
    for ratio in (4, 128):
        case = two_sources.Case(1000, ratio, torch.bfloat16, ratio == 4, 512, 64, device)
        two_sources.require_one_process(case, group)


def check_indexer_on_gpus() -> None:
    """The tokens of one GPU, for more of them than topk."""
    device, group, seq_len = _device(), dist.group.WORLD, 4500
    generator = torch.Generator(device).manual_seed(1)
    k = _normal(generator, seq_len, 128)
    q8 = _normal(generator, seq_len, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
    weights = torch.rand(seq_len, INDEX_HEADS, generator=generator, device=device)
    k8, k_scale = flashdsa.quantize_index_k(k)
    lengths = torch.arange(1, seq_len + 1, device=device).int()
    expected = torch.empty(seq_len, TOPK, dtype=torch.int32, device=device)
    flashdsa.dsa_topk_prefill(q8, k8, weights, None, lengths, expected, k_scale=k_scale)
    layout = SequenceLayout.zigzag(seq_len, group)
    found = context_parallel_topk_indexer(
        layout.shard(q8),
        layout.shard(k),
        layout.shard(weights),
        group,
        layout=layout,
        query_chunk=1000,
    )
    tokens = layout.token_of(found).sort(dim=1).values
    assert torch.equal(tokens, layout.shard(expected.sort(dim=1).values, padding=-1))


def check_ranks_that_differ_on_gpus() -> None:
    """With a backend for the CPU, and with NCCL alone."""
    device, rank = _device(), dist.get_rank()
    ranks = list(range(dist.get_world_size()))
    for group in (dist.group.WORLD, dist.new_group(ranks, backend="nccl")):
        one = torch.full((64, 8), float(rank), device=device)
        for _ in range(2):
            for number in (64, 128):  # both are known to both ranks, then
                found = gather_latents(one[:1].expand(number, 8), group)
                assert isinstance(found, Tensor) and torch.equal(found[number], one[0] * 0 + 1)
            rows = 128 if rank == 1 else 64
            require_error(
                lambda n=rows, at=group: gather_latents(torch.zeros(n, 8, device=device), at),
                ValueError,
                "kv_local: float32 [64, 8] on cuda on rank 0, float32 [128, 8] on cuda on rank 1",
            )
            wrong = torch.zeros(64, 8, device=device if rank == 0 else "cpu")
            if group is not dist.group.WORLD:
                require_error(
                    lambda at=group, x=wrong: gather_latents(x, at),  # type: ignore[misc]
                    ValueError,
                    "kv_local: expected a device that the group communicates",
                )
    gloo = dist.new_group(ranks, backend="gloo")
    require_error(
        lambda: context_parallel_sparse_mla(
            torch.zeros(1, 2, 8, device=device),
            torch.zeros(64, 8, device=device),
            torch.zeros(1, 3, dtype=torch.int32, device=device),
            dist.new_group(ranks, backend="nccl"),
            d_v=9,
        ),
        ValueError,
        "d_v: expected at most q's last dimension",
    )
    assert torch.equal(gather_latents(torch.ones(1, 1), gloo), torch.ones(len(ranks), 1))


class _Decode:
    """A cache spread over the ranks, and what one GPU with all of it gives."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        device, self.group, rank = _device(), group or dist.group.WORLD, dist.get_rank()
        size, lengths = dist.get_world_size(), torch.tensor([0, 64, 3000, 5000])
        pages = -(-int(lengths.max()) // 64)
        pages += -pages % size
        generator = torch.Generator(device).manual_seed(2)
        table = torch.arange(len(lengths) * pages, device=device).view(len(lengths), -1).int()
        self.mine = table[:, rank::size].contiguous()
        k, self.kv = (_normal(generator, table.numel() * 64, wide) for wide in (128, D_QK))
        self.cache = torch.zeros(table.numel(), 64, 1, 132, dtype=torch.uint8, device=device)
        flashdsa.write_index_k_cache(k, torch.arange(len(k), device=device), self.cache)
        self.q8 = _normal(generator, len(lengths), INDEX_HEADS, 128).to(torch.float8_e4m3fn)
        self.weights = torch.rand(len(lengths), INDEX_HEADS, generator=generator, device=device)
        self.seq_lens = lengths.int().to(device)
        self.table = table
        self.ids = torch.empty(len(lengths), TOPK, dtype=torch.int32, device=device)
        flashdsa.dsa_topk_indexer(self.q8, self.cache, self.weights, self.seq_lens, table, self.ids)
        q = _normal(generator, len(lengths), HEADS, D_QK)
        heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        self.q_local = q[:, heads].contiguous()
        self.expected = flashdsa.sparse_mla_fwd(q, self.kv, self.ids)[0][:, heads]

    def run(self) -> tuple[Tensor, Tensor]:
        """Tokens and O of this rank's heads."""
        tokens = decode_topk_indexer(
            self.q8, self.cache, self.weights, self.seq_lens, self.mine, self.group, topk=TOPK
        )
        slots = local_slots(tokens, self.mine, self.group)
        return tokens, decode_sparse_mla(self.q_local, self.kv, slots, self.group)


def check_decode_on_gpus() -> None:
    x = _Decode()
    tokens, out = x.run()
    page = x.table.gather(1, tokens.clamp_min(0).long() // 64)
    slots = torch.where(tokens < 0, -1, page * 64 + tokens % 64)
    assert torch.equal(slots.sort(dim=1).values, x.ids.sort(dim=1).values)
    error = (out.double() - x.expected.double()).norm() / x.expected.double().norm()
    assert error < 4e-3, error


def check_decode_in_a_graph() -> None:
    """With a backend for the CPU, and with NCCL alone."""
    nccl = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    for group in (dist.group.WORLD, nccl):
        x = _Decode(group)
        out = x.run()[1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = x.run()[1]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, out)
