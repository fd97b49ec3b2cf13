"""What is measured: each operation's random inputs, its work and the ceiling it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import flashdsa
from flashdsa.problem import D_QK, D_V, INDEX_HEAD_DIM, NUM_INDEX_HEADS, PAGE_BYTES, PAGE_SIZE

OPERATIONS = ("sparse_mla_fwd", "mla_bwd", "indexer", "topk")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Shape:
    """The sizes of a case. The indexer and top-k read `s` as their batch, `s_kv` as its length."""

    s: int = 16
    s_kv: int = 8192
    h: int = 128
    topk: int = 2048
    dtype: str = "float32"

    def quick(self) -> Shape:
        """The same, cut down to what takes a second."""
        return replace(
            self,
            s=min(self.s, 4),
            s_kv=min(self.s_kv, 1024),
            h=min(self.h, 16),
            topk=min(self.topk, 256),
        )


@dataclass(frozen=True)
class Ceiling:
    """What the machine reaches on the plainest code of the same kind; `work` as in Case."""

    name: str
    work: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One call to time. `work` is its floating-point operations, or bytes where unit is GB/s."""

    op: str
    problem: dict[str, int | str]
    unit: str
    work: float
    run: Callable[[], object]
    ceiling: Ceiling


@dataclass(frozen=True)
class AttentionInputs:
    """Random operands of the sparse MLA operations."""

    q: torch.Tensor  # (s, h, 576)
    kv: torch.Tensor  # (s_kv, 576)
    indices: torch.Tensor  # (s, topk) int32, distinct in a row, in random order
    d_out: torch.Tensor  # (s, h, 512)


def attention_inputs(shape: Shape, seed: int = 0) -> AttentionInputs:
    """Standard normal operands. Every query picks distinct rows; -1 fills up where topk > s_kv."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[shape.dtype]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    picked = min(shape.topk, shape.s_kv)
    indices = torch.full((shape.s, shape.topk), -1, dtype=torch.int32)
    for row in indices:
        row[:picked] = torch.randperm(shape.s_kv, generator=generator)[:picked].int()
    return AttentionInputs(
        normal(shape.s, shape.h, D_QK),
        normal(shape.s_kv, D_QK),
        indices,
        normal(shape.s, shape.h, D_V),
    )


def build_case(op: str, shape: Shape, backend: str, seed: int = 0) -> Case:
    """The case of one operation of OPERATIONS, its inputs made."""
    builders = {
        "sparse_mla_fwd": _forward,
        "mla_bwd": _backward,
        "indexer": _indexer,
        "topk": _topk,
    }
    return builders[op](shape, backend, seed)


def _attention_problem(shape: Shape) -> dict[str, int | str]:
    return {
        "S": shape.s,
        "S_kv": shape.s_kv,
        "H": shape.h,
        "topk": shape.topk,
        "dtype": shape.dtype,
    }


def _forward(shape: Shape, backend: str, seed: int) -> Case:
    x = attention_inputs(shape, seed)
    flop = 2 * shape.s * shape.h * shape.topk * (D_QK + D_V)
    run = partial(flashdsa.sparse_mla_fwd, x.q, x.kv, x.indices, backend=backend)
    problem = _attention_problem(shape)
    return Case("sparse_mla_fwd", problem, "GFLOPS", flop, run, matmul_ceiling())


def _backward(shape: Shape, backend: str, seed: int) -> Case:
    x = attention_inputs(shape, seed)
    out, lse = flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend=backend)
    # S and dP again, then dV, dQ and dK: three products of width 576, two of width 512.
    flop = 2 * shape.s * shape.h * shape.topk * (3 * D_QK + 2 * D_V)
    run = partial(flashdsa.mla_bwd, x.q, x.kv, x.d_out, lse, out, x.indices, backend=backend)
    return Case("mla_bwd", _attention_problem(shape), "GFLOPS", flop, run, matmul_ceiling())


def _indexer(shape: Shape, backend: str, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    batch, heads = shape.s, NUM_INDEX_HEADS
    pages = -(-shape.s_kv // PAGE_SIZE)
    keys = torch.randn(pages * PAGE_SIZE, INDEX_HEAD_DIM, generator=generator).bfloat16()
    queries = torch.randn(batch, heads, INDEX_HEAD_DIM, generator=generator).bfloat16()
    cache = torch.empty(pages, PAGE_SIZE, 1, PAGE_BYTES // PAGE_SIZE, dtype=torch.uint8)
    slots = torch.arange(pages * PAGE_SIZE, dtype=torch.int32)
    flashdsa.write_index_k_cache(keys, slots, cache)
    weights = torch.randn(batch, heads, generator=generator)
    q_fp8, folded = flashdsa.quantize_index_q(queries, weights)
    lengths = torch.full((batch,), shape.s_kv, dtype=torch.int32)
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(batch)]).int()
    picked = torch.empty(batch, shape.topk, dtype=torch.int32)
    run = partial(
        flashdsa.dsa_topk_indexer, q_fp8, cache, folded, lengths, table, picked, backend=backend
    )
    flop = 2 * batch * heads * shape.s_kv * INDEX_HEAD_DIM
    problem: dict[str, int | str] = {
        "B": batch,
        "seq_len": shape.s_kv,
        "H": heads,
        "topk": shape.topk,
        "dtype": "float8_e4m3fn",
    }
    return Case("dsa_topk_indexer", problem, "GFLOPS", flop, run, matmul_ceiling())


def _topk(shape: Shape, backend: str, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape.s, shape.s_kv, generator=generator)
    lengths = torch.full((shape.s,), shape.s_kv, dtype=torch.int32)
    run = partial(flashdsa.topk_indices, scores, lengths, shape.topk, backend=backend)
    size = float(scores.numel() * scores.element_size())
    problem: dict[str, int | str] = {
        "B": shape.s,
        "seq_len": shape.s_kv,
        "topk": shape.topk,
        "dtype": "float32",
    }
    read_once = Ceiling("torch.amax of the same scores", size, partial(torch.amax, scores, dim=-1))
    return Case("topk_indices", problem, "GB/s", size, run, read_once)


def matmul_ceiling() -> Ceiling:
    """torch.matmul in fp32 of the forward's own tile: 128 heads x 576 columns x 2048 keys."""
    rows, inner, columns = 128, D_QK, 2048
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    name = f"torch.matmul {rows}x{inner}x{columns} fp32"
    return Ceiling(name, 2.0 * rows * inner * columns, partial(torch.matmul, left, right))
