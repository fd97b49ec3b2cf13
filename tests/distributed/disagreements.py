"""Ranks that differ or err behind good calls: every rank raises, whatever it has seen before."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import flashdsa
from flashdsa.distributed import (
    ContextParallelSparseMLA,
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    decode_sparse_mla,
    decode_topk_indexer,
    gather_latents,
    local_seq_lens,
    local_slots,
)
from tests.distributed.inputs import require_error

Arguments = dict[str, Any]
WRONG = "wrong arguments on another rank: rank 1: "


def topk_arguments(batch: int = 2, topk: int = 5) -> Arguments:
    """Of `decode_topk_indexer`: `batch` requests of 70 tokens, of which rank 1 has 6."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(batch)
    cache = torch.zeros(2 * batch, 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(torch.ones(128 * batch, 128), torch.arange(128 * batch), cache)
    table = torch.arange(2 * batch).view(batch, 2).int()
    return {
        "q_index_fp8": torch.randn(batch, 4, 128, generator=generator).to(torch.float8_e4m3fn),
        "k_index_cache_local": cache,
        "weights": torch.ones(batch, 4),
        "seq_lens": torch.full((batch,), 70, dtype=torch.int32),
        "block_table_local": table[:, rank : rank + 1],
        "mesh": dist.group.WORLD,
        "topk": topk,
    }


def attention_arguments(batch: int = 2) -> Arguments:
    """Of `decode_sparse_mla`: rows of ones, so that O is ones."""
    return {
        "q_local": torch.ones(batch, 2, 8),
        "kv_local": torch.ones(64, 8),
        "slots_local": torch.zeros(batch, 3, dtype=torch.int32),
        "mesh": dist.group.WORLD,
        "d_v": 4,
    }


def require_good_calls() -> None:
    """Right results on every rank, of calls that were made before."""
    for batch in (2, 3):
        tokens = decode_topk_indexer(**topk_arguments(batch))
        assert tokens.tolist() == [[0, 1, 2, 3, 4]] * batch
        out = decode_sparse_mla(**attention_arguments(batch))
        assert torch.equal(out, torch.ones(batch, 2, 4))
    kv = torch.ones(64, 8)
    assert torch.equal(gather_latents(kv, dist.group.WORLD), torch.ones(128, 8))


def _require_both(call: Callable[[bool], object], mine: str, told: str = "") -> None:
    """`call(True)` on rank 1 raises its own error, `call(False)` on rank 0 one that names it; then
    all goes on."""
    if dist.get_rank() == 1:
        require_error(lambda: call(True), Exception, mine)
    else:
        require_error(lambda: call(False), ValueError, told or WRONG + mine)
    require_good_calls()


def check_ranks_that_differ_behind_good_calls() -> None:
    """What differs on the ranks is known to one of them, or to both."""
    rank = dist.get_rank()
    require_good_calls()
    for _ in range(2):
        require_error(
            lambda: decode_topk_indexer(**topk_arguments(topk=5 + rank)),
            ValueError,
            "topk: 5 on rank 0, 6 on rank 1",
        )
        require_good_calls()
        require_error(
            lambda: decode_sparse_mla(**attention_arguments(batch=3 - rank)),
            ValueError,
            "q_local: float32 [3, 2, 8] on cpu on rank 0, float32 [2, 2, 8] on cpu on rank 1",
        )
        require_good_calls()
        # Both calls are known to both ranks, but are of other operations.
        require_error(
            lambda: (
                decode_topk_indexer(**topk_arguments())
                if rank
                else decode_sparse_mla(**attention_arguments())
            ),
            ValueError,
            "operation: decode_sparse_mla on rank 0, decode_topk_indexer on rank 1",
        )
        require_good_calls()


def check_wrong_arguments_of_decode() -> None:
    """Shapes, dtypes, values and types that are wrong on rank 1 only."""
    require_good_calls()
    cache = topk_arguments()["k_index_cache_local"]
    lengths = topk_arguments()["seq_lens"]
    table = topk_arguments()["block_table_local"]
    of_topk: list[tuple[Arguments, str]] = [
        ({"k_index_cache_local": None}, "k_index_cache_local: expected a torch.Tensor"),
        ({"k_index_cache_local": cache.int()}, "k_index_cache_local: expected dtype uint8 or int8"),
        ({"k_index_cache_local": cache[0]}, "k_index_cache_local: expected shape"),
        ({"k_index_cache_local": cache[:1]}, "block_table_local: expected page ids in [0, 1)"),
        ({"block_table_local": table + 9}, "block_table_local: expected page ids in [0, 4)"),
        ({"block_table_local": table.long()}, "block_table_local: expected dtype int32; got int64"),
        ({"block_table_local": table[:1]}, "block_table_local: expected shape"),
        ({"block_table_local": table[:, :0]}, "block_table_local: expected at least 1 page"),
        ({"seq_lens": lengths - 75}, "seq_lens: expected values >= 0; got -5"),
        (
            {"seq_lens": lengths + 1000},
            "block_table_local: expected at least 8 pages for seq_lens[0]",
        ),
        ({"q_index_fp8": None}, "q_index_fp8: expected a torch.Tensor; got NoneType"),
        ({"topk": 0}, "topk: expected at least 1; got 0"),
        ({"backend": "sm90"}, "indexer_logits: backend 'sm90' cannot serve"),
    ]
    for wrong, message in of_topk:
        _require_both(
            lambda here, w=wrong: decode_topk_indexer(  # type: ignore[misc]
                **topk_arguments() | (w if here else {})
            ),
            message,
        )
    kv, slots = attention_arguments()["kv_local"], attention_arguments()["slots_local"]
    of_attention: list[tuple[Arguments, str]] = [
        ({"kv_local": kv.double()}, "kv_local: expected dtype float32"),
        ({"kv_local": kv[:, :7]}, "kv_local: expected shape"),
        ({"kv_local": None}, "kv_local: expected a torch.Tensor; got NoneType"),
        ({"kv_local": kv.t().contiguous().t()}, "kv_local: expected a contiguous last dimension"),
        ({"slots_local": slots.float()}, "slots_local: expected dtype int32"),
        ({"slots_local": slots[:1]}, "slots_local: expected shape"),
        ({"attn_sink": [0.0, 0.0]}, "attn_sink: expected a torch.Tensor; got list"),
        ({"attn_sink": torch.zeros(2).half()}, "attn_sink: expected dtype float32; got float16"),
        ({"d_v": 9}, "d_v: expected at most q's last dimension"),
        ({"sm_scale": "1"}, "sm_scale: expected a float or None; got str"),
        ({"backend": "sm90"}, "sparse_mla_fwd: backend 'sm90' cannot serve"),
    ]
    for wrong, message in of_attention:
        _require_both(
            lambda here, w=wrong: decode_sparse_mla(  # type: ignore[misc]
                **attention_arguments() | (w if here else {})
            ),
            message,
        )


def check_wrong_arguments_of_the_rest() -> None:
    """What the other functions read before they communicate."""
    group = dist.group.WORLD
    layout = SequenceLayout.zigzag(200, group)
    rows = layout.num_local
    q, kv, slots = torch.ones(2, 2, 8), torch.ones(64, 8), torch.zeros(2, 3, dtype=torch.int32)

    def attend(**options: Any) -> Tensor:
        return context_parallel_sparse_mla(q, kv, slots, group, **{"d_v": 4} | options)

    def select(k: Tensor | None = None, **options: Any) -> Tensor:
        return context_parallel_topk_indexer(
            torch.zeros(rows, 4, 128).to(torch.float8_e4m3fn),
            torch.zeros(rows, 128) if k is None else k,
            options.pop("weights", torch.zeros(rows, 4)),
            group,
            layout=layout,
            topk=3,
            **options,
        )

    strided = torch.zeros(4, rows).t()
    outside = torch.full((rows,), rows)
    model = nn.ModuleDict({"inner": _Attention()})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    parallelize_module(model, mesh, {"inner": ContextParallelSparseMLA()})
    wrong: list[tuple[Callable[[bool], object], str]] = [
        (lambda here: gather_latents(None if here else kv, group), "kv_local: expected a torch"),
        (lambda here: gather_latents(kv[0, 0] if here else kv, group), "kv_local: expected"),
        (
            lambda here: attend(topk_length=[1, 2] if here else None),
            "topk_length: expected a torch",
        ),
        (lambda here: attend(attn_sink=[1.0] if here else None), "attn_sink: expected a torch"),
        (lambda here: attend(kv_gathered=kv if here else None), "kv_gathered: expected"),
        (lambda here: attend(**{"d_w": 3} if here else {}), "d_w"),
        (lambda here: select(torch.zeros(128, rows).t() if here else None), "k"),
        (lambda here: select(weights=strided if here else strided.contiguous()), "weights: exp"),
        (
            lambda here: select(query_rows=outside if here else outside - 1),
            "query_rows: expected values in [0, 128); got 128",
        ),
        (lambda here: layout.unshard(torch.ones(rows - here, 2)), "local: expected 128 rows"),
        (lambda here: model["inner"](q, None if here else kv, slots), "kv: _Attention.forward was"),
    ]
    for call, message in wrong:
        _require_both(call, message)
    require_error(
        lambda: layout.unshard(torch.ones(rows, 2 + dist.get_rank())),
        ValueError,
        "local: float32 [128, 2] on cpu on rank 0, float32 [128, 3] on cpu on rank 1",
    )
    # The sum of gradients is a collective: all take part in it, or none.
    require_error(
        lambda: gather_latents(kv.clone().requires_grad_(dist.get_rank() == 1), group),
        ValueError,
        "gradient: False on rank 0, True on rank 1",
    )
    _require_both(
        lambda here: _failing_in(attend) if here else attend(),
        "out of memory",
        WRONG + "RuntimeError: out of memory",
    )


class _Attention(nn.Module):
    def forward(self, q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        return q


def _failing_in(call: Callable[[], object]) -> object:
    """An error that is not of an argument, before the ranks have agreed."""
    with patch("flashdsa.distributed.sparse_mla._check", side_effect=RuntimeError("out of memory")):
        return call()


def check_a_rank_without_tokens() -> None:
    """Its table has no column, its cache no page."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x = topk_arguments() | {"seq_lens": torch.tensor([64, 3], dtype=torch.int32)}
    assert local_seq_lens(x["seq_lens"], group).tolist() == [[64, 3], [0, 0]][rank]
    for pages in (4, 0):
        if rank == 1:
            x["block_table_local"] = x["block_table_local"][:, :0]
            x["k_index_cache_local"] = x["k_index_cache_local"][:pages]
        tokens = decode_topk_indexer(**x)
        assert tokens.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
        slots = local_slots(tokens, x["block_table_local"], group)
        expected = [[0, 1, 2, 3, 4], [128, 129, 130, -1, -1]] if rank == 0 else [[-1] * 5] * 2
        assert slots.tolist() == expected
    beyond = torch.tensor([[0, 64]], dtype=torch.int32)
    require_error(
        lambda: local_slots(beyond, torch.zeros(1, 0, dtype=torch.int32), group),
        ValueError,
        f"block_table_local: expected at least 1 page for positions[0, {rank}] = {64 * rank}",
    )


def check_decode_has_no_gradient() -> None:
    """Asked for on rank 1, it is refused on every rank."""
    x = attention_arguments()

    def with_gradient(name: str, here: bool) -> Tensor:
        return decode_sparse_mla(**x | ({name: x[name].clone().requires_grad_()} if here else {}))

    def with_tangent(here: bool) -> Tensor:
        with forward_ad.dual_level():
            q = forward_ad.make_dual(x["q_local"], x["q_local"]) if here else x["q_local"]
            return decode_sparse_mla(**x | {"q_local": q})

    for name in ("q_local", "kv_local"):
        _require_both(
            lambda here, n=name: with_gradient(n, here),  # type: ignore[misc]
            f"decode_sparse_mla: has no gradient, but {name} requires one",
        )
        with torch.no_grad():
            assert torch.equal(with_gradient(name, True), torch.ones(2, 2, 4))
    _require_both(with_tangent, "decode_sparse_mla: has no gradient, but q_local has a tangent")
    sink = torch.zeros(2, requires_grad=True)
    require_error(
        lambda: decode_sparse_mla(**x, attn_sink=sink), NotImplementedError, "attn_sink requires"
    )


def check_transforms_of_torch_func() -> None:
    """One on rank 1 alone is refused on every rank, by name."""
    q, kv, slots, group, _ = attention_arguments().values()

    def attend(q: Tensor) -> Tensor:
        return context_parallel_sparse_mla(q, kv, slots, group, d_v=4)

    def gather(kv: Tensor) -> Tensor:
        return gather_latents(kv, group)

    def by_duals(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(x, x))

    transforms: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
        "torch.func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
        "torch.func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        "torch.vmap": lambda f, x: torch.vmap(f)(x[None]),
        "forward-mode AD": by_duals,
    }
    of = {"context_parallel_sparse_mla": (attend, q), "gather_latents": (gather, kv)}
    for (transform, apply), (name, (f, x)) in product(transforms.items(), of.items()):
        _require_both(
            lambda here, apply=apply, f=f, x=x: apply(f, x) if here else f(x),  # type: ignore[misc]
            f"{name}: {transform}",
        )


@contextmanager
def without_cpu() -> Iterator[None]:
    """Groups as NCCL alone has them: none has a backend for the CPU."""
    with patch("flashdsa.distributed.collectives.serves", return_value=False):
        yield


def check_a_channel_of_its_own() -> None:
    """A group without a backend for the CPU: the same errors, over connections of its own."""
    with without_cpu():
        check_ranks_that_differ_behind_good_calls()
        other = dist.new_group([0, 1])
        assert torch.equal(gather_latents(torch.ones(1, 2), other), torch.ones(2, 2))
        require_error(
            lambda: gather_latents(torch.ones(1 + dist.get_rank(), 2), other), ValueError, "rank 1"
        )


def _start(store: str, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )


def check_a_restarted_peer() -> None:
    """Rank 0 stays and makes the group again; rank 1 is a new process that has seen no call."""
    for group in (nullcontext, without_cpu):
        with group():
            _restart(own_channel=group is without_cpu)


def _restart(own_channel: bool) -> None:
    rank = dist.get_rank()
    folder: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    root = Path(str(folder[0]))
    require_good_calls()
    dist.destroy_process_group()
    if rank == 1:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([__name__])
        peer = processes.Process(target=_peer, args=(str(root / "second"), own_channel))
        peer.start()
        peer.join(120)
    else:
        _start(str(root / "second"), 0)
        require_good_calls()
        check_ranks_that_differ_behind_good_calls()
        dist.destroy_process_group()
    _start(str(root / "third"), rank)
    if rank == 1:
        assert peer.exitcode == 0
    require_good_calls()


def _peer(store: str, own_channel: bool) -> None:
    """The new process, whose errors are printed with rank 1's."""
    torch.set_num_threads(1)
    _start(store, 1)
    with without_cpu() if own_channel else nullcontext():
        require_good_calls()
        check_ranks_that_differ_behind_good_calls()
        dist.destroy_process_group()
