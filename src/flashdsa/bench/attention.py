"""Sparse MLA to time: forward, decode and backward, judged on a few queries and rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench import cases
from flashdsa.problem import D_QK, D_V
from flashdsa.verify import tolerances
from flashdsa.verify.compare import compare, compare_lse

CHANGED = 0.05
"""Share of a list that changes from one query to the next where ids are correlated."""
SHORT = 256
"""Slots in use of every other query where lengths are ragged."""
OWN_ROWS = 2**16
"""Rows of kv with values of their own; longer caches repeat them."""
SORTED_DRAWS = 2**26
"""Numbers that are sorted to draw distinct ids; more keys are drawn with repeats."""


class AttentionInputs(NamedTuple):
    """Operands of sparse MLA; kv of packed rows has 656 bytes in place of 576 values."""

    q: Tensor  # (S, H, 576)
    kv: Tensor  # (S_kv, 576)
    indices: Tensor  # (S, topk) int32
    topk_length: Tensor | None
    attn_sink: Tensor | None

    @property
    def valid(self) -> int:
        """Slots that count, of all queries."""
        return int(self.in_use(slice(None)).sum())

    def in_use(self, query: int | slice) -> Tensor:
        """Whether each slot counts."""
        named = self.indices[query] >= 0
        if self.topk_length is None:
            return named
        slots = torch.arange(self.indices.shape[1], device=named.device)
        return named & (slots < self.topk_length[query, None])


def draw_ids(case: cases.Case, generator: torch.Generator) -> Tensor:
    """int32 (S, topk): distinct and in random order, then -1 where topk is above S_kv; with
    ids="correlated" a query changes CHANGED of the list of the one before it."""
    device, picked = generator.device, min(case.topk, case.s_kv)
    shape = (case.s, case.topk)
    ids = torch.full(shape, -1, dtype=torch.int32, device=device)
    if case.options.get("ids") == "correlated":
        row = torch.randperm(case.s_kv, device=device, generator=generator)[:picked].int()
        changed = (case.s, max(1, round(picked * CHANGED)))
        places = torch.randint(picked, changed, device=device, generator=generator)
        fresh = torch.randint(case.s_kv, changed, device=device, generator=generator).int()
        for query in range(case.s):
            row[places[query]] = fresh[query]
            ids[query, :picked] = row
    elif case.s * case.s_kv <= SORTED_DRAWS:
        order = torch.rand(case.s, case.s_kv, device=device, generator=generator).argsort(1)
        ids[:, :picked] = order[:, :picked].int()
    else:
        ids = torch.randint(case.s_kv, shape, device=device, generator=generator).int()
    return ids


def make_inputs(case: cases.Case, device: str, seed: int) -> AttentionInputs:
    """Standard normal operands; the same seed gives the same values on one kind of device.

    Options: ids; packed: rows of 656 bytes; topk_length: "drawn" from 1 to topk, or "ragged": every
    other query has SHORT slots in use; invalid: 30 % of the slots name no row; sink.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)
    indices = draw_ids(case, generator)
    if case.options.get("invalid"):
        bad = torch.rand(indices.shape, device=device, generator=generator) < 0.3
        indices.masked_fill_(bad, -1)
    lengths = None
    if case.options.get("topk_length") == "drawn":
        drawn = torch.randint(1, case.topk + 1, (case.s,), device=device, generator=generator)
        lengths = drawn.int()
    elif case.options.get("topk_length") == "ragged":
        lengths = torch.full((case.s,), case.topk, dtype=torch.int32, device=device)
        lengths[::2] = min(SHORT, case.topk)
    kv = normal(min(case.s_kv, OWN_ROWS), D_QK).to(cases.DTYPES[case.dtype])
    if case.options.get("packed"):
        kv = flashdsa.quantize_kv(kv)
    kv = kv.repeat(-(-case.s_kv // len(kv)), 1)[: case.s_kv]
    sink = normal(case.h) if case.options.get("sink") else None
    q = normal(case.s, case.h, D_QK).to(cases.DTYPES[case.dtype])
    return AttentionInputs(q, kv, indices, lengths, sink)


def make_forward(case: cases.Case, device: str, seed: int, backend: str) -> cases.Task:
    """`sparse_mla_fwd`. Few queries over packed rows are bound by reading these."""
    x = make_inputs(case, device, seed)
    decode, max_logits = (bool(case.options.get(name)) for name in ("decode", "max_logits"))
    return forward_task(x, backend, decode=decode, max_logits=max_logits)


def forward_task(
    x: AttentionInputs, backend: str, *, decode: bool = False, max_logits: bool = False
) -> cases.Task:
    """The call on some inputs, and how it is judged."""
    options: dict[str, Any] = {"topk_length": x.topk_length, "attn_sink": x.attn_sink}
    if max_logits:
        options["return_max_logits"] = True
    call = partial(flashdsa.sparse_mla_fwd, x.q, x.kv, x.indices, backend=backend, **options)
    device, heads = x.q.device.type, x.q.shape[1]
    work, ceiling = 2.0 * x.valid * heads * (D_QK + D_V), cases.products_ceiling(device)
    if decode:
        work = float(x.valid * x.kv.shape[1] * x.kv.element_size())
        ceiling = cases.reading_ceiling(device)
    return cases.Task(call, lambda found: judge_forward(x, *found), work, ceiling, x)


def judge_forward(
    x: AttentionInputs, out: Tensor, lse: Tensor | None = None, max_logits: Tensor | None = None
) -> cases.Verdict:
    """O (S, H, 512) of a few queries; with lse, as ours gives it, each row, and what is (S, H)."""
    some = cases.judged_queries(len(x.q))
    length = None if x.topk_length is None else x.topk_length[some]
    operands = x.q[some], x.kv, x.indices[some]
    options: dict[str, Any] = {"topk_length": length, "attn_sink": x.attn_sink}
    expected, expected_lse = reference.sparse_mla_fwd(*operands, **options)
    magnitude = None
    if lse is not None:
        magnitude, _ = reference.sparse_mla_fwd(*operands, absolute=True, **options)
    judged = [
        compare(
            "O",
            out[some],
            expected,
            norm_tolerance=tolerances.tolerance("sparse_mla_fwd", "O", x.q.dtype).norm,
            magnitude=magnitude,
            row_tolerance=None if lse is None else tolerances.ROW_TOLERANCE,
            zero_rows=expected_lse[:, 0].isposinf(),
        )
    ]
    limits = tolerances.tolerance("sparse_mla_fwd", "lse", x.q.dtype)
    assert limits.absolute is not None and limits.relative is not None
    rounded = tolerances.F16_ROUNDING if x.kv.dtype == torch.uint8 else 0.0
    close = partial(
        compare_lse,
        absolute=limits.absolute + rounded,
        relative=limits.relative + tolerances.WGMMA_CUT * D_QK / tolerances.WGMMA_K + rounded,
    )
    if lse is not None:
        judged.append(close("lse", lse[some], expected_lse))
    if max_logits is not None:
        largest = reference.sparse_mla_max_logits(*operands, topk_length=length)
        judged.append(close("max_logits", max_logits[some], largest))
    findings = [f"{one.output} is off: {one.message}" for one in judged if not one.passed]
    return cases.Verdict({"O": judged[0].norm_error}, findings)


def _one_query(x: AttentionInputs, query: int) -> tuple[slice, Tensor, Tensor]:
    """Its slice, the rows of kv that its slots name, and slots that name these."""
    ids = x.indices[query].long()
    rows = x.kv[ids.clamp(min=0)]  # few of a large cache
    slots = torch.arange(len(rows), device=rows.device).where(x.in_use(query), -1)[None].int()
    return slice(query, query + 1), rows, slots


class BackwardInputs(NamedTuple):
    """Operands of `mla_bwd`, besides those of the forward."""

    forward: AttentionInputs
    d_out: Tensor
    lse: Tensor
    out: Tensor

    @property
    def full_lse(self) -> Tensor:
        """The logarithm of the whole denominator, in float64."""
        sink = self.forward.attn_sink
        lse = self.lse.double()
        return lse if sink is None else torch.logaddexp(lse, sink.double().expand_as(lse))


def make_backward(case: cases.Case, device: str, seed: int, backend: str) -> cases.Task:
    """`mla_bwd`, after one forward. Option: deterministic."""
    deterministic = bool(case.options.get("deterministic"))
    return backward_task(make_inputs(case, device, seed), seed, backend, deterministic)


def backward_task(
    x: AttentionInputs, seed: int, backend: str, deterministic: bool = False
) -> cases.Task:
    """The call on some inputs, after one forward, and how it is judged."""
    options: dict[str, Any] = {"topk_length": x.topk_length, "attn_sink": x.attn_sink}
    out, lse = flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend=backend, **options)
    generator = torch.Generator(x.q.device).manual_seed(seed + 1)
    d_out = torch.randn(out.shape, device=x.q.device, generator=generator).to(out.dtype)
    inputs = BackwardInputs(x, d_out, lse, out)
    call = partial(backward_call, inputs, deterministic=deterministic, backend=backend)
    # S and dP again, then dV, dQ and dK: three products of width 576, two of width 512.
    work = 2.0 * x.valid * x.q.shape[1] * (3 * D_QK + 2 * D_V)
    judge, ceiling = partial(judge_backward, inputs), cases.products_ceiling(x.q.device.type)
    return cases.Task(call, lambda found: judge(*found), work, ceiling, inputs)


def backward_call(x: BackwardInputs, deterministic: bool, backend: str) -> tuple[Tensor, ...]:
    """dQ, dKV and, with a sink, its gradient."""
    forward = x.forward
    return flashdsa.mla_bwd(
        forward.q,
        forward.kv,
        x.d_out,
        x.lse,
        x.out,
        forward.indices,
        topk_length=forward.topk_length,
        attn_sink=forward.attn_sink,
        deterministic=deterministic,
        backend=backend,
    )


def judge_backward(
    x: BackwardInputs, dq: Tensor, dkv: Tensor, d_sink: Tensor | None = None
) -> cases.Verdict:
    """dQ of a few queries, dKV of a few rows from all queries that name them, d_sink."""
    forward = x.forward
    limit = tolerances.tolerance("mla_bwd", "dQ", forward.q.dtype).norm
    assert limit is not None
    of_queries, of_rows = [0.0], [0.0]
    for query in cases.judged_queries(len(forward.q)):
        used = x.forward.in_use(query).nonzero()[:, 0]
        if not len(used):
            of_queries.append(0.0 if not dq[query].any() else math.inf)
            continue
        of_queries.append(_dq_error(x, query, dq[query], limit))
        row = int(forward.indices[query, used[0]])
        expected, size = _dkv_row(x, row)
        of_rows.append(float((dkv[row].double() - expected).norm()) / size)
    # One query's or row's roundings spread wider than the whole's, to which `limit` belongs.
    errors = {"dQ": (cases.worst(of_queries), 2 * limit), "dKV": (cases.worst(of_rows), 4 * limit)}
    if d_sink is not None and forward.attn_sink is not None:
        share = (forward.attn_sink.double() - x.full_lse).exp()
        expected = -(share * (x.d_out.double() * x.out.double()).sum(-1)).sum(0)
        errors["d_sink"] = cases.norm_error(d_sink, expected), 1e-2
    return cases.judge_errors(errors)


def _dq_error(x: BackwardInputs, query: int, dq: Tensor, limit: float) -> float:
    """The error of a query's dQ as a share of its norm, brought to `limit`: see `dq_limit`."""
    one, rows, slots = _one_query(x.forward, query)
    q, d_out, lse, out = (whole[one] for whole in (x.forward.q, x.d_out, x.lse, x.out))
    operands, sink = (q, rows, d_out, lse, out, slots), x.forward.attn_sink
    expected, _, _ = reference.mla_bwd(*operands, attn_sink=sink)
    call = reference.MlaBackward(*operands, attn_sink=sink)
    summed, _ = call.magnitude()
    norm = float(expected.norm())
    allowed = limit
    if q.dtype == torch.bfloat16:
        allowed = tolerances.dq_limit(limit, norm, call.dq_rounding())
    size = max(norm, tolerances.NORM_CANCELLATION * float(summed.norm()))
    return float((dq.double() - expected[0]).norm()) / size * limit / allowed


def _dkv_row(x: BackwardInputs, row: int) -> tuple[Tensor, float]:
    """A row of dKV in float64, and its size; a query that names it twice counts twice."""
    forward = x.forward
    named = forward.indices == row
    if forward.topk_length is not None:
        slots = torch.arange(named.shape[1], device=named.device)
        named &= slots < forward.topk_length[:, None]
    times_named = named.sum(1)
    naming = times_named.nonzero()[:, 0]
    q, d_out, out = (one[naming].double() for one in (forward.q, x.d_out, x.out))
    key, scale = forward.kv[row].double(), forward.q.shape[-1] ** -0.5
    p = (scale * (q @ key) - x.full_lse[naming]).exp() * times_named[naming, None]
    dp, delta = d_out @ key[:D_V], (d_out * out).sum(-1)
    ds = p * (dp - delta)
    d_row: Tensor = scale * torch.einsum("sh,shd->d", ds, q)
    d_row[:D_V] += torch.einsum("sh,shd->d", p, d_out)
    # What cancels is given the same roundings: see ROW_CANCELLATION.
    summed = scale * (p * (dp.abs() + delta.abs()) * q.norm(dim=-1)).sum()
    summed = summed + (p * d_out.norm(dim=-1)).sum()
    return d_row, max(float(d_row.norm()), tolerances.ROW_CANCELLATION * float(summed))


def _prefill(name: str, h: int, s_kv: int = 32768, **options: Any) -> cases.Case:
    return cases.Case(4096, s_kv, h, options={"ids": "correlated"} | options, name=name)


FORWARD_CASES = (
    _prefill("H=128, random", 128, 8192, ids="random"),
    _prefill("H=128, correlated", 128),
    _prefill("H=64, random", 64, 8192, ids="random"),
    _prefill("H=64, correlated", 64),
    _prefill("H=32, correlated", 32),
    _prefill("H=16, random", 16, 8192, ids="random"),
    _prefill("H=16, correlated", 16),
    _prefill("H=128, lengths from 1 to 2,048", 128, topk_length="drawn"),
    _prefill("H=128, 30 % of the slots invalid", 128, invalid=True),
    _prefill("H=128, sinks and largest logits", 128, sink=True, max_logits=True),
)
BACKWARD_CASES = (
    *FORWARD_CASES[:7],
    _prefill("H=128, correlated, deterministic", 128, deterministic=True),
)


def decode_case(h: int, requests: int, next_n: int = 1, kind: str = "packed") -> cases.Case:
    """A decode step over 2^22 packed rows, 2.75 GB, or 2^20 of bf16: far above L2.

    Args:
        kind: "packed", "bf16", or "ragged": packed, every other query with few slots in use.
    """
    several = f" x {next_n}" if next_n > 1 else ""
    name = f"H={h}, {requests}{several}" + ("" if kind == "packed" else f", {kind}")
    options: dict[str, Any] = {"decode": True, "next_n": next_n, "packed": kind != "bf16"}
    options |= {"topk_length": "ragged"} if kind == "ragged" else {}
    s_kv = 2**20 if kind == "bf16" else 2**22
    return cases.Case(requests * next_n, s_kv, h, options=options, name=name)


DECODE_CASES = (
    *(decode_case(64, requests) for requests in (1, 8, 32, 128)),
    *(decode_case(128, requests) for requests in (1, 8, 64)),
    decode_case(128, 128, 2),
    *(decode_case(16, requests) for requests in (8, 128)),
    *(decode_case(64, requests, kind="bf16") for requests in (1, 32, 128)),
    *(decode_case(64, requests, kind="ragged") for requests in (32, 512)),
)
_CPU = (cases.Case(dtype="float32"),)
_CPU_DECODE = cases.Case(8, options={"decode": True, "next_n": 1, "packed": True})
OPERATIONS = (
    cases.Operation("sparse_mla_fwd", make_forward, {"cpu": _CPU, "cuda": FORWARD_CASES}),
    cases.Operation(
        "sparse_mla_decode", make_forward, {"cpu": (_CPU_DECODE,), "cuda": DECODE_CASES}
    ),
    cases.Operation("mla_bwd", make_backward, {"cpu": _CPU, "cuda": BACKWARD_CASES}),
)
