"""Parts that `context_parallel.py` measures, and the clock that it measures with."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    gather_latents,
)
from flashdsa.distributed.agree import agree
from flashdsa.distributed.collectives import (
    all_gather,
    all_to_all,
    reduce_scatter,
    reduce_scatter_in_order,
)
from flashdsa.distributed.group import group_of, process_group
from flashdsa.errors import UnsupportedError

D_QK, D_V, INDEX_HEADS = 576, 512, 64
BACKLOG_CYCLES = 4_000_000
"""Cycles that a GPU sleeps while the host queues the timed work: 2 ms."""


@dataclass
class Run:
    """Sizes, the mesh, and what was found so far."""

    mesh: DeviceMesh
    device: torch.device
    seq_len: int
    heads: int
    topk: int
    repeats: int
    out: Path
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def say(self, part: str, name: str, value: Any) -> None:
        """Keep a number of rank 0's and print it."""
        self.found.setdefault(part, {})[name] = value
        if self.rank == 0:
            print(f"{part}: {name} = {json.dumps(value)}", flush=True)
            self.out.write_text(json.dumps(self.found, indent=1) + "\n")

    def together(self) -> None:
        """Hosts meet, and the GPUs have nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))

    def milliseconds(self, call: Callable[[], object], repeats: int = 0) -> list[float]:
        """The median of `call` on each rank. GPUs start it together, with the work queued."""
        times = []
        for repeat in range((repeats or self.repeats) + 1):
            self.together()
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(BACKLOG_CYCLES)
                dist.all_reduce(torch.zeros(1, device=self.device))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                taken = start.elapsed_time(end)
            else:
                began = time.perf_counter()
                call()
                taken = (time.perf_counter() - began) * 1e3
            if repeat:  # the first one compiles, loads and connects
                times.append(taken)
        mine = torch.tensor([statistics.median(times)])
        return [round(one, 4) for one in all_gather(mine, group_of(self.mesh)).tolist()]


def collectives(run: Run) -> None:
    """Time and rate of each transfer of a layer; rates count the bytes that a rank receives."""
    group, rows = group_of(run.mesh), run.seq_len // run.size
    share = (run.size - 1) / run.size
    latents = torch.zeros(rows, D_QK, dtype=torch.bfloat16, device=run.device)
    pages = torch.zeros(rows // 64, 64, 1, 132, dtype=torch.uint8, device=run.device)
    dkv = torch.zeros(run.seq_len, D_QK, device=run.device)
    half = dkv.bfloat16()
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "all-gather latents": (lambda: all_gather(latents, group), 1152),
        "all-gather index pages": (lambda: all_gather(pages, group), 132),
        "reduce-scatter fp32": (lambda: reduce_scatter(dkv, group), 2304),
        "all-to-all fp32, ordered sum": (
            lambda: reduce_scatter_in_order(dkv, group, torch.float32),
            2304,
        ),
        "reduce-scatter bf16": (lambda: reduce_scatter(half, group), 1152),
        "all-to-all bf16": (lambda: all_to_all(half, group), 1152),
        "round, all-to-all bf16, ordered sum": (
            lambda: reduce_scatter_in_order(dkv.bfloat16(), group, torch.float32),
            1152,
        ),
    }
    for name, (call, row_bytes) in cases.items():
        taken = max(run.milliseconds(call))
        received = row_bytes * run.seq_len * share
        run.say("collectives", name, {"ms": taken, "GB/s": round(received / taken / 1e6, 1)})
    description = {"operation": "benchmark", "kv_local": "bfloat16"}
    run.together()
    began = time.perf_counter()
    for _ in range(100):
        agree(process_group(run.mesh), latents, description)
    run.say("collectives", "agreement, us of the host", (time.perf_counter() - began) * 1e4)


def errors_of_sums(run: Run) -> None:
    """The norm error of summing unit-variance shares of all ranks, rounded to bf16 at the end."""
    group, rows = group_of(run.mesh), 64 * 16
    generator = torch.Generator(run.device).manual_seed(run.rank)
    share = torch.randn(rows * run.size, D_QK, generator=generator, device=run.device)
    exact = reduce_scatter_in_order(share.double(), group, torch.float64)
    ways = {
        "fp32 reduce-scatter": reduce_scatter(share, group),
        "bf16 all-to-all, fp32 sums": reduce_scatter_in_order(
            share.bfloat16(), group, torch.float32
        ),
        "bf16 reduce-scatter": reduce_scatter(share.bfloat16(), group),
    }
    for name, total in ways.items():
        error = (total.bfloat16().double() - exact).norm() / exact.norm()
        run.say("errors of sums", name, float(error))


def token_ids(seq_len: int, tokens: Tensor, topk: int, kind: str) -> Tensor:
    """int32 (S, topk): tokens up to each query's own. "random", or "correlated": a query keeps 95 %
    of the keys of the one before it."""
    slot = torch.arange(topk, device=tokens.device)
    query = tokens.clamp_min(0)[:, None]
    since = query if kind == "random" else (query + slot) // 20 * 20 - slot
    mixed = (since.clamp_min(0) * 2654435761 + slot * 40503 * 65537) & 0x7FFFFFFF
    mixed = ((mixed >> 13) ^ mixed) * 1274126177 & 0x7FFFFFFF
    ids = mixed % (since.clamp_min(0) + 1)
    return ids.masked_fill(tokens[:, None] < 0, -1).int()


def exactness(run: Run) -> None:
    """A small sequence on all ranks against one GPU that holds it all."""
    seq_len = min(run.seq_len, 2048)
    generator = torch.Generator(run.device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=run.device).bfloat16()

    q, kv = normal(seq_len, run.heads, D_QK), normal(seq_len, D_QK)
    d_out = normal(seq_len, run.heads, D_V)
    tokens = torch.arange(seq_len, device=run.device)
    ids = token_ids(seq_len, tokens, run.topk, "random")
    whole = [one.requires_grad_() for one in (q, kv)]
    out = flashdsa.sparse_mla(q, kv, ids)
    try:
        dq, dkv = torch.autograd.grad(out, whole, d_out)
    except UnsupportedError as error:
        run.say("exactness", "backward", f"not available: {error}")
        return
    for kind, wire in (("zigzag", "fp32"), ("zigzag", "bf16"), ("contiguous", "fp32")):
        layout = getattr(SequenceLayout, kind)(seq_len, run.mesh)
        local = [layout.shard(one.detach()).requires_grad_() for one in (q, kv)]
        slots = layout.key_row(layout.shard(ids, padding=-1))
        found = context_parallel_sparse_mla(*local, slots, run.mesh, grad_wire=wire)  # type: ignore[arg-type]
        found_dq, found_dkv = torch.autograd.grad(found, local, layout.shard(d_out))
        how, wanted = f"{kind}, {wire} wire", layout.shard(dq)
        _say_all(run, f"O bit-equal to one GPU's, {how}", torch.equal(found, layout.shard(out)))
        _say_all(run, f"dQ bit-equal, {how}", torch.equal(found_dq, wanted))
        run.say("exactness", f"dQ of rank 0 off by, {how}", _off(found_dq, wanted))
        run.say("exactness", f"dKV off by, {how}", _off(layout.unshard(found_dkv), dkv))


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _say_all(run: Run, name: str, here: bool) -> None:
    everywhere = all_gather(torch.tensor([float(here)]), group_of(run.mesh))
    run.say("exactness", name, bool(everywhere.bool().all()))


@dataclass
class IndexerInputs:
    """Inputs of one rank: e4m3 queries, bf16 keys, weights, for `rows` queries."""

    q: Tensor
    k: Tensor
    weights: Tensor

    @classmethod
    def random(cls, run: Run, rows: int) -> IndexerInputs:
        """The queries' e4m3 bytes need no quantisation: their scale is in the weights."""
        generator = torch.Generator(run.device).manual_seed(2 + run.rank)
        q = torch.randn(rows, INDEX_HEADS, 128, generator=generator, device=run.device)
        k = torch.randn(rows, 128, generator=generator, device=run.device).bfloat16()
        weights = torch.rand(rows, INDEX_HEADS, generator=generator, device=run.device)
        return cls(q.to(torch.float8_e4m3fn), k, weights)


