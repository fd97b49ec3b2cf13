"""A row of kv that is not finite reaches the queries that name it, and no other: forward, backward.

Kernels that take neighbouring queries together multiply its values with zeros for the others.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from tests.support.hopper_gpu import HOPPER_GPU

NAMED, BY = 7, 1
"""The row, and the query that names it."""
NOT_FINITE = {"NaN": (3, float("nan")), "inf": (300, float("inf")), "RoPE": (570, float("nan"))}
"""Of a row: column and value."""


def cases(num_sms: int) -> list[Any]:
    """Heads and queries: as many queries as are taken together on so many SMs, and one more."""
    return [
        (8, 7 * num_sms + 9),
        (16, 3 * num_sms + 5),
        (32, num_sms + 2),
        (64, 2 * num_sms + 1),
        (128, num_sms + 1),
    ]


class Call:
    """Operands; every query names six of the first `num_keys` rows, the first of which is NAMED for
    one query alone; the third has no valid slot."""

    def __init__(self, heads: int, queries: int, what: str, device: str, d_qk: int = 576) -> None:
        generator = torch.Generator().manual_seed(heads)
        num_keys = 12
        self.q = torch.randn(queries, heads, d_qk, generator=generator).bfloat16().to(device)
        kv = torch.randn(num_keys, d_qk, generator=generator).bfloat16()
        column, value = NOT_FINITE[what]
        kv[NAMED, column] = value
        self.kv = kv.to(device)
        self.dO = torch.randn(queries, heads, 512, generator=generator).bfloat16().to(device)
        rows = torch.tensor([row for row in range(num_keys) if row != NAMED])
        order = torch.rand(queries, len(rows), generator=generator).argsort(1)
        indices = rows[order[:, :6]].int()
        indices[BY, 0] = NAMED
        indices[2] = -1
        self.indices = indices.to(device)
        sink = torch.randn(heads, generator=generator)
        sink[-1] = float("inf")
        self.attn_sink = sink.to(device)
        named = self.indices[BY][self.indices[BY] >= 0].long().unique()
        self.other_rows = torch.tensor([r for r in range(num_keys) if r not in named.tolist()])
        self.others = torch.tensor([query for query in range(queries) if query != BY])

    def forward(self, backend: str) -> tuple[Tensor, Tensor]:
        """O and lse."""
        out, lse, _ = flashdsa.sparse_mla_fwd(
            self.q,
            self.kv,
            self.indices,
            attn_sink=self.attn_sink,
            backend=backend,
            # Kernels that other tests compile, too.
            topk_length=torch.full((len(self.q),), 6).int() if backend == "emulate-sm90" else None,
            return_max_logits=True,
        )
        return out.cpu(), lse.cpu()

    def backward(self, backend: str, *, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dKV and d_sink, from results of the CPU."""
        operands = (self.q.cpu(), self.kv.cpu(), self.indices.cpu())
        sink = self.attn_sink.cpu()
        out, lse = flashdsa.sparse_mla_fwd(*operands, attn_sink=sink, backend="cpu")
        device = "cpu" if backend == "cpu" else self.q.device
        given = (self.q, self.kv, self.dO, lse, out, self.indices)
        gradients = flashdsa.mla_bwd(
            *(x.to(device) for x in given),
            attn_sink=self.attn_sink.to(device),
            deterministic=deterministic,
            backend=backend,
        )
        return tuple(x.cpu() for x in gradients)

    def judge_forward(self, backend: str) -> None:
        """All but one query are as the reference says; that one's O is not finite."""
        out, lse = self.forward(backend)
        wanted, wanted_lse = reference.sparse_mla_fwd(
            self.q.cpu(), self.kv.cpu(), self.indices.cpu(), attn_sink=self.attn_sink.cpu()
        )[:2]
        assert not out[BY, 0].isfinite().all()
        is_close(out[self.others], wanted[self.others])
        torch.testing.assert_close(
            lse[self.others].double(), wanted_lse[self.others], rtol=1e-3, atol=1e-3
        )

    def judge_backward(self, backend: str, *, deterministic: bool = False) -> None:
        """dQ of all but one query, and dKV of rows that it does not name, are as of the CPU."""
        got = self.backward(backend, deterministic=deterministic)
        wanted = self.backward("cpu", deterministic=False)
        assert not got[0][BY, 0].isfinite().all() and not got[1][NAMED].isfinite().all()
        is_close(got[0][self.others], wanted[0][self.others].double())
        is_close(got[1][self.other_rows], wanted[1][self.other_rows].double())


