"""What is checked on two or four ranks, each function on every rank; the group is there already."""

from __future__ import annotations

import runpy
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import flashdsa
from flashdsa.distributed import (
    ContextParallelSparseMLA,
    SequenceLayout,
    context_parallel_sparse_mla,
    context_parallel_topk_indexer,
    context_parallel_window,
    gather_latents,
)
from tests.distributed.inputs import D_V, TOPK, Result, Whole, one_process, require_error, whole
from tests.distributed.ranks import ROOT

DKV_LIMITS = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2e-4}
"""Of the sum's order; bf16: a sum near the middle of two values may be rounded to the other."""


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]


def layouts(seq_len: int, mesh: DeviceMesh | dist.ProcessGroup) -> list[SequenceLayout]:
    """One of each kind."""
    return [
        SequenceLayout.zigzag(seq_len, mesh),
        SequenceLayout.contiguous(seq_len, mesh),
        SequenceLayout.interleaved(seq_len, mesh),
        SequenceLayout.packed((0, seq_len // 3, seq_len), mesh),
    ]


def spread(x: Whole, layout: SequenceLayout) -> Whole:
    """This rank's part."""
    return Whole(
        layout.shard(x.q),
        layout.shard(x.kv),
        layout.shard(x.positions, padding=-1),
        x.sink,
        layout.shard(x.d_out),
    )


def on_ranks(x: Whole, layout: SequenceLayout, mesh: DeviceMesh, **options: object) -> Result:
    """O, dQ, dKV of this rank's rows, and the sink's gradient, added over the ranks."""
    local = spread(x, layout)
    q, kv, sink = (one.clone().requires_grad_() for one in (local.q, local.kv, local.sink))
    options = {"attn_sink": sink, "ids": "positions", "layout": layout, "d_v": D_V} | options
    out = context_parallel_sparse_mla(q, kv, local.positions, mesh, **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(out, (q, kv, sink), local.d_out)
    dist.all_reduce(gradients[2])
    return Result(out.detach(), *gradients)


def norm_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def require_same(found: Result, expected: Result, layout: SequenceLayout, dkv_limit: float) -> None:
    """O and dQ bit by bit, dKV and d_sink up to the order of the sums; zeros in padding."""
    assert torch.equal(found.out, layout.shard(expected.out)), layout
    assert torch.equal(found.dq, layout.shard(expected.dq)), layout
    error = norm_error(layout.unshard(found.dkv), expected.dkv)
    assert error <= dkv_limit, f"{layout}: dKV is off by {error}"
    assert (found.dkv[layout.positions < 0] == 0).all(), layout
    assert norm_error(found.d_sink, expected.d_sink) <= 1e-6, layout


def check_attention_equals_one_process() -> None:
    mesh = _mesh()
    for dtype, seq_len in ((torch.float64, 300), (torch.float32, 513), (torch.bfloat16, 300)):
        x = whole(seq_len, dtype)
        expected = one_process(x)
        for layout in layouts(seq_len, mesh):
            require_same(on_ranks(x, layout, mesh), expected, layout, DKV_LIMITS[dtype])


def check_short_sequences_leave_ranks_empty() -> None:
    mesh = _mesh()
    x = whole(50, torch.float32)  # one page: all ranks but one have padding only
    expected = one_process(x)
    for layout in layouts(50, mesh):
        require_same(on_ranks(x, layout, mesh), expected, layout, DKV_LIMITS[torch.float32])


def check_ranks_may_have_different_numbers_of_queries() -> None:
    mesh = _mesh()
    x = whole(200, torch.float32)
    layout = SequenceLayout.zigzag(200, mesh)
    expected = one_process(x)
    mine = slice(0, 0) if mesh.get_local_rank() == 0 else slice(60, 130)
    out = context_parallel_sparse_mla(
        x.q[mine],
        layout.shard(x.kv),
        layout.key_row(x.positions[mine]),
        mesh,
        attn_sink=x.sink,
        d_v=D_V,
    )
    assert torch.equal(out, expected.out[mine])


def check_options_of_the_gradients_wire() -> None:
    mesh = _mesh()
    x = whole(300, torch.bfloat16)
    expected = one_process(x)
    layout = SequenceLayout.zigzag(300, mesh)
    exact = one_process(Whole(*(one.double() if one.is_floating_point() else one for one in x)))
    for options in (
        {"deterministic": True},
        {"deterministic": True, "grad_wire": "bf16"},
        {"save_gathered": True},
    ):
        found = on_ranks(x, layout, mesh, **options)
        limit = 3e-3 if "grad_wire" in options else DKV_LIMITS[torch.bfloat16]
        require_same(found, expected, layout, limit)
        again = on_ranks(x, layout, mesh, **options)
        assert torch.equal(found.dkv, again.dkv), options
        assert norm_error(layout.unshard(found.dkv), exact.dkv) <= 3.5e-3, options


def check_ordered_sums_by_hand() -> None:
    """What `deterministic` adds up: every rank's own share, rank 0's first, in fp32."""
    mesh = _mesh()
    layout = SequenceLayout.zigzag(300, mesh)
    mine = slice(layout.rank * layout.num_local, (layout.rank + 1) * layout.num_local)
    for dtype, wire in (
        (torch.float32, "fp32"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "bf16"),
    ):
        x = whole(300, dtype)
        local = spread(x, layout)
        rows = gather_latents(local.kv, mesh)
        assert isinstance(rows, Tensor)
        slots = layout.key_row(local.positions)
        out, lse = flashdsa.sparse_mla_fwd(local.q, rows, slots, d_v=D_V, attn_sink=x.sink)
        share = flashdsa.mla_bwd(
            local.q, rows, local.d_out, lse, out, slots, attn_sink=x.sink, deterministic=True
        )[1]
        shares = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, share)
        if wire == "bf16":
            shares = [one.bfloat16().float() for one in shares]
        total = shares[0]
        for one in shares[1:]:
            total = total + one
        found = on_ranks(x, layout, mesh, deterministic=True, grad_wire=wire)
        assert torch.equal(found.dkv, total[mine].to(dtype)), (dtype, wire)


def check_gathered_by_hand() -> None:
    mesh = _mesh()
    x = whole(300, torch.float32)
    layout = SequenceLayout.zigzag(300, mesh)
    expected = one_process(x)
    local = spread(x, layout)
    handle = gather_latents(local.kv, mesh, async_op=True)
    require_same(on_ranks(x, layout, mesh, kv_gathered=handle), expected, layout, 3e-7)
    # The differentiable gather, with the one-process operation behind it.
    kv = local.kv.clone().requires_grad_()
    rows = gather_latents(kv, mesh)
    out = flashdsa.sparse_mla(
        local.q, rows, layout.key_row(local.positions), d_v=D_V, attn_sink=x.sink
    )
    (dkv,) = torch.autograd.grad(out, kv, local.d_out)
    assert norm_error(layout.unshard(dkv), expected.dkv) <= 3e-7


def check_fp8_rows_travel() -> None:
    mesh = _mesh()
    layout = SequenceLayout.zigzag(300, mesh)
    x = torch.arange(600).view(300, 2).to(torch.float8_e4m3fn)
    local = layout.shard(x)
    rows, handle = gather_latents(local, mesh), gather_latents(local, mesh, async_op=True)
    assert isinstance(rows, Tensor) and not isinstance(handle, Tensor)
    window, _ = context_parallel_window(local, mesh, layout=layout, window=300)
    ordered = window if layout.rank == 0 else window[: len(x)]
    for found in (
        layout.restore(rows),
        layout.restore(handle.wait()),
        layout.unshard(local),
        ordered,
    ):
        assert found.dtype == x.dtype
        assert torch.equal(found.float(), x.float()[: len(found)])


def check_checkpointing_and_collectives_seen() -> None:
    mesh = _mesh()
    x = whole(300, torch.float32)
    layout = SequenceLayout.zigzag(300, mesh)
    expected = one_process(x)
    local = spread(x, layout)
    q, kv = local.q.clone().requires_grad_(), local.kv.clone().requires_grad_()

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        rows = layout.key_row(local.positions)
        return context_parallel_sparse_mla(q, kv, rows, mesh, d_v=D_V, attn_sink=x.sink)

    out = checkpoint(attend, q, kv, use_reentrant=False)
    dq, dkv = torch.autograd.grad(out, (q, kv), local.d_out)
    require_same(Result(out.detach(), dq, dkv, expected.d_sink), expected, layout, 3e-7)
    with CommDebugMode() as seen:
        torch.autograd.grad(attend(q, kv), (q, kv), local.d_out)
    counts = Counter({str(op).rpartition(".")[2]: n for op, n in seen.get_comm_counts().items()})
    assert counts == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}, counts


def check_autocast() -> None:
    """As with operands that were cast by hand, and so they are sent; gradients in fp32."""
    mesh = _mesh()
    x = whole(300, torch.float32)
    layout = SequenceLayout.zigzag(300, mesh)
    cast = Whole(x.q.bfloat16(), x.kv.bfloat16(), x.positions, x.sink, x.d_out.bfloat16())
    expected = on_ranks(cast, layout, mesh, deterministic=True)
    local = spread(x, layout)
    inputs = q, kv, sink = [x.clone().requires_grad_() for x in (local.q, local.kv, local.sink)]
    for save_gathered in (None, False, True):
        options: dict[str, object] = {}
        with torch.autocast("cpu", torch.bfloat16):
            if save_gathered is not None:
                handle = gather_latents(kv, mesh, async_op=True)
                options = {"kv_gathered": handle, "save_gathered": save_gathered}
            out = context_parallel_sparse_mla(
                q,
                kv,
                layout.key_row(local.positions),
                mesh,
                d_v=D_V,
                attn_sink=sink,
                deterministic=True,
                **options,  # type: ignore[arg-type]
            )
        gradients = torch.autograd.grad(out, inputs, local.d_out.bfloat16())
        dist.all_reduce(gradients[2])
        assert torch.equal(out, expected.out) and out.dtype == torch.bfloat16
        for mine, wanted in zip(gradients, expected[1:], strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, wanted.float()), options


def check_compiled() -> None:
    mesh = _mesh()
    x = whole(300, torch.bfloat16)
    layout = SequenceLayout.zigzag(300, mesh)
    local = spread(x, layout)
    expected = one_process(x)

    def attend(q: Tensor, kv: Tensor, positions: Tensor) -> Tensor:
        return context_parallel_sparse_mla(
            q * 1, kv, positions, mesh, d_v=D_V, attn_sink=x.sink, layout=layout, ids="positions"
        )

    q, kv = local.q.clone().requires_grad_(), local.kv.clone().requires_grad_()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, kv, local.positions)
    dq, dkv = torch.autograd.grad(out, (q, kv), local.d_out)
    found = Result(out.detach(), dq, dkv, expected.d_sink)
    require_same(found, expected, layout, DKV_LIMITS[torch.bfloat16])