def indexer(run: Run) -> None:
    """The slowest rank's time times the ranks, over one GPU's time for all queries."""
    rows = run.seq_len // run.size
    x = IndexerInputs.random(run, rows)
    few = 2 if run.device.type == "cuda" else 1
    zigzag = SequenceLayout.zigzag(run.seq_len, run.mesh)

    def select(layout: SequenceLayout) -> Tensor:
        return context_parallel_topk_indexer(
            x.q, x.k, x.weights, run.mesh, layout=layout, topk=run.topk
        )

    # One GPU that holds everything: every rank's queries one after another, on the same pages.
    pages = torch.zeros(run.seq_len // 64, 64, 1, 132, dtype=torch.uint8, device=run.device)
    all_k = all_gather(x.k, group_of(run.mesh))
    flashdsa.write_index_k_cache(all_k, torch.arange(len(all_k), device=run.device), pages)
    chosen = torch.empty(rows, run.topk, dtype=torch.int32, device=run.device)

    def alone(rank: int) -> Tensor:
        layout = SequenceLayout.zigzag(run.seq_len, (rank, run.size))
        lengths = layout.seq_lens.to(run.device)
        for first in range(0, rows, 4096):
            some = slice(first, min(first + 4096, rows))
            table = zigzag.block_table.expand(some.stop - first, -1)
            flashdsa.dsa_topk_indexer(
                x.q[some], pages, x.weights[some], lengths[some], table, chosen[some]
            )
        return chosen

    mine = select(zigzag)
    alone(run.rank)
    same = torch.equal(mine.sort().values, chosen.sort().values)
    _say_all(run, "selected ids equal to one GPU's", same)
    one_gpu = sum(max(run.milliseconds(lambda r=rank: alone(r), few)) for rank in range(run.size))
    run.say("indexer", "one GPU, all queries, ms", one_gpu)
    for name in ("zigzag", "contiguous"):
        layout = getattr(SequenceLayout, name)(run.seq_len, run.mesh)
        times = run.milliseconds(lambda at=layout: select(at), few)
        ratio = max(times) * run.size / one_gpu
        run.say("indexer", name, {"ms of each rank": times, "time over ideal": round(ratio, 4)})


def attention(run: Run) -> None:
    """Efficiency of forward and backward: one GPU's time over the ranks times the slowest's."""
    layout = SequenceLayout.zigzag(run.seq_len, run.mesh)
    generator = torch.Generator(run.device).manual_seed(3 + run.rank)

    def normal(*shape: int) -> Tensor:
        made = torch.empty(*shape, dtype=torch.bfloat16, device=run.device)
        return made.normal_(generator=generator)

    q = normal(layout.num_local, run.heads, D_QK).requires_grad_()
    kv = normal(layout.num_local, D_QK).requires_grad_()
    d_out = normal(layout.num_local, run.heads, D_V)
    rows = gather_latents(kv.detach(), run.mesh)
    assert isinstance(rows, Tensor)
    few = min(run.repeats, 3)

    def of_rank(rank: int, kind: str) -> Tensor:
        tokens = SequenceLayout.zigzag(run.seq_len, (rank, run.size)).positions.to(run.device)
        return layout.key_row(token_ids(run.seq_len, tokens, run.topk, kind))

    for kind in ("random", "correlated"):
        slots = of_rank(run.rank, kind)
        spread = max(run.milliseconds(lambda at=slots: _forward(q, kv, at, run), few))
        alone = 0.0
        for rank in range(run.size):
            of_one = of_rank(rank, kind)
            with torch.no_grad():
                times = run.milliseconds(
                    lambda at=of_one: flashdsa.sparse_mla_fwd(q, rows, at), few
                )
            alone += max(times)
        efficiency = round(alone / run.size / spread, 4)
        run.say(
            "attention",
            f"forward, {kind}",
            {"ms": spread, "one GPU, ms": alone, "efficiency": efficiency},
        )
        try:
            _backward(run, q, kv, rows, slots, d_out, kind, few)
        except UnsupportedError as error:
            run.say("attention", f"backward, {kind}", f"not available: {error}")


@torch.no_grad()
def _forward(q: Tensor, kv: Tensor, slots: Tensor, run: Run, **how: Any) -> Tensor:
    return context_parallel_sparse_mla(q, kv, slots, run.mesh, **how)


def _backward(
    run: Run, q: Tensor, kv: Tensor, rows: Tensor, slots: Tensor, d_out: Tensor, kind: str, few: int
) -> None:
    """One GPU's share is this rank's kernel alone, on gathered rows; shares are alike."""
    out, lse = flashdsa.sparse_mla_fwd(q.detach(), rows, slots)

    def alone() -> object:
        return flashdsa.mla_bwd(q.detach(), rows, d_out, lse, out, slots)

    kernel = run.milliseconds(alone, few)
    for how in ({"grad_wire": "fp32"}, {"grad_wire": "bf16"}, {"deterministic": True}):
        spread = context_parallel_sparse_mla(q, kv, slots, run.mesh, **how)  # type: ignore[arg-type]
        call = lambda o=spread: torch.autograd.grad(o, (q, kv), d_out, retain_graph=True)
        taken = max(run.milliseconds(call, few))
        name = ", ".join(f"{key} {value}" for key, value in how.items())
        efficiency = round(statistics.mean(kernel) / taken, 4)
        value = {"ms": taken, "kernel alone, ms": kernel, "efficiency": efficiency}
        run.say("attention", f"backward, {kind}, {name}", value)


def overlap(run: Run) -> None:
    """The indexer, then attention: with the gather of latents beside the indexer, and without."""
    layout, few = SequenceLayout.zigzag(run.seq_len, run.mesh), min(run.repeats, 3)
    x = IndexerInputs.random(run, layout.num_local)
    generator = torch.Generator(run.device).manual_seed(4 + run.rank)
    sizes = (layout.num_local, run.heads, D_QK)
    q = torch.empty(sizes, dtype=torch.bfloat16, device=run.device).normal_(generator=generator)
    kv = q[:, 0].contiguous()

    def layer(gathered: Callable[[], Any]) -> None:
        handle = gathered()
        indices = context_parallel_topk_indexer(
            x.q, x.k, x.weights, run.mesh, layout=layout, topk=run.topk
        )
        _forward(q, kv, indices, run, kv_gathered=handle)

    ready = gather_latents(kv, run.mesh, async_op=True)
    none = max(run.milliseconds(lambda: layer(lambda: ready), few))
    beside = max(
        run.milliseconds(lambda: layer(lambda: gather_latents(kv, run.mesh, async_op=True)), few)
    )
    behind = max(run.milliseconds(lambda: layer(lambda: None), few))
    times = {"kv there already": none, "gathered beside": beside, "gathered behind": behind}
    run.say("overlap", "indexer and forward, ms", times)