def is_close(got: Tensor, wanted: Tensor) -> None:
    """Every row is finite and within 1% of its norm."""
    assert wanted.isfinite().all()
    error = (got.double() - wanted).norm(dim=-1)
    assert bool((error <= 0.01 * wanted.norm(dim=-1) + 1e-6).all()), error.max()


def emulation(backend: str) -> AbstractContextManager[Any]:
    """A small device, or none."""
    if not backend.startswith("emulate"):
        return nullcontext()
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    from flashdsa.backends.emulated.devices import SMALL
    from flashdsa.backends.emulated.runner import emulation as on

    return on(SMALL)


EMULATED = [
    pytest.param(heads, queries, marks=pytest.mark.slow if heads == 32 else ())
    for heads, queries in cases(4)
    if heads in (16, 32)
]
"""Two of 32 heads take the path of four of 16: a second size."""


@pytest.mark.parametrize("what", NOT_FINITE)
@pytest.mark.parametrize("heads", [8, 128])
def test_on_the_cpu(heads: int, what: str) -> None:
    call = Call(heads, 5, what, "cpu")
    call.judge_forward("cpu")
    call.judge_backward("cpu")


class Padded:
    """Queries of two sources as servers pad them: ids and lengths of all rows of a graph; those
    after the real ones name slot 0 of both caches, which holds NaN, once."""

    def __init__(self, heads: int, queries: int, real: int, packed: bool, device: str) -> None:
        generator = torch.Generator().manual_seed(heads)
        q = torch.randn(queries, heads, 512, generator=generator).bfloat16()
        sources = [torch.randn(count, 512, generator=generator).bfloat16() for count in (90, 40)]
        ids = [
            torch.randint(1, len(kv), (queries, topk), generator=generator).int()
            for kv, topk in zip(sources, (20, 7), strict=True)
        ]
        lengths = [torch.randint(1, x.shape[1] + 1, (queries,), generator=generator) for x in ids]
        if packed:
            sources = [flashdsa.quantize_kv(kv, kv_format="v4") for kv in sources]
        for kv, x, length in zip(sources, ids, lengths, strict=True):
            kv[0] = 0xFF if packed else torch.nan
            x[real:], length[real:] = 0, 1
        self.real = real
        self.q, self.kv, self.extra_kv = (x.to(device) for x in (q, *sources))
        self.lists = [
            {"indices": ids[0], "topk_length": lengths[0].int()},
            {"extra_indices": ids[1], "extra_topk_length": lengths[1].int()},
        ]

    def judge(self, backend: str) -> None:
        """Real queries are as the reference says, padded ones are not finite."""
        lists = {name: x for one in self.lists for name, x in one.items()}
        on = {name: x.to(self.q.device) for name, x in lists.items()}
        out, lse = flashdsa.sparse_mla_fwd(
            self.q, self.kv, extra_kv=self.extra_kv, **on, backend=backend
        )
        values = [self.kv.cpu(), self.extra_kv.cpu()]
        if self.kv.dtype == torch.uint8:
            values = [reference.unpack_kv(x, "v4") for x in values]
        kv, joined = reference.join_sources(values[0], extra_kv=values[1], **lists)
        wanted, wanted_lse = reference.sparse_mla_fwd(self.q.cpu(), kv, joined)[:2]
        assert not out[self.real :].isfinite().all(dim=-1).any()
        is_close(out[: self.real].cpu(), wanted[: self.real])
        torch.testing.assert_close(
            lse[: self.real].cpu().double(), wanted_lse[: self.real], rtol=1e-3, atol=1e-3
        )