def check_compiled_by_inductor() -> None:
    """Attention, with sums in the order of ranks, and the indexer."""
    mesh = _mesh()
    x = whole(300, torch.bfloat16)
    layout = SequenceLayout.zigzag(300, mesh)
    local = spread(x, layout)
    expected = one_process(x)

    def attend(q: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        return context_parallel_sparse_mla(
            q * 1, kv, slots, mesh, d_v=D_V, attn_sink=x.sink, grad_wire="bf16"
        )

    q, kv = local.q.clone().requires_grad_(), local.kv.clone().requires_grad_()
    out = torch.compile(attend, fullgraph=True)(q, kv, layout.key_row(local.positions))
    dq, dkv = torch.autograd.grad(out, (q, kv), local.d_out)
    require_same(Result(out.detach(), dq, dkv, expected.d_sink), expected, layout, 3e-3)

    def select(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return context_parallel_topk_indexer(q, k, weights, mesh, layout=layout, topk=TOPK)

    generator = torch.Generator().manual_seed(1)
    q8 = torch.randn(layout.num_local, 4, 128, generator=generator).to(torch.float8_e4m3fn)
    k = torch.randn(layout.num_local, 128, generator=generator).bfloat16()
    weights = torch.rand(layout.num_local, 4, generator=generator)
    compiled = torch.compile(select, fullgraph=True)(q8, k, weights)
    assert torch.equal(compiled, select(q8, k, weights))


def check_compiled_ranks_that_differ() -> None:
    """Compiled code raises on every rank too, before anything is sent."""
    mesh = _mesh()
    rows = 64 * (1 + mesh.get_local_rank())
    q, kv = torch.ones(2, 2, 8), torch.ones(rows, 8)
    slots = torch.zeros(2, 3, dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        return context_parallel_sparse_mla(q, kv, slots, mesh, d_v=4)

    require_error(
        lambda: attend(q, kv, slots),
        ValueError,
        "kv_local: float32 [64, 8] on cpu on rank 0, float32 [128, 8] on cpu on rank 1",
    )


def check_dtensors() -> None:
    mesh = _mesh()
    x = whole(256, torch.float32)
    layout = SequenceLayout.zigzag(256, mesh)
    expected = one_process(x)
    local = spread(x, layout)

    def placed(part: Tensor) -> DTensor:
        return DTensor.from_local(part, mesh, [Shard(0)])

    q, kv = placed(local.q).requires_grad_(), placed(local.kv).requires_grad_()
    slots = placed(layout.key_row(local.positions))
    out = context_parallel_sparse_mla(q, kv, slots, mesh, d_v=D_V, attn_sink=x.sink)
    assert isinstance(out, DTensor) and out.placements == (Shard(0),)
    assert out.shape == (256, *expected.out.shape[1:]), out.shape
    dq, dkv = torch.autograd.grad(out, (q, kv), placed(local.d_out))
    assert isinstance(dkv, DTensor) and dkv.placements == (Shard(0),)
    found = Result(out.to_local().detach(), dq.to_local(), dkv.to_local(), expected.d_sink)
    require_same(found, expected, layout, 3e-7)
    replicated = DTensor.from_local(local.kv, mesh, [Replicate()])
    _require_error("kv_local: expected a DTensor placed as Shard(0); got", q, replicated, slots)
    _require_error("kv_local: expected a DTensor, as q_local is", q, local.kv, slots)


def _require_error(start: str, q: Tensor, kv: Tensor, slots: Tensor) -> None:
    try:
        context_parallel_sparse_mla(q, kv, slots, _mesh(), d_v=D_V)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(start), error
    else:
        raise AssertionError(f"expected the error: {start}")


def check_the_program_of_the_guide() -> None:
    """In this process's group, which it neither makes nor ends."""
    ours = ("init_process_group", "destroy_process_group")
    with patch.multiple(dist, **{name: lambda *_: None for name in ours}):
        names = runpy.run_path(str(ROOT / "examples/context_parallel.py"))
    assert names["decoded"].shape == (2, 8 // dist.get_world_size(), 512)
    assert names["sink"].grad.isfinite().all() and names["sink"].grad.any()


class _Attention(nn.Module):
    def forward(self, q: Tensor, kv: Tensor, indices: Tensor, *, attn_sink: Tensor) -> Tensor:
        return flashdsa.sparse_mla(q, kv, indices, d_v=D_V, attn_sink=attn_sink)


def check_parallel_style() -> None:
    mesh = _mesh()
    x = whole(300, torch.float32)
    layout = SequenceLayout.zigzag(300, mesh)
    expected = one_process(x)
    local = spread(x, layout)
    model = nn.ModuleDict({"inner": _Attention()})
    parallelize_module(model, mesh, {"inner": ContextParallelSparseMLA(layout)})
    q, kv = local.q.clone().requires_grad_(), local.kv.clone().requires_grad_()
    for arguments, names in (
        ((q, kv, local.positions), {}),
        ((q,), {"indices": local.positions, "kv": kv}),
    ):
        out = model["inner"](*arguments, **names, attn_sink=x.sink)
        dq, dkv = torch.autograd.grad(out, (q, kv), local.d_out)
        found = Result(out.detach(), dq, dkv, expected.d_sink)
        require_same(found, expected, layout, DKV_LIMITS[torch.float32])


def check_indexer_equals_one_process() -> None:
    mesh = _mesh()
    generator = torch.Generator().manual_seed(1)
    heads, topk = 4, TOPK
    for seq_len in (300,):
        k = torch.randn(seq_len, 128, generator=generator).bfloat16()
        k[1:] = k[torch.arange(seq_len - 1) // 9 * 9]  # plateaus of equal scores
        q = torch.randn(seq_len, heads, 128, generator=generator).bfloat16()
        raw = torch.rand(seq_len, heads, generator=generator)
        q8, weights = flashdsa.quantize_index_q(q, raw)
        for layout in layouts(seq_len, mesh):
            expected = _one_process_positions(q8, k, weights, layout, topk)
            parts = layout.shard(q8)
            for from_pages in (False, True):
                with nullcontext() if not from_pages else _without_prefill():
                    indices = context_parallel_topk_indexer(
                        parts, layout.shard(k), layout.shard(weights), mesh, layout=layout,
                        topk=topk, query_chunk=100,
                    )  # fmt: skip
                positions = layout.token_of(indices)
                assert torch.equal(positions, layout.shard(expected, padding=-1)), layout
                assert torch.equal(layout.key_row(positions), indices), layout


def _without_prefill() -> AbstractContextManager[object]:
    """No backend serves `dsa_topk_prefill`: keys are read from their pages."""
    return patch("flashdsa.distributed.indexer.is_served", lambda *_, **__: False)


def _one_process_positions(
    q8: Tensor, k: Tensor, weights: Tensor, layout: SequenceLayout, topk: int
) -> Tensor:
    """Tokens (S, topk) that one process selects, each document's in pages of its own."""
    chosen = torch.full((layout.seq_len, topk), -1, dtype=torch.int32)
    for start, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False):
        pages = -(-(end - start) // 64)
        cache = torch.zeros(pages, 64, 1, 132, dtype=torch.uint8)
        flashdsa.write_index_k_cache(k[start:end], torch.arange(end - start), cache)
        ids = torch.empty(end - start, topk, dtype=torch.int32)
        flashdsa.dsa_topk_indexer(
            q8[start:end],
            cache,
            weights[start:end],
            torch.arange(1, end - start + 1).int(),
            torch.arange(pages).int().expand(end - start, -1),
            ids,
        )
        chosen[start:end] = torch.where(ids < 0, ids, ids + start)
    return chosen
