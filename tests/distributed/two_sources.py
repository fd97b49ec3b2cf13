"""Windows and entries over ranks' borders: a layer of each kind against one process."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashdsa
from flashdsa.distributed import (
    SequenceLayout,
    context_parallel_compress_kv,
    context_parallel_window,
)
from tests.distributed.checks import layouts, norm_error
from tests.distributed.inputs import require_error

WINDOW, TOPK = 70, 9
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}
LEARNED = ("q", "window", "kv", "gate", "ape", "norm", "sink")


class Case(NamedTuple):
    """A layer's sizes; an entry pools `ratio` tokens."""

    seq_len: int
    ratio: int
    dtype: torch.dtype
    overlap: bool = False
    d: int = 16
    heads: int = 2
    device: torch.device = torch.device("cpu")


CASES = (
    Case(300, 4, torch.float64, overlap=True),
    Case(517, 128, torch.float32),
    Case(300, 2, torch.float32),
    Case(390, 4, torch.bfloat16, overlap=True),
    Case(70, 128, torch.float32),  # no entry, and ranks without a token
)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]


def _inputs(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seq_len + case.ratio)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    tokens, d, width = case.seq_len, case.d, case.d * (1 + case.overlap)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(case.device, dtype)

    x = {
        "q": normal(tokens, case.heads, d, dtype=case.dtype),
        "window": normal(tokens, d, dtype=case.dtype),
        "kv": normal(tokens, width, dtype=case.dtype),
        "gate": normal(tokens, width, dtype=case.dtype),
        "ape": normal(case.ratio, width, dtype=wide),
        "norm": normal(d, dtype=wide),
        "sink": normal(case.heads, dtype=wide),
        "d_out": normal(tokens, case.heads, d, dtype=case.dtype),
    }
    angles = normal(tokens, min(d // 4, 32), dtype=wide)
    return x | {"cos": angles.cos(), "sin": angles.sin()}


def _attend(
    x: dict[str, Tensor], entries: Tensor, lists: dict[str, Any], seen: tuple[Tensor, Tensor]
) -> Tensor:
    """Every entry that each query sees, or as many of its newest as an indexer selects."""
    starts, ends = seen
    if len(entries) > 4 * TOPK:
        ids = ends[:, None] - torch.arange(1, 2 * TOPK, 2, device=ends.device)
        indices: Any = torch.where(ids >= starts[:, None], ids, -1)
    else:
        indices = seen
    options = {"d_v": x["q"].shape[2], "attn_sink": x["sink"], "deterministic": True}
    return flashdsa.sparse_mla(x["q"], entries, indices, **options, **lists)


def _pooling(x: dict[str, Tensor], case: Case) -> dict[str, Any]:
    """Keywords of `compress_kv`."""
    options: dict[str, Any] = {"ratio": case.ratio, "overlap": case.overlap}
    options |= {"ape": x["ape"], "norm_weight": x["norm"]}
    return options | {"rotation": (x["cos"], x["sin"])}


def _one_process(
    x: dict[str, Tensor], cu_seqlens: Tensor, case: Case
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Entries, O and the gradients of what is learned."""
    found = flashdsa.compress_kv(x["kv"], x["gate"], cu_seqlens=cu_seqlens, **_pooling(x, case))
    assert found is not None
    entries = found[: int((cu_seqlens.diff() // case.ratio).sum())]
    token = torch.arange(len(x["q"]), device=case.device)
    begins = flashdsa.causal_ranges(cu_seqlens)[0]
    lists = {"extra_kv": x["window"]}
    lists |= {"extra_indices": (torch.maximum(token + 1 - WINDOW, begins), token + 1)}  # type: ignore[dict-item]
    out = _attend(x, entries, lists, flashdsa.causal_ranges(cu_seqlens, ratio=case.ratio))
    gradients = torch.autograd.grad(out, [x[name] for name in LEARNED], x["d_out"])
    return entries.detach(), out.detach(), list(gradients)


def check_two_sources_equal_one_process() -> None:
    """Of every case."""
    for case in CASES:
        require_one_process(case, _mesh())


def require_one_process(case: Case, mesh: DeviceMesh | dist.ProcessGroup) -> None:
    """Entries bit by bit; O and gradients up to the order of sums, since a range is as wide as the
    longest of its call, and gradients in bf16 to a rounding of each rank's share."""
    x, limit = _inputs(case), LIMITS[case.dtype]
    for name in LEARNED:
        x[name].requires_grad_()
    for layout in layouts(case.seq_len, mesh):
        bounds = torch.tensor(layout.cu_seqlens, device=case.device)
        entries, out, expected = _one_process(x, bounds, case)
        seen = flashdsa.causal_ranges(bounds, ratio=case.ratio)
        local = {name: x[name] for name in ("ape", "norm", "sink", "cos", "sin")}
        for name in ("q", "window", "kv", "gate"):
            local[name] = layout.shard(x[name]).detach().requires_grad_()
        mine = context_parallel_compress_kv(
            local["kv"], local["gate"], mesh, layout=layout, **_pooling(local, case)
        )
        of_entries = layout.entries(case.ratio)
        assert torch.equal(mine, of_entries.shard(entries)), (layout, case)
        every = of_entries.unshard(mine)
        rows, window = context_parallel_window(local["window"], mesh, layout=layout, window=WINDOW)
        lists = {"extra_kv": rows, "extra_indices": window}
        seen = tuple(layout.shard(one) for one in seen)  # type: ignore[assignment]
        found = _attend(local, every, lists, seen)
        error = norm_error(found, layout.shard(out)) if found.any() else 0.0
        assert error <= limit, (layout, case, error)
        learned = [local[name] for name in LEARNED]
        gradients = torch.autograd.grad(found, learned, layout.shard(x["d_out"]))
        for name, got, wanted in zip(LEARNED, gradients, expected, strict=True):
            if name in ("ape", "norm", "sink"):
                dist.all_reduce(got)
            else:
                assert (got[layout.positions < 0] == 0).all()
                got = layout.unshard(got)
            if wanted.any():
                error = norm_error(got, wanted)
                assert error <= limit, (layout, case, name, error)
            else:
                assert not got.any(), (layout, case, name)


def check_borders_move_no_more_than_they_need() -> None:
    """A window of 70 tokens gets 69 rows of a contiguous neighbour."""
    mesh = _mesh()
    layout = SequenceLayout.contiguous(256, mesh)
    rank, kv = layout.rank, torch.randn(layout.num_local, 4)
    rows, (starts, ends) = context_parallel_window(kv, mesh, layout=layout, window=WINDOW)
    assert len(rows) == layout.num_local + (WINDOW - 1) * (rank > 0)
    assert int(starts[0]) == 0 and int(ends[-1]) == len(rows)
    assert int((ends - starts).max()) == WINDOW
    first = int(layout.positions[0]) - (WINDOW - 1) * (rank > 0)
    assert torch.equal(rows, layout.unshard(kv)[first : first + len(rows)])
    held = weakref.ref(layout)
    del layout
    assert held() is None  # nor is its group


def check_ranks_that_differ_in_two_sources() -> None:
    mesh = _mesh()
    layout = SequenceLayout.zigzag(256, mesh)
    kv = torch.randn(layout.num_local, 8)
    rank = dist.get_rank()
    require_error(
        lambda: context_parallel_window(kv, mesh, layout=layout, window=8 + rank),
        ValueError,
        "window: 8 on rank 0, 9 on rank 1",
    )
    require_error(
        lambda: context_parallel_compress_kv(
            kv, kv[: len(kv) - rank], mesh, layout=layout, ratio=4
        ),
        ValueError,
        "gate_local",
    )
    require_error(
        lambda: context_parallel_compress_kv(kv, kv, mesh, layout=layout, ratio=2 + 2 * rank),
        ValueError,
        "ratio: 2 on rank 0, 4 on rank 1",
    )
    short = torch.ones(250 + 2 * rank, 2), torch.ones(250 + 2 * rank, 2)
    require_error(
        lambda: context_parallel_compress_kv(kv, kv, mesh, layout=layout, ratio=4, rotation=short),
        ValueError,
        "rotation: expected tables of at least 253 positions; got 25",
    )
    rows, _ = context_parallel_window(kv, mesh, layout=layout, window=8)
    assert rows.shape[1] == 8