PADDED = [
    pytest.param(*sizes, packed, id=f"{sizes[0]} heads, {'packed' if packed else 'bf16'}")
    for packed in (False, True)
    for sizes in ((16, 3 * 132 + 5, 390), (64, 8, 5), (128, 140, 100))
]
"""Heads, queries, those that are real; groups of few heads, clusters and tiles by stream-K."""


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "packed"])
@pytest.mark.parametrize("heads", [8, 64])
def test_padded_queries_that_name_slot_0(heads: int, packed: bool) -> None:
    Padded(heads, 8, 5, packed, "cpu").judge("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_padded_queries_on_hopper(packed: bool) -> None:
    with emulation("emulate-sm90"):
        Padded(32, 7, 4, packed, "cpu").judge("emulate-sm90")


@pytest.mark.parametrize("what", ["NaN", pytest.param("inf", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("heads", "queries"), EMULATED)
def test_forward_of_hopper(heads: int, queries: int, what: str) -> None:
    with emulation("emulate-sm90"):
        Call(heads, queries, what, "cpu").judge_forward("emulate-sm90")


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_forward_of_blackwell(heads: int) -> None:
    with emulation("emulate-sm100"):
        Call(heads, 3, "NaN", "cpu").judge_forward("emulate-sm100")


@pytest.mark.parametrize(
    ("heads", "d_qk", "deterministic"),
    [
        (8, 512, False),  # a kernel that other tests compile, too
        pytest.param(16, 576, False, marks=pytest.mark.slow),
        pytest.param(32, 576, True, marks=pytest.mark.slow),
    ],
)
def test_backward_of_hopper(heads: int, d_qk: int, deterministic: bool) -> None:
    with emulation("emulate-sm90"):
        call = Call(heads, 9, "RoPE" if deterministic else "NaN", "cpu", d_qk)
        call.judge_backward("emulate-sm90", deterministic=deterministic)


@pytest.mark.slow
def test_backward_of_hopper_with_a_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four queries of 64 heads, a launch each: the second group is of the NaN's query."""
    from flashdsa.backends.sm90 import mla_bwd_grouped
    from flashdsa.heuristics.h200 import Backward

    monkeypatch.setattr(Backward, "RATIO", {64: 8.0})
    monkeypatch.setattr(Backward, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(Backward, "MOST_LENGTH", 4.0)
    monkeypatch.setattr(mla_bwd_grouped, "MOST_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(sys.modules[__name__], "BY", 5)
    with emulation("emulate-sm90") as emulator:
        Call(64, 9, "NaN", "cpu").judge_backward("emulate-sm90")
    # A sample, lists and their choice, the parts, the gradient of the sinks.
    assert len(emulator.setups) == 6 + 3 * 4 + 1, "the grouped kernels were not launched in parts"


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_backward_of_blackwell(heads: int) -> None:
    with emulation("emulate-sm100"):
        Call(heads, 3, "NaN", "cpu").judge_backward("emulate-sm100")


@pytest.mark.parametrize("what", NOT_FINITE)
@pytest.mark.parametrize(("heads", "queries"), cases(132))
class TestOnHopper:
    """The same on the GPU."""

    pytestmark = HOPPER_GPU

    def test_forward(self, heads: int, queries: int, what: str) -> None:
        Call(heads, queries, what, "cuda").judge_forward("sm90")

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_backward(self, heads: int, queries: int, what: str, deterministic: bool) -> None:
        Call(heads, queries, what, "cuda").judge_backward("sm90", deterministic=deterministic)


@pytest.mark.parametrize(("heads", "queries", "real", "packed"), PADDED)
class TestPaddedOnHopper:
    """The same on the GPU."""

    pytestmark = HOPPER_GPU

    def test_forward(self, heads: int, queries: int, real: int, packed: bool) -> None:
        Padded(heads, queries, real, packed, "cuda").judge("sm90")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("column", "of_out"), [(300, False), (570, True)], ids=["latent", "RoPE"])
def test_a_logit_of_minus_infinity_weighs_nothing(column: int, of_out: bool, backend: str) -> None:
    """But 0 times what is not finite is NaN: of latent columns in O and dKV, of any in dQ."""
    call = Call(8, 4, "inf", "cpu")
    call.kv[NAMED] = call.kv[NAMED - 1]
    call.kv[NAMED, column] = -torch.inf
    call.q[BY, :, column] = call.q[BY, :, column].abs()
    given = call.q, call.kv, call.indices
    out, lse = flashdsa.sparse_mla_fwd(*given, backend=backend)
    dq, dkv = flashdsa.mla_bwd(*given[:2], call.dO, lse, out, call.indices, backend=backend)
    assert lse[BY].isfinite().all() and not dq[BY].isfinite().all()
    assert {bool(x.isfinite().all()) for x in (out[BY], dkv[NAMED])} == {of_out}
    assert all(x[call.others].isfinite().all() for x in (out, dq))
    assert dkv[call.other_rows].isfinite().all()
